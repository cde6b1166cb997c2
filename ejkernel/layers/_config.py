"""A model's `config.json`: its settings are read one by one, and all mistakes are told at once."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ejkernel.layers._checkpoint import read_json
from ejkernel.layers._rotary import SCALINGS

_REQUIRED: Any = object()


class Config:
    """Settings by name, of the language model where there are several. What is `null` is as good as not there.

    Each method takes the names that a setting goes by, `a.b` for one in an object, and what it is where none is there.
    What it returns for a mistake does not matter: `check` raises.
    """

    def __init__(self, config: Any) -> None:
        values = _as_dict(config)
        if isinstance(values.get("text_config"), Mapping):
            values = {**values, **values["text_config"]}
        self.values: Mapping[str, Any] = values
        self.mistakes: list[str] = []

    @property
    def model_type(self) -> str:
        return str(self.values.get("model_type"))

    def get(self, *names: str, default: Any = None) -> Any:
        for name in names:
            found: Any = self.values
            for part in name.split("."):
                found = found.get(part) if isinstance(found, Mapping) else None
            if found is not None:
                return found
        return default

    def size(self, *names: str, default: Any = _REQUIRED) -> Any:
        """A positive integer."""
        return self._typed(names, default, "a positive integer", lambda x: type(x) is int and x > 0)

    def number(self, *names: str, default: Any = _REQUIRED) -> Any:
        return self._typed(names, default, "a number", lambda x: type(x) in (int, float))

    def flag(self, *names: str, default: Any = _REQUIRED) -> Any:
        return self._typed(names, default, "true or false", lambda x: type(x) is bool)

    def numbers(self, *names: str, default: Any = _REQUIRED) -> Any:
        """A tuple of them."""
        found = self._typed(
            names,
            default,
            "a list of numbers",
            lambda x: isinstance(x, list | tuple) and all(type(each) in (int, float) for each in x),
        )
        return tuple(found) if isinstance(found, list) else found

    def product(self, name: str, factor: str, default: float) -> Any:
        """The size `name` times the number `factor`, which has to be whole."""
        size, times = self.size(name), self.number(factor, default=default)
        if size is None or times is None:
            return None
        if int(size * times) != size * times:
            self.mistakes.append(f"{factor}: got {times}; expected a number that makes {name}, {size}, a whole one")
        return int(size * times)

    def only(self, name: str, *allowed: Any) -> None:
        """A setting that layers here know but one value of, or a few; `None` among them is that it is not there."""
        if (found := self.get(name)) not in allowed:
            expected = " or ".join("nothing" if each is None else repr(each) for each in allowed)
            self.mistakes.append(f"{name}: got {found!r}; expected {expected}, as the layer has nothing else")

    def rotation(self, kind: str, head_dim: int | None, theta: float = 10000.0, share: float = 1.0) -> dict[str, Any]:
        """`rope_theta`, `rotary_dim` and `rope_scaling` of layers of this kind, from any of the ways to say it."""
        given = self.get(f"rope_parameters.{kind}", "rope_parameters", "rope_scaling", default={})
        if not isinstance(given, Mapping):
            self.mistakes.append(f"rope_parameters: got {type(given).__name__}; expected an object")
            return {}
        given = dict(given)
        name = given.get("rope_type", given.get("type", "default"))
        if name not in SCALINGS:
            self.mistakes.append(f"rope_parameters.rope_type: got {name!r}; expected one of {', '.join(SCALINGS)}")
        theta = given.get("rope_theta") or self.number("rope_theta", default=theta)
        share = given.get("partial_rotary_factor") or self.number("partial_rotary_factor", default=share)
        options = {"rope_theta": float(theta), "rope_scaling": None if name == "default" else given}
        if name != "proportional" and share != 1 and head_dim is not None:
            options["rotary_dim"] = int(head_dim * share)
        return options

    def check(self, model: str) -> None:
        if self.mistakes:
            count = len(self.mistakes)
            first = f"config: got {count} setting{'s' * (count > 1)} that {'do' if count > 1 else 'does'} not fit"
            raise ValueError("\n  ".join([f"{first}; expected those of {model}", *self.mistakes]))

    def _typed(self, names: Sequence[str], default: Any, expected: str, fits: Any) -> Any:
        found = self.get(*names, default=default)
        if found is default and default is not _REQUIRED:
            return default
        if found is _REQUIRED:
            self.mistakes.append(f"{names[0]}: missing; expected {expected}")
        elif not fits(found):
            self.mistakes.append(f"{names[0]}: got {found!r}; expected {expected}")
        else:
            return found
        return None


def _as_dict(config: Any) -> dict[str, Any]:
    """What `from_config` is called with: a dict, what has `to_dict`, or the path of a `config.json` or its folder."""
    if isinstance(config, str | os.PathLike):
        path = Path(config)
        return read_json(path / "config.json" if path.is_dir() else path)
    if isinstance(config, Mapping):
        return dict(config)
    if hasattr(config, "to_dict"):
        return dict(config.to_dict())
    raise TypeError(
        f"config: got {type(config).__name__}; expected what config.json has, its path or an object with to_dict"
    )
