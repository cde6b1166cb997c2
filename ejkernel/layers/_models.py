"""Layers of published models, from a model's `config.json` and weights."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

from flax import nnx

from ejkernel import _checks
from ejkernel.layers import _weights
from ejkernel.layers._config import Config
from ejkernel.layers._families import MODELS, Mixer, Model

# prefixes of `layers.` in published files, and in transformers' modules
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
    """The base class of all layers: `from_config` creates a layer of a published model."""

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
        """This layer of a published model, with sizes and options from the model's `config.json`.

        Args:
            config: The model's `config.json` as a dict, its path or that of its folder, or an object with `to_dict`,
                as transformers' configs are.
            layer: The index of the layer in the model, from 0; the model has to have this kind of layer there.
            weights: The model's weights: arrays by name, or the path of a safetensors file, of its index or of their
                folder. `None` initialises new parameters.
            prefix: The prefix of this layer's names in `weights`; `None` finds it for models as they are published.
            rngs: Random keys for the initial parameters, if there are no `weights`.
            **options: Arguments of the layer, such as `dtype` and `param_dtype`, which override the config.

        Raises:
            ValueError: The model has no such layer, or is unknown. Or settings, or names and shapes of `weights`, do
                not fit; the message lists all of them.
        """
        read = Config(config)
        if type(layer) is not int:
            raise TypeError(f"layer: got {type(layer).__name__}; expected an int")
        model, mixer = _mixer(cls.__name__, read, layer)
        arguments = {"width": read.size("hidden_size"), **mixer.options(read), **options}
        read.check(model.name)
        if weights is None:
            if rngs is None:
                raise TypeError("rngs: got None; expected nnx.Rngs, or weights to take")
            arguments.pop("interleaved", None)
            return cls(**arguments, rngs=rngs)  # type: ignore[call-arg]
        weights = _weights.as_mapping(weights)
        if prefix is None:
            prefix = _prefix(weights, layer, mixer.folders)
        return getattr(cls, mixer.load)(weights, **arguments, prefix=prefix)


def mixers(config: Any) -> list[tuple[type[Published], ...]]:
    """For each layer of a published model, the layers of this package that it has: one, several in parallel, or none.

    Args:
        config: As `from_config` takes it.

    Examples:
        >>> config = {"model_type": "nemotron_h", "hybrid_override_pattern": "M-*"}
        >>> [[kind.__name__ for kind in kinds] for kinds in mixers(config)]
        [['Mamba2'], [], ['MultiHeadAttention']]
    """
    from ejkernel import layers  # not at the top: layers import this module

    read = Config(config)
    if read.model_type not in MODELS:
        _checks.fail("config", f"model_type {read.model_type!r}", f"one of {', '.join(sorted(MODELS))}")
    model = MODELS[read.model_type]
    kinds = model.kinds(read)
    read.check(model.name)
    return [tuple(getattr(layers, each.layer) for each in model.mixers.get(kind, ())) for kind in kinds]


def _mixer(kind: str, config: Config, layer: int) -> tuple[Model, Mixer]:
    """The model, and the mixer of class `kind` in its layer `layer`, whose settings `config` reads from here on."""
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
    """The prefix of the layer's names among `weights`: the first of the known prefixes with which any name begins."""
    candidates = [f"{root}layers.{layer}.{folder}." for root in _ROOTS for folder in folders]
    return next((each for each in candidates if any(str(name).startswith(each) for name in weights)), candidates[0])
