"""Published models: a layer here from the `config.json` and the files of a model that has it."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

from flax import nnx

from ejkernel import _checks
from ejkernel.layers import _weights
from ejkernel.layers._config import Config
from ejkernel.layers._families import MODELS, Mixer, Model

# what comes before `layers.` in published files, and in transformers' modules
_ROOTS = (
    "model.",
    "backbone.",
    "language_model.model.",
    "model.language_model.",
    "language_model.",
    "transformer.",
    "",
)


class Published(nnx.Module):
    """A layer that models are published with: `from_config` makes it as a model has it."""

    @classmethod
    def from_config(
        cls,
        config: Any,
        layer: int,
        weights: _weights.Weights | None = None,
        *,
        prefix: str | None = None,
        rngs: nnx.Rngs | None = None,
        **options: Any,
    ) -> Self:
        """This layer as a model has it, with its sizes and options from the model's `config.json`.

        Args:
            config: The model's `config.json` as a dict, its path or that of its folder, or an object with `to_dict`, as
                transformers' are.
            layer: Which of the model's layers, from 0; it has to be one of this kind.
            weights: The model's, whose are taken: arrays by name, or the path of a safetensors file, of its index or of
                their folder. `None` makes new ones.
            prefix: What this layer's names in `weights` begin with; `None` finds it, as the model is published.
            rngs: Random keys for the initial parameters, where there are no `weights`.
            **options: The layer's own, as `dtype` and `param_dtype`, in place of those of the config.

        Raises:
            ValueError: The model has no such layer, or is not known; or settings, or names and shapes of `weights`, do
                not fit, all of which are listed.
        """
        read = Config(config)
        if type(layer) is not int:
            raise TypeError(f"layer: got {type(layer).__name__}; expected an int")
        model, mixer = _mixer(cls.__name__, read, layer)
        found = {"width": read.size("hidden_size"), **mixer.options(read), **options}
        read.check(model.name)
        if weights is None:
            if rngs is None:
                raise TypeError("rngs: got None; expected nnx.Rngs, or weights to take")
            found.pop("interleaved", None)
            return cls(**found, rngs=rngs)  # type: ignore[call-arg]
        weights = _weights.as_mapping(weights)
        if prefix is None:
            prefix = _prefix(weights, layer, mixer.folders)
        return getattr(cls, mixer.load)(weights, **found, prefix=prefix)


def mixers(config: Any) -> list[tuple[type[Published], ...]]:
    """The layers here that each layer of a published model has: one, several side by side, or none.

    Args:
        config: As `from_config` takes it.

    Examples:
        >>> config = {"model_type": "nemotron_h", "hybrid_override_pattern": "M-*"}
        >>> [[kind.__name__ for kind in kinds] for kinds in mixers(config)]
        [['Mamba2'], [], ['MultiHeadAttention']]
    """
    from ejkernel import layers  # which import this module

    read = Config(config)
    if read.model_type not in MODELS:
        _checks.fail("config", f"model_type {read.model_type!r}", f"one of {', '.join(sorted(MODELS))}")
    model = MODELS[read.model_type]
    kinds = model.kinds(read)
    read.check(model.name)
    return [tuple(getattr(layers, each.layer) for each in model.mixers.get(kind, ())) for kind in kinds]


def _mixer(kind: str, config: Config, layer: int) -> tuple[Model, Mixer]:
    """The model, and the mixer `kind` of its layer `layer`, which `config` reads from here on."""
    with_kind = {name: each for name, each in MODELS.items() if kind in _layers_of(each)}
    if config.model_type not in with_kind:
        expected = f"one that has a {kind}: {', '.join(sorted(with_kind))}"
        _checks.fail("config", f"model_type {config.model_type!r}", expected)
    model = with_kind[config.model_type]
    kinds = model.kinds(config)
    config.check(model.name)
    if not 0 <= layer < len(kinds):
        _checks.fail("layer", layer, f"0 to {len(kinds) - 1}, as {model.name} has {len(kinds)} layers")
    config.layer, config.kind = layer, kinds[layer]
    for mixer in model.mixers.get(config.kind, ()):
        if mixer.layer == kind:
            return model, mixer
    fitting = [name for name, mixers in model.mixers.items() if any(each.layer == kind for each in mixers)]
    numbers = [number for number, name in enumerate(kinds) if name in fitting]
    _checks.fail("layer", f"{layer}, {kinds[layer]}", f"a {kind}, as {model.name} has it in layers {numbers}")


def _layers_of(model: Model) -> set[str]:
    return {mixer.layer for mixers in model.mixers.values() for mixer in mixers}


def _prefix(weights: Mapping[str, Any], layer: int, folders: Sequence[str]) -> str:
    """What the layer's names begin with, of the ways that models are published; the first if there is none."""
    candidates = [f"{root}layers.{layer}.{folder}." for root in _ROOTS for folder in folders]
    return next((each for each in candidates if any(str(name).startswith(each) for name in weights)), candidates[0])
