"""A model's `config.json`: settings are read one by one, and all mistakes are reported together."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ejkernel.layers._checkpoint import read_json
from ejkernel.layers._rotary import SCALINGS

_REQUIRED: Any = object()


class Config:
    """Settings by name; of the language model if the config has several models. `null` counts as missing.

    Each method takes the names that a setting has in different files, `a.b` for `b` in the object `a`, and a default
    for files without it. If the setting is wrong, the mistake is recorded for `check`, which raises, and the method
    returns some value of the right type.

    Attributes:
        layer: The index of the layer whose settings are read.
        kind: The kind of that layer.
    """

    def __init__(self, config: Any) -> None:
        values = _as_dict(config)
        if isinstance(values.get("text_config"), Mapping):
            values = {**values, **values["text_config"]}
        self.values: Mapping[str, Any] = values
        self.mistakes: list[str] = []
        self.layer, self.kind = 0, ""

    @property
    def model_type(self) -> str:
        return str(self.values.get("model_type"))

    def get(self, *names: str, default: Any = None) -> Any:
        return self._found(names, default)[1]

    def size(self, *names: str, default: Any = _REQUIRED) -> Any:
        """A positive integer."""
        return self._typed(names, default, "a positive integer", lambda x: type(x) is int and x > 0, 1)

    def number(self, *names: str, default: Any = _REQUIRED) -> Any:
        return self._typed(names, default, "a number", lambda x: type(x) in (int, float), 1.0)

    def flag(self, *names: str, default: Any = _REQUIRED) -> Any:
        return self._typed(names, default, "true or false", lambda x: type(x) is bool, False)

    def numbers(self, *names: str, default: Any = _REQUIRED) -> Any:
        """A tuple of numbers."""

        def fits(x: Any) -> bool:
            return isinstance(x, list | tuple) and all(type(each) in (int, float) for each in x)

        value = self._typed(names, default, "a list of numbers", fits, ())
        return tuple(value) if isinstance(value, list) else value

    def product(self, name: str, factor: str, default: float) -> int:
        """The size `name` times the number `factor`, which has to be an integer."""
        size, times = self.size(name), self.number(factor, default=default)
        if int(size * times) != size * times:
            self.mistakes.append(f"{factor}: got {times}; expected a number that makes {name}, {size}, a whole one")
        return int(size * times)

    def only(self, name: str, *allowed: Any) -> None:
        """Refuses a setting unless it has one of the values that layers support; `None` allows a missing setting."""
        if (value := self.get(name)) not in allowed:
            expected = " or ".join("nothing" if each is None else repr(each) for each in allowed)
            self.mistakes.append(f"{name}: got {value!r}; expected {expected}, as the layer has nothing else")

    def rotation(self, head_dim: int | None, theta: float, share: float = 1.0) -> dict[str, Any]:
        """`rope_theta`, `rotary_dim` and `rope_scaling`, from any of the places where files have them.

        `theta`, and the `share` of `head_dim` that is rotated, are defaults for configs without them.
        """
        places = (f"rope_parameters.{self.kind}", "rope_parameters", "rope_scaling")
        scaling = self.get(*places, default={})
        if not isinstance(scaling, Mapping):
            self.mistakes.append(f"rope_parameters: got {type(scaling).__name__}; expected an object")
            return {}
        name = scaling.get("rope_type", scaling.get("type", "default"))
        if name not in SCALINGS:
            self.mistakes.append(f"rope_parameters.rope_type: got {name!r}; expected one of {', '.join(SCALINGS)}")
        theta = self.number(*(f"{place}.rope_theta" for place in places), "rope_theta", default=theta)
        names = (*(f"{place}.partial_rotary_factor" for place in places), "partial_rotary_factor")
        share = self.number(*names, default=share)
        options = {"rope_theta": float(theta), "rope_scaling": None if name == "default" else dict(scaling)}
        if name != "proportional" and share != 1 and head_dim is not None:
            options["rotary_dim"] = int(head_dim * share)
        return options

    def check(self, model: str) -> None:
        if self.mistakes:
            mistakes = list(dict.fromkeys(self.mistakes))  # a setting may be read twice
            count = len(mistakes)
            first = f"config: got {count} setting{'s' * (count > 1)} that {'do' if count > 1 else 'does'} not fit"
            raise ValueError("\n  ".join([f"{first}; expected those of {model}", *mistakes]))

    def _found(self, names: Sequence[str], default: Any) -> tuple[str, Any]:
        """The first of these settings that the config has, with its name."""
        for name in names:
            found: Any = self.values
            for part in name.split("."):
                found = found.get(part) if isinstance(found, Mapping) else None
            if found is not None:
                return name, found
        return names[0], default

    def _typed(
        self, names: Sequence[str], default: Any, expected: str, fits: Callable[[Any], bool], instead: Any
    ) -> Any:
        name, found = self._found(names, default)
        if found is _REQUIRED:
            self.mistakes.append(f"{name}: missing; expected {expected}")
        elif found is default or fits(found):
            return found
        else:
            self.mistakes.append(f"{name}: got {found!r}; expected {expected}")
        return instead


def _as_dict(config: Any) -> dict[str, Any]:
    """A config as a dict: from a dict, an object with `to_dict`, or the path of a `config.json` or its folder."""
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
