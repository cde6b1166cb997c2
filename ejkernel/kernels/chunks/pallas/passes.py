"""A call's forward and backward on a TPU, each one kernel over its tokens."""

import jax
import jax.numpy as jnp

from ejkernel.kernels import _pallas
from ejkernel.kernels.chunks.call import Call
from ejkernel.kernels.chunks.pallas.kernel_call import F32, Inputs, KernelCall, Recurrence
from ejkernel.kernels.chunks.pallas.plan import TOKENS, Sizes, number_of_visits


def forward(
    recurrence: Recurrence, keep: bool, call: Call, sizes: Sizes, inputs: Inputs
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Output, final states and, if `keep`, the states before visits, which the backward reads."""
    B, T, H, K, V = call.batch, call.tokens, call.heads, call.key_dim, call.value_dim
    results = [jax.ShapeDtypeStruct((B, T, H, V), call.dtype), jax.ShapeDtypeStruct((call.sequences, H, K, V), F32)]
    if keep:
        results.append(jax.ShapeDtypeStruct((B, number_of_visits(call, sizes), H, V, K), F32))

    def run(inputs: Inputs) -> list[jax.Array]:
        kernel = KernelCall.of(recurrence, call, sizes, inputs, backward=False)
        if inputs.initial_state is not None:
            kernel.read("initial_state", inputs.initial_state, kernel.states())
        kernel.write("output", kernel.tokens(H, V), call.dtype)
        kernel.write("final_state", kernel.states())
        if keep:
            kernel.write("block_states", kernel.block_states(backward=False))
        output, *states = kernel.run("forward", {"states": (2, sizes.heads, V, K)}).values()
        return [output.reshape(B, T, H, V), *states]

    def fallback(inputs: Inputs) -> list[jax.Array]:
        return [*recurrence.xla(call, inputs), *(jnp.zeros(each.shape, each.dtype) for each in results[2:])]

    output, final, *block_states = _pallas.launch(run, fallback, results, inputs)
    return output, final, block_states[0] if keep else None


def backward(
    recurrence: Recurrence,
    wanted: Inputs,
    call: Call,
    sizes: Sizes,
    inputs: Inputs,
    block_states: jax.Array,
    d_output: jax.Array,
    d_final: jax.Array | None,
) -> Inputs:
    """Cotangents of the inputs; that of the linear recurrence's log decay is `None` unless it is wanted."""
    gate = bool(wanted.log_decay) or inputs.beta is not None

    def differentiated(inputs: Inputs) -> Inputs:
        return inputs._replace(cu_seqlens=None, log_decay=inputs.log_decay if gate else None)

    leaves, tree = jax.tree.flatten(differentiated(inputs))
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]

    def run(inputs: Inputs, block_states: jax.Array, d_output: jax.Array, d_final: jax.Array | None) -> list[jax.Array]:
        kernel = KernelCall.of(recurrence, call, sizes, inputs, backward=True)
        if inputs.beta is not None:
            kernel.write("d_beta", kernel.by_head())
        kernel.read_tokens("d_output", d_output)
        kernel.read("block_states", block_states, kernel.block_states(backward=True))
        if d_final is not None:
            kernel.read("d_final_state", d_final, kernel.states())
        for name in TOKENS:
            x = getattr(inputs, name)
            # cotangents of shared heads are added up, in float32
            dtype = x.dtype if x.shape[2] == call.heads else F32
            kernel.write(f"d_{name}", kernel.tokens(call.heads, x.shape[3]), dtype)
        if gate and inputs.log_decay is not None:
            by_key = call.decay == "key"
            layout = kernel.tokens(call.heads, call.key_dim) if by_key else kernel.by_head()
            kernel.write("d_log_decay", layout, inputs.log_decay.dtype if by_key else F32)
        if inputs.initial_state is not None:
            kernel.write("d_initial_state", kernel.states(), inputs.initial_state.dtype)
        state = (call.value_dim, call.key_dim)
        scratch: dict[str, tuple[int, ...]] = {"d_states": (2, sizes.heads, *state)}
        if call.decay == "key":
            scratch["states"] = (sizes.chunks + 1, *state)
        cotangents = {name.removeprefix("d_"): x for name, x in kernel.run("backward", scratch).items()}
        for name in TOKENS:
            cotangents[name] = _sum_shared(call, getattr(inputs, name), cotangents[name])
        if "beta" in cotangents:
            cotangents["beta"] = _heads_last(call, cotangents["beta"])
        if "log_decay" in cotangents:
            cotangents["log_decay"] = _gate_gradient(call, inputs, cotangents["log_decay"])
        return [cotangents[name].astype(getattr(inputs, name).dtype) for name in Inputs._fields if name in cotangents]

    def fallback(inputs: Inputs, _: jax.Array, d_output: jax.Array, d_final: jax.Array | None) -> list[jax.Array]:
        cu_seqlens = inputs.cu_seqlens
        (_, final), pull = jax.vjp(
            lambda x: recurrence.xla(call, x._replace(cu_seqlens=cu_seqlens)), inputs._replace(cu_seqlens=None)
        )
        (cotangents,) = pull((d_output, jnp.zeros_like(final) if d_final is None else d_final))
        return jax.tree.leaves(differentiated(cotangents))

    cotangents = _pallas.launch(run, fallback, results, inputs, block_states, d_output, d_final)
    return jax.tree.unflatten(tree, cotangents)


def _sum_shared(call: Call, x: jax.Array, dx: jax.Array) -> jax.Array:
    """The cotangent of `x [B, T, heads, D]` from each head's `[B, T, H · D]`: those of shared heads are added up."""
    if x.shape[2] == call.heads:
        return dx.reshape(x.shape)
    return dx.reshape(*x.shape[:3], -1, x.shape[3]).sum(3)


def _heads_last(call: Call, x: jax.Array) -> jax.Array:
    """`x` in the layout `by_head` as `[B, T, H]`."""
    return x.reshape(call.batch, call.heads, call.tokens).swapaxes(1, 2)


def _gate_gradient(call: Call, inputs: Inputs, d_gates: jax.Array) -> jax.Array:
    """The cotangent of the log decay in the layout of the argument, from that of each token's."""
    log_decay, cu_seqlens = inputs.log_decay, inputs.cu_seqlens
    assert log_decay is not None
    if call.decay == "key":
        return d_gates.reshape(log_decay.shape)
    if call.decay == "head":
        return _heads_last(call, d_gates)
    d_gates = d_gates.reshape(call.batch, call.heads, call.tokens)
    if cu_seqlens is None:
        summed = d_gates.sum(2)
    else:
        token = jnp.arange(call.tokens)
        inside = (token >= cu_seqlens[:-1, None]) & (token < cu_seqlens[1:, None])
        summed = jnp.where(inside[:, None], d_gates, 0).sum(2)
    return jnp.where(jnp.isneginf(log_decay), 0, summed)
