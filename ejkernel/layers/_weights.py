"""Published weights: arrays by the names of a reference implementation become the parameters of a layer."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

Layer = TypeVar("Layer", bound=nnx.Module)
Weights = Mapping[str, Any]


class Source(NamedTuple):
    """Where a parameter comes from: arrays by name, joined along their first axis, then put as the layer has them."""

    names: Sequence[str]
    # of all of them together, from the parameter's
    shape: Callable[[tuple[int, ...]], tuple[int, ...]]
    convert: Callable[[np.ndarray], np.ndarray]
    # along the first axis, where there are several
    sizes: Sequence[int] | None = None


def linear(name: str) -> Source:
    """PyTorch's `Linear` has its weight the other way around."""
    return Source([f"{name}.weight"], lambda shape: shape[::-1], np.transpose)


def same(name: str) -> Source:
    return Source([name], lambda shape: shape, lambda x: x)


def reshaped(name: str, shape: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Source:
    """The same numbers in the same order; `shape` says theirs from the parameter's."""
    return Source([name], shape, lambda x: x)


def one_plus(name: str) -> Source:
    """The scale of a norm that is stored less 1, added in float64: checkpoints are often bfloat16."""
    return Source([name], lambda shape: shape, lambda x: x.astype(np.float64) + 1)


def convolution(*names: str, sizes: Sequence[int] | None = None) -> Source:
    """PyTorch's depthwise `Conv1d`, `[channels, 1, size]`; several, of channels that stand side by side here."""
    return Source(
        [f"{name}.weight" for name in names], lambda shape: (shape[1], 1, shape[0]), lambda x: x[:, 0].T, sizes
    )


def load(
    build: Callable[[], Layer],
    weights: Weights,
    sources: Callable[[Layer], Mapping[str, Source | None]],
    *,
    prefix: str,
    reference: str,
    ignored: Sequence[str] = (),
) -> Layer:
    """The layer that `build` makes, with parameters from `weights`, whose every mistake is told at once.

    `sources` says where each parameter of the layer comes from, by its path. Only names that begin with `prefix` are
    looked at; `ignored` ones (without it) may be there.
    """
    if not isinstance(weights, Mapping):
        raise TypeError(f"weights: got {type(weights).__name__}; expected a dict of arrays by name")
    if not isinstance(prefix, str):
        raise TypeError(f"prefix: got {type(prefix).__name__}; expected a string")
    layer = nnx.eval_shape(build)
    graph, state = nnx.split(layer)
    parameters = {".".join(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}
    wanted = {path: source for path, source in sources(layer).items() if source is not None}
    if odd := wanted.keys() ^ {path for path, each in parameters.items() if isinstance(each, nnx.Param)}:
        raise NotImplementedError(f"{type(layer).__name__} and where its weights come from differ in {sorted(odd)}")
    expected: dict[str, tuple[int, ...]] = {}
    for path, source in wanted.items():
        whole = source.shape(parameters[path].get_value().shape)
        sizes = whole[:1] if source.sizes is None else source.sizes
        expected |= {name: (size, *whole[1:]) for name, size in zip(source.names, sizes, strict=True)}
    _check(
        {name: weights[name] for name in weights if str(name).startswith(prefix)}, prefix, expected, ignored, reference
    )
    # what is no parameter, as rates that follow from the layer's number, is as the layer makes it
    values = nnx.to_pure_dict(nnx.state(build(), nnx.Not(nnx.Param))) if len(wanted) < len(parameters) else {}
    for path, source in wanted.items():
        aim = parameters[path].get_value()
        arrays = [np.asarray(weights[prefix + name]) for name in source.names]
        # NumPy has no common dtype for some pairs, such as bfloat16 and float16
        joined = np.concatenate([each.astype(aim.dtype) for each in arrays]) if len(arrays) > 1 else arrays[0]
        *folders, last = path.split(".")
        place = values
        for folder in folders:
            place = place.setdefault(folder, {})
        place[last] = jnp.asarray(source.convert(joined), aim.dtype).reshape(aim.shape)
    nnx.replace_by_pure_dict(state, values)
    return nnx.merge(graph, state)


def _check(
    found: Weights, prefix: str, expected: Mapping[str, tuple[int, ...]], ignored: Sequence[str], reference: str
) -> None:
    mistakes = []
    for name, shape in expected.items():
        if prefix + name not in found:
            mistakes.append(f"{prefix}{name}: missing; expected shape {shape}")
        elif not isinstance(found[prefix + name], np.ndarray | jax.Array):
            mistakes.append(f"{prefix}{name}: got {type(found[prefix + name]).__name__}; expected an array")
        elif found[prefix + name].shape != shape:
            mistakes.append(f"{prefix}{name}: got shape {found[prefix + name].shape}; expected {shape}")
        elif not jnp.issubdtype(found[prefix + name].dtype, jnp.floating):
            mistakes.append(f"{prefix}{name}: got dtype {found[prefix + name].dtype}; expected a floating-point dtype")
    allowed = {prefix + name for name in (*expected, *ignored)}
    mistakes += [f"{name}: unknown" for name in found if name not in allowed]
    if mistakes:
        count = "1 name that does" if len(mistakes) == 1 else f"{len(mistakes)} names that do"
        raise ValueError("\n  ".join([f"weights: got {count} not fit; expected those of {reference}", *mistakes]))
