"""Published weights: arrays by the names of a reference implementation become the parameters of a layer."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

Layer = TypeVar("Layer", bound=nnx.Module)
Shape = tuple[int, ...]
Weights = Mapping[str, Any]


class Source(NamedTuple):
    """Where a parameter comes from: arrays by name, joined along their first axis, then converted.

    `shape` is that of all arrays together, from the parameter's. `widths` are their sizes along the first axis.
    """

    names: Sequence[str]
    shape: Callable[[Shape], Shape] = lambda shape: shape
    convert: Callable[[np.ndarray], np.ndarray] = lambda x: x
    widths: Callable[[Any], Sequence[int]] | None = None


Sources = dict[str, Source]


def linears(**names: str) -> Sources:
    """Projections, `ours="theirs"`: PyTorch's `Linear` has its weight transposed."""
    kernels = {
        f"{our}.kernel": Source([f"{names[our]}.weight"], lambda shape: shape[::-1], np.transpose) for our in names
    }
    return kernels | copies({f"{our}.bias": f"{names[our]}.bias" for our in names})


def copies(names: Mapping[str, str]) -> Sources:
    """Parameters that are stored as they are here, by our path and their name."""
    return {path: Source([name]) for path, name in names.items()}


def one_plus(name: str) -> Source:
    """The scale of a norm that is stored less 1, added in float64: checkpoints are often bfloat16."""
    return Source([name], convert=lambda x: x.astype(np.float64) + 1)


def convolution(*names: str) -> Source:
    """PyTorch's depthwise `Conv1d`, `[channels, 1, size]`; several are the parts of the layer's `convolution`."""
    return Source(
        [f"{name}.weight" for name in names],
        lambda shape: (shape[1], 1, shape[0]),
        lambda x: x[:, 0].T,
        (lambda layer: layer.convolution.widths) if len(names) > 1 else None,
    )


def load(
    kind: Callable[..., Layer],
    arguments: tuple[Any, ...],
    options: dict[str, Any],
    weights: Weights,
    prefix: str,
    reference: str,
    sources: Sources,
    ignored: Sequence[str] = (),
) -> Layer:
    """The layer `kind(*arguments, **options)` with parameters from `weights`; a `ValueError` lists all mistakes.

    `sources` says where each parameter comes from, by its path; those of parameters that the layer does not have, as of
    biases, are left out. Only names that begin with `prefix` are looked at; `ignored` ones (without it) may be there.
    """
    if not isinstance(weights, Mapping):
        raise TypeError(f"weights: got {type(weights).__name__}; expected a dict of arrays by name")
    if not isinstance(prefix, str):
        raise TypeError(f"prefix: got {type(prefix).__name__}; expected a string")

    def build() -> Layer:
        return kind(*arguments, **options, rngs=nnx.Rngs(0))

    layer = nnx.eval_shape(build)
    graph, state = nnx.split(layer)
    variables = {".".join(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}
    targets = {path: each.get_value() for path, each in variables.items() if isinstance(each, nnx.Param)}
    if unknown := targets.keys() - sources.keys():
        raise NotImplementedError(f"{type(layer).__name__}: no source of {sorted(unknown)}")
    expected: dict[str, Shape] = {}
    for path, target in targets.items():
        source = sources[path]
        shape = source.shape(target.shape)
        widths = shape[:1] if source.widths is None else source.widths(layer)
        expected |= {name: (width, *shape[1:]) for name, width in zip(source.names, widths, strict=True)}
    found = {name: weights[name] for name in weights if str(name).startswith(prefix)}
    _check(found, prefix, expected, ignored, reference)
    # what is no parameter, as rates that follow from the layer's number, is as the layer makes it
    values = nnx.to_pure_dict(nnx.state(build(), nnx.Not(nnx.Param))) if len(targets) < len(variables) else {}
    for path, target in targets.items():
        arrays = [np.asarray(weights[prefix + name]) for name in sources[path].names]
        # NumPy has no common dtype for some pairs, such as bfloat16 and float16
        joined = np.concatenate([each.astype(target.dtype) for each in arrays]) if len(arrays) > 1 else arrays[0]
        *folders, last = path.split(".")
        place = values
        for folder in folders:
            place = place.setdefault(folder, {})
        place[last] = jnp.asarray(sources[path].convert(joined), target.dtype).reshape(target.shape)
    nnx.replace_by_pure_dict(state, values)
    return nnx.merge(graph, state)


def _check(found: Weights, prefix: str, expected: Mapping[str, Shape], ignored: Sequence[str], reference: str) -> None:
    mistakes = []
    for name, shape in expected.items():
        array = found.get(prefix + name)
        if prefix + name not in found:
            mistakes.append(f"{prefix}{name}: missing; expected shape {shape}")
        elif not isinstance(array, np.ndarray | jax.Array):
            mistakes.append(f"{prefix}{name}: got {type(array).__name__}; expected an array")
        elif array.shape != shape:
            mistakes.append(f"{prefix}{name}: got shape {array.shape}; expected {shape}")
        elif not jnp.issubdtype(array.dtype, jnp.floating):
            mistakes.append(f"{prefix}{name}: got dtype {array.dtype}; expected a floating-point dtype")
    allowed = {prefix + name for name in (*expected, *ignored)}
    mistakes += [f"{name}: unknown" for name in found if name not in allowed]
    if mistakes:
        count = "1 name that does" if len(mistakes) == 1 else f"{len(mistakes)} names that do"
        raise ValueError("\n  ".join([f"weights: got {count} not fit; expected those of {reference}", *mistakes]))
