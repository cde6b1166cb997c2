"""What our layer and its reference differ by: outputs, gradients, and decoding token by token."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from ejkernel import layers
from peers.references import WIDTH, Reference

BATCH, TOKENS, PROMPT, STEPS = 2, 70, 9, 6
# The gradient of a gate's bias is a sum whose terms may nearly cancel, and then two float32 programs differ by more
# than the bound: with seeds 0 to 4 by up to 2e-5, to which each contributes half.
SEED = 1


def numbers(reference: Reference) -> dict[str, Any]:
    """Largest differences relative to the largest number there, by what was compared."""
    x, weights = np.random.default_rng(SEED).standard_normal((2, BATCH, TOKENS, WIDTH), np.float32)
    theirs, their_gradients = _theirs(reference, x, weights)
    layer = reference.load(_arrays(reference.module.state_dict()))
    graph, parameters, rest = nnx.split(layer, nnx.Param, ...)

    @jax.jit
    def loss(parameters: Any, x: Any) -> Any:
        output, _ = nnx.merge(graph, parameters, rest)(x)
        return (output * weights).sum(), output

    (_, ours), gradients = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(parameters, x)
    expected = nnx.state(reference.load(their_gradients[0]), nnx.Param)
    of_parameters = jax.tree.map(difference, gradients[0], expected)
    return {
        "output": difference(ours, theirs),
        "gradients": max([*jax.tree.leaves(of_parameters), difference(gradients[1], their_gradients[1])]),
        "decoding": difference(_decoded(layer, x), _their_decoded(reference, x)),
    }


def difference(ours: Any, theirs: Any) -> float:
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    assert ours.shape == theirs.shape and np.isfinite(ours).all()
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def _arrays(tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: tensor.detach().numpy() for name, tensor in tensors.items()}


def _theirs(reference: Reference, x: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, tuple[Any, np.ndarray]]:
    inputs = torch.tensor(x, requires_grad=True)
    output = reference.call(inputs, None, 0)
    (output * torch.tensor(weights)).sum().backward()
    gradients = {
        name: parameter.grad - 1 if name in reference.shifted else parameter.grad
        for name, parameter in reference.module.named_parameters()
    }
    return output.detach().numpy(), (_arrays(gradients), inputs.grad.numpy())


@torch.no_grad()
def _their_decoded(reference: Reference, x: np.ndarray) -> np.ndarray:
    cache, tokens = reference.empty_cache(), torch.tensor(x)
    pieces = [reference.call(tokens[:, :PROMPT], cache, 0)]
    pieces += [reference.call(tokens[:, at : at + 1], cache, at) for at in range(PROMPT, PROMPT + STEPS)]
    return torch.cat(pieces, 1).numpy()


def _decoded(layer: Any, x: np.ndarray) -> np.ndarray:
    state = layer.empty_cache(BATCH, PROMPT + STEPS) if isinstance(layer, layers.MultiHeadAttention) else None
    step = nnx.jit(lambda layer, x, state: layer(x, state))
    piece, state = step(layer, x[:, :PROMPT], state)
    pieces = [piece]
    for at in range(PROMPT, PROMPT + STEPS):
        piece, state = step(layer, x[:, at : at + 1], state)
        pieces.append(piece)
    return jnp.concatenate(pieces, 1)
