"""Published weights: arrays by the names of a reference implementation become the parameters of a layer."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ejkernel.layers._checkpoint import Checkpoint

Layer = TypeVar("Layer", bound=nnx.Module)
Shape = tuple[int, ...]
Weights = Mapping[str, Any] | str | os.PathLike[str]

_DTYPES = ("bfloat16", "float16", "float32", "float64")


class Source(NamedTuple):
    """Where a parameter comes from: arrays by name, joined along their first axis, then converted.

    `shape` is that of all arrays together, from the parameter's, and `or_shapes` are others that some files have.
    `convert` gets the layer too. `widths` are the arrays' sizes along the first axis.
    """

    names: Sequence[str]
    shape: Callable[[Shape], Shape] = lambda shape: shape
    convert: Callable[[np.ndarray, Any], np.ndarray] = lambda x, layer: x
    widths: Callable[[Any], Sequence[int]] | None = None
    or_shapes: Callable[[Shape], Sequence[Shape]] = lambda shape: ()


Sources = dict[str, Source]


def linears(**names: str) -> Sources:
    """Projections, `ours="theirs"`: PyTorch's `Linear` has its weight transposed."""
    return {f"{our}.kernel": linear(names[our]) for our in names} | copies(
        {f"{our}.bias": f"{names[our]}.bias" for our in names}
    )


def linear(
    *names: str,
    widths: Callable[[Any], Sequence[int]] | None = None,
    rows: Callable[[np.ndarray, Any], np.ndarray] = lambda x, layer: x,
) -> Source:
    """A projection of the weights of one `Linear`, or of several side by side; `rows` are put in another order."""
    return Source(
        [f"{name}.weight" for name in names],
        lambda shape: shape[::-1],
        lambda x, layer: rows(x, layer).T,
        widths,
    )


def grouped(rows: np.ndarray, widths: Sequence[int], groups: int) -> np.ndarray:
    """Rows of several parts, of these widths, put side by side for each of the groups that all parts have."""
    parts = np.split(rows, np.cumsum(widths)[:-1])
    parts = [part.reshape(groups, -1, *rows.shape[1:]) for part in parts]
    return np.concatenate(parts, 1).reshape(rows.shape)


def copies(names: Mapping[str, str]) -> Sources:
    """Parameters that are stored as they are here, by our path and their name."""
    return {path: Source([name]) for path, name in names.items()}


def one_plus(name: str) -> Source:
    """The scale of a norm that is stored less 1, added in float64: checkpoints are often bfloat16."""
    return Source([name], convert=lambda x, layer: x.astype(np.float64) + 1)


def convolution(*names: str) -> Source:
    """PyTorch's depthwise `Conv1d`, `[channels, 1, size]`; several are the parts of the layer's `convolution`."""
    return Source(
        [f"{name}.weight" for name in names],
        lambda shape: (shape[1], 1, shape[0]),
        lambda x, layer: x[:, 0].T,
        (lambda layer: layer.convolution.widths) if len(names) > 1 else None,
    )


