"""Layers with published weights: arrays by their names in a reference implementation become parameters."""

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
    """How a parameter is computed: arrays are found by name, concatenated along the first axis, and converted.

    Attributes:
        names: The names of the arrays.
        shape: The shape of the concatenated arrays, given the parameter's.
        convert: The parameter, given the concatenated array and the layer.
        widths: The arrays' sizes along the first axis, given the layer; `None` if there is one array.
        or_shapes: Other shapes that some files have, given the parameter's.
    """

    names: Sequence[str]
    shape: Callable[[Shape], Shape] = lambda shape: shape
    convert: Callable[[np.ndarray, Any], np.ndarray] = lambda x, layer: x
    widths: Callable[[Any], Sequence[int]] | None = None
    or_shapes: Callable[[Shape], Sequence[Shape]] = lambda shape: ()


Sources = dict[str, Source]


def linears(**names: str) -> Sources:
    """Sources of kernels and biases of projections, `ours="theirs"`. PyTorch's `Linear` stores weights transposed."""
    kernels = {f"{our}.kernel": linear(their) for our, their in names.items()}
    return kernels | copies({f"{our}.bias": f"{their}.bias" for our, their in names.items()})


def linear(
    *names: str,
    widths: Callable[[Any], Sequence[int]] | None = None,
    rows: Callable[[np.ndarray, Any], np.ndarray] = lambda x, layer: x,
) -> Source:
    """A kernel from the weights of one `Linear`, or several concatenated; `rows` reorders the weights' rows."""
    return Source(
        [f"{name}.weight" for name in names],
        lambda shape: shape[::-1],
        lambda x, layer: rows(x, layer).T,
        widths,
    )


def grouped(rows: np.ndarray, widths: Sequence[int], groups: int) -> np.ndarray:
    """`rows`, which are parts of these `widths` with `groups` in each, reordered group by group."""
    parts = np.split(rows, np.cumsum(widths)[:-1])
    parts = [part.reshape(groups, -1, *rows.shape[1:]) for part in parts]
    return np.concatenate(parts, 1).reshape(rows.shape)


def copies(names: Mapping[str, str]) -> Sources:
    """Parameters that are stored unchanged: the array's name by the parameter's path."""
    return {path: Source([name]) for path, name in names.items()}


def one_plus(name: str) -> Source:
    """A norm's scale that is stored less 1. The 1 is added in float64, as checkpoints are often bfloat16."""
    return Source([name], convert=lambda x, layer: x.astype(np.float64) + 1)


def convolution(*names: str) -> Source:
    """The kernel from PyTorch's depthwise `Conv1d`, `[channels, 1, size]`, or from one for each part."""
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

    Args:
        kind: The layer's class.
        arguments: Its positional arguments.
        options: Its keyword arguments.
        weights: Arrays by name, or the path of files.
        prefix: Only names that begin with it are read.
        layouts: The sources of parameters, by the parameters' paths, for each implementation whose weights can be
            loaded. Sources of parameters that the layer does not have, such as biases, are not used. Of the layouts
            with all of the layer's parameters, the first is chosen that has most of its names in `weights`.
        ignored: Names, without the prefix, that may be among the weights and are not read.
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
    prefixed = {name: weights[name] for name in weights if str(name).startswith(prefix)}

    layouts = {reference: sources for reference, sources in layouts.items() if targets.keys() <= sources.keys()}
    expected = {reference: _expected(layer, targets, sources) for reference, sources in layouts.items()}
    reference = max(expected, key=lambda each: sum(prefix + name in prefixed for name in expected[each]))
    sources = layouts[reference]
    _check(prefixed, prefix, expected[reference], ignored, f"{reference} of these sizes")
    # variables that are no parameters, such as rates that depend on the layer's number, are those of a new layer
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
    """The allowed shapes of each array that the layer's parameters `targets` are computed from, by name."""
    expected: dict[str, list[Shape]] = {}
    for path, target in targets.items():
        source = sources[path]
        shapes = [source.shape(target.shape), *source.or_shapes(target.shape)]
        widths = shapes[0][:1] if source.widths is None else source.widths(layer)
        for name, width in zip(source.names, widths, strict=True):
            expected[name] = [(width, *shape[1:]) if source.widths else shape for shape in shapes]
    return expected


def _is_tensor(array: Any) -> bool:
    """Whether `array` is PyTorch's, by its methods: PyTorch is not imported."""
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
    weights: Mapping[str, Any],
    prefix: str,
    expected: Mapping[str, list[Shape]],
    ignored: Sequence[str],
    reference: str,
) -> None:
    mistakes = []
    for name, shapes in expected.items():
        array: Any = weights.get(prefix + name)
        shape = shapes[0]
        if prefix + name not in weights:
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
    mistakes += [f"{name}: unknown" for name in weights if name not in allowed]
    if mistakes:
        count = "1 name that does" if len(mistakes) == 1 else f"{len(mistakes)} names that do"
        raise ValueError("\n  ".join([f"weights: got {count} not fit; expected those of {reference}", *mistakes]))
