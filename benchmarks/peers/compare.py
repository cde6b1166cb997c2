"""What our layer and its reference differ by: outputs, gradients, and decoding token by token."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
from flax import nnx
from torch.overrides import TorchFunctionMode

from benchmarks.peers.references import WIDTH, Reference, draw

BATCH, TOKENS, PROMPT, STEPS = 2, 70, 9, 10


class Computed(NamedTuple):
    """Gradients are of the input and of every parameter, by the names that these have here."""

    output: np.ndarray
    gradients: dict[str, np.ndarray]
    decoding: np.ndarray


def numbers(reference: Reference, precise: Reference | None, seed: int) -> dict[str, float]:
    """Largest differences relative to the largest number there, by what was compared.

    `output`, `gradients` and `decoding` are both programs in float32. `float64` is the largest of the three where both
    are in float64; `precise` is the reference made there. `ours` and `theirs` are how far the gradients of each in
    float32 are from those in float64: the reference's, or ours where it has none.
    """
    draw(reference.module.eval(), seed)
    x, weights = np.random.default_rng(seed).standard_normal((2, BATCH, TOKENS, WIDTH), np.float32)
    ours, theirs = _ours(reference, x, weights), _theirs(reference, x, weights)
    with jax.enable_x64(True), double():
        exact = agreed = _ours(reference, x.astype(np.float64), weights)
        if precise is not None:
            precise.module.eval().load_state_dict(dict(reference.module.named_parameters()), strict=False)
            exact = _theirs(precise, x.astype(np.float64), weights)
    return {
        **_differences(ours, theirs),
        **({"float64": max(_differences(agreed, exact).values())} if precise else {}),
        "ours": _differences(ours, exact)["gradients"],
        "theirs": _differences(theirs, exact)["gradients"],
    }


def difference(ours: Any, theirs: Any) -> float:
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    assert ours.shape == theirs.shape and np.isfinite(ours).all()
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def _differences(ours: Computed, theirs: Computed) -> dict[str, float]:
    return {
        "output": difference(ours.output, theirs.output),
        "gradients": max(difference(ours.gradients[name], each) for name, each in theirs.gradients.items()),
        "decoding": difference(ours.decoding, theirs.decoding),
    }


class _Double(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def wider(argument: Any) -> Any:
            return torch.float64 if argument is torch.float32 else argument

        function = torch.Tensor.double if function is torch.Tensor.float else function
        return function(*map(wider, args), **{name: wider(each) for name, each in (kwargs or {}).items()})


@contextlib.contextmanager
def double() -> Iterator[None]:
    """PyTorch takes float64 wherever code asks for float32, as layers do for their norms and gates."""
    torch.set_default_dtype(torch.float64)
    try:
        with _Double():
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def _by_our_names(parameters: Any) -> dict[str, np.ndarray]:
    return {".".join(map(str, path)): np.asarray(each.get_value()) for path, each in nnx.to_flat_state(parameters)}


@functools.partial(jax.jit, static_argnums=0)
def _output_and_gradients(graph: Any, parameters: Any, rest: Any, x: Any, weights: Any) -> Any:
    def loss(parameters: Any, x: Any) -> Any:
        output, _ = nnx.merge(graph, parameters, rest)(x)
        return (output * weights).sum(), output

    (_, output), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(parameters, x)
    return output, gradients


def _ours(reference: Reference, x: np.ndarray, weights: np.ndarray) -> Computed:
    # PyTorch's own tensors, as models are published; nothing may be computed in their dtype
    given = {name: each.to(torch.bfloat16) for name, each in reference.module.state_dict().items()}
    layer = reference.load(given, param_dtype=x.dtype)
    output, (of_parameters, of_x) = _output_and_gradients(*nnx.split(layer, nnx.Param, ...), x, weights)
    gradients = {**_by_our_names(of_parameters), "x": np.asarray(of_x)}
    return Computed(np.asarray(output), gradients, _our_decoding(layer, x))


def _theirs(reference: Reference, x: np.ndarray, weights: np.ndarray) -> Computed:
    inputs = torch.tensor(x, requires_grad=True)
    reference.module.zero_grad()
    output = reference.call(inputs, None, 0)
    (output * torch.tensor(weights)).sum().backward()
    gradients = {
        name: parameter.grad - 1 if name in reference.shifted else parameter.grad
        for name, parameter in reference.module.named_parameters()
    }
    loaded = nnx.state(reference.load(gradients, param_dtype=x.dtype), nnx.Param)
    gradients = {**_by_our_names(loaded), "x": inputs.grad.numpy()}
    return Computed(output.detach().numpy(), gradients, _their_decoding(reference, x))


@torch.no_grad()
def _their_decoding(reference: Reference, x: np.ndarray) -> np.ndarray:
    cache, tokens = reference.empty_cache(), torch.tensor(x)
    pieces = [reference.call(tokens[:, :PROMPT], cache, 0)]
    pieces += [reference.call(tokens[:, at : at + 1], cache, at) for at in range(PROMPT, PROMPT + STEPS)]
    return torch.cat(pieces, 1).numpy()


@nnx.jit
def _step(layer: Any, x: Any, state: Any) -> Any:
    return layer(x, state)


def _our_decoding(layer: Any, x: np.ndarray) -> np.ndarray:
    state = None
    if hasattr(layer, "empty_cache"):
        state = layer.empty_cache(BATCH, PROMPT + STEPS, x.dtype)
    piece, state = _step(layer, x[:, :PROMPT], state)
    pieces = [piece]
    for at in range(PROMPT, PROMPT + STEPS):
        piece, state = _step(layer, x[:, at : at + 1], state)
        pieces.append(piece)
    return np.concatenate(pieces, 1)