def load(
    kind: Callable[..., Layer],
    arguments: tuple[Any, ...],
    options: dict[str, Any],
    weights: Weights,
    prefix: str,
    layouts: Mapping[str, Sources],
    ignored: Sequence[str] = (),
) -> Layer:
    """The layer `kind(*arguments, **options)` with parameters from `weights`; a `ValueError` lists all mistakes.

    `layouts` are the ways that published weights are named, each with whose they are: where each parameter comes from,
    by its path; those of parameters that the layer does not have, as of biases, are left out. Of the layouts that have
    all of the layer's parameters, it is the first of which most names are found. Only names that begin with `prefix`
    are looked at; `ignored` ones (without it) may be there.
    """
    weights = as_mapping(weights)
    if not isinstance(prefix, str):
        raise TypeError(f"prefix: got {type(prefix).__name__}; expected a string")

    def build() -> Layer:
        return kind(*arguments, **options, rngs=nnx.Rngs(0))

    layer = nnx.eval_shape(build)
    graph, state = nnx.split(layer)
    variables = {".".join(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}
    targets = {path: each.get_value() for path, each in variables.items() if isinstance(each, nnx.Param)}
    found = {name: weights[name] for name in weights if str(name).startswith(prefix)}

    layouts = {reference: sources for reference, sources in layouts.items() if targets.keys() <= sources.keys()}
    expected = {reference: _expected(layer, targets, sources) for reference, sources in layouts.items()}
    reference = max(expected, key=lambda each: sum(prefix + name in found for name in expected[each]))
    sources = layouts[reference]
    _check(found, prefix, expected[reference], ignored, f"{reference} of these sizes")
    # what is no parameter, as rates that follow from the layer's number, is as the layer makes it
    values = nnx.to_pure_dict(nnx.state(build(), nnx.Not(nnx.Param))) if len(targets) < len(variables) else {}
    for path, target in targets.items():
        arrays = [_as_numpy(weights[prefix + name]) for name in sources[path].names]
        # NumPy has no common dtype for some pairs, such as bfloat16 and float16
        joined = np.concatenate([each.astype(target.dtype) for each in arrays]) if len(arrays) > 1 else arrays[0]
        *folders, last = path.split(".")
        place = values
        for folder in folders:
            place = place.setdefault(folder, {})
        place[last] = jnp.asarray(sources[path].convert(joined, layer), target.dtype).reshape(target.shape)
    nnx.replace_by_pure_dict(state, values)
    return nnx.merge(graph, state)


def as_mapping(weights: Any) -> Mapping[str, Any]:
    """Arrays by name: `weights` itself, or those of the files at a path."""
    if isinstance(weights, str | os.PathLike):
        return Checkpoint(weights)
    if not isinstance(weights, Mapping):
        raise TypeError(
            f"weights: got {type(weights).__name__}; expected a dict of arrays by name, or the path of a safetensors "
            "file, of its index or of their folder"
        )
    return weights


def _expected(layer: nnx.Module, targets: Mapping[str, Any], sources: Sources) -> dict[str, list[Shape]]:
    """The shapes that each array may have which the parameters `targets` of the layer come from, by name."""
    expected: dict[str, list[Shape]] = {}
    for path, target in targets.items():
        source = sources[path]
        shapes = [source.shape(target.shape), *source.or_shapes(target.shape)]
        widths = shapes[0][:1] if source.widths is None else source.widths(layer)
        for name, width in zip(source.names, widths, strict=True):
            expected[name] = [(width, *shape[1:]) if source.widths else shape for shape in shapes]
    return expected


def _is_tensor(array: Any) -> bool:
    """Whether this is PyTorch's: told by its methods, as PyTorch is not to be imported."""
    return all(hasattr(array, name) for name in ("detach", "cpu", "float", "numpy"))


def _as_numpy(array: Any) -> np.ndarray:
    if _is_tensor(array):
        array = array.detach().cpu()
        # NumPy cannot hold PyTorch's bfloat16; float32 holds all its numbers
        array = (array.float() if _dtype_of(array) == "bfloat16" else array).numpy()
    return np.asarray(array)


def _dtype_of(array: Any) -> str:
    return str(array.dtype).removeprefix("torch.")


def _check(
    found: Mapping[str, Any],
    prefix: str,
    expected: Mapping[str, list[Shape]],
    ignored: Sequence[str],
    reference: str,
) -> None:
    mistakes = []
    for name, shapes in expected.items():
        array: Any = found.get(prefix + name)
        shape = shapes[0]
        if prefix + name not in found:
            mistakes.append(f"{prefix}{name}: missing; expected shape {shape}")
        elif not isinstance(array, np.ndarray | jax.Array) and not _is_tensor(array):
            mistakes.append(f"{prefix}{name}: got {type(array).__name__}; expected an array")
        elif tuple(array.shape) not in shapes:
            mistakes.append(f"{prefix}{name}: got shape {tuple(array.shape)}; expected {shape}")
        elif _dtype_of(array) not in _DTYPES:
            mistakes.append(f"{prefix}{name}: got dtype {_dtype_of(array)}; expected {', '.join(_DTYPES)}")
        elif getattr(array, "is_meta", False):
            mistakes.append(f"{prefix}{name}: got a tensor on the device meta; expected one with numbers")
    allowed = {prefix + name for name in (*expected, *ignored)}
    mistakes += [f"{name}: unknown" for name in found if name not in allowed]
    if mistakes:
        count = "1 name that does" if len(mistakes) == 1 else f"{len(mistakes)} names that do"
        raise ValueError("\n  ".join([f"weights: got {count} not fit; expected those of {reference}", *mistakes]))
