"""The delta rule in one chunk of tokens, whatever its gates are; `docs/delta_rule.md` derives it.

The output is the linear recurrence's with values replaced by `u`, what tokens really add to the state. The `u` solve a
triangular system whose entries are keys' products with earlier keys, decayed. States are `[V, K]`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.kernels.chunks.pallas.device.chunk import Cotangents, causal, scaled
from ejkernel.kernels.chunks.pallas.device.head_gates import Flow, Gated
from ejkernel.kernels.chunks.pallas.device.key_gates import Blockwise, Mild
from ejkernel.kernels.chunks.pallas.device.products import F32, cumsum_rows, matmul_nt, matmul_tn
from ejkernel.kernels.delta_rule.pallas.device.inverse import inverse
from ejkernel.kernels.delta_rule.pallas.device.parts import digits, precise

Gates = Gated | Mild | Blockwise


class Gradients(NamedTuple):
    """Cotangents of a chunk's arrays, and of the state at its start."""

    query: jax.Array  # [C, K]
    key: jax.Array  # [C, K]
    value: jax.Array  # [C, V]
    beta: jax.Array  # [1, C]
    gates: Any  # as `Gated` and the others give them
    state: jax.Array  # [V, K]


class Beta(NamedTuple):
    """A head's betas in a chunk."""

    down: jax.Array  # [C, 1]
    along: jax.Array  # [1, C]


class Delta(NamedTuple):
    """A chunk: its tokens add `u = u0 - w (start_decay ⊙ S)ᵀ` to a state `S` at its start.

    The output is `reads beta value + query (start_decay ⊙ S)ᵀ`. From scores and `u` it would be the same, but where
    keys resemble each other most of it cancels; here it has cancelled before anything is rounded.
    """

    qk: Gates  # queries with keys
    kk: Gates  # keys with keys
    value: jax.Array  # [C, V]
    beta: Beta
    overlaps: jax.Array  # decayed products of keys with earlier ones [C, C] in float32
    inverse: jax.Array  # (I + beta overlaps)⁻¹, in float32
    u0: jax.Array  # u for a state of zeros [C, V] in float32
    w: jax.Array  # [C, K]
    reads: jax.Array  # scores times the inverse [C, C] in float32
    query: jax.Array  # [C, K]

    @staticmethod
    def of(qk: Gates, kk: Gates, value: jax.Array, beta: Beta, reverse: bool) -> "Delta":
        exact = value.dtype == F32
        overlaps = jnp.where(causal(len(value), reverse, strict=True), _float32_scores(kk), 0)
        system = beta.down * overlaps
        inverted = inverse(system.T, exact).T if reverse else inverse(system, exact)
        solution, key = inverted * beta.along, _decayed(kk)[0]
        u0, w = precise(solution, value, exact), precise(solution, key, exact)
        scores = _float32_scores(qk)
        if not isinstance(qk, Blockwise):
            scores = jnp.where(causal(len(value), reverse), scores, 0)
        reads = precise(scores, inverted, exact)
        query = _decayed(qk)[0] - precise(reads * beta.along, key, exact)
        return Delta(qk, kk, value, beta, overlaps, inverted, u0, w, reads, query)

    @property
    def kinds(self) -> jax.Array:
        """Those of the key gates."""
        return self.qk.kinds  # type: ignore[union-attr]

    @property
    def _exact(self) -> bool:
        return self.value.dtype == F32

    def _start(self, state: jax.Array) -> jax.Array:
        return scaled(state, self.kk.chunk.start_decay)

    def added(self, state: jax.Array) -> jax.Array:
        """What tokens add, `u`, in float32."""
        return self.u0 - precise(self.w, self._start(state), self._exact, matmul_nt)

    def output(self, state: jax.Array) -> jax.Array:
        from_values = precise(self.reads * self.beta.along, self.value, self._exact)
        return from_values + precise(self.query, self._start(state), self._exact, matmul_nt)

    def next_state(self, u: jax.Array, state: jax.Array) -> jax.Array:
        """The state at the chunk's end."""
        chunk, key = self.qk.chunk, _decayed(self.qk)[1]
        return scaled(state, chunk.total_decay) + scaled(precise(u, key, self._exact, matmul_tn), chunk.end_decay)

    def gradients(
        self, u: jax.Array, state: jax.Array, d_output: jax.Array, d_state: jax.Array, reverse: bool
    ) -> Gradients:
        """Cotangents from those of the output and of the state at the chunk's end."""
        qk, kk, exact, start, C = self.qk, self.kk, self._exact, self._start(state), len(u)
        d_end = scaled(d_state, kk.chunk.end_decay)
        du = precise(_decayed(qk)[1], d_end, exact, matmul_nt)  # from the next state alone
        d_start = precise(d_output, self.query, exact, matmul_tn) - precise(du, self.w, exact, matmul_tn)
        d_start = scaled(d_state, kk.chunk.total_decay) + scaled(d_start, kk.chunk.start_decay)
        # of the system's right side, from the output and from the next state
        dr = precise(self.reads, d_output, exact, matmul_tn) + precise(self.inverse, du, exact, matmul_tn)
        corrections = self.value - precise(_decayed(kk)[0], start, exact, matmul_nt)
        d_scores, d_system = precise(d_output, u, exact, matmul_nt), -precise(dr, u, exact, matmul_nt)
        if not isinstance(qk, Blockwise):
            # whose gradients leave out what is not visible
            d_scores = jnp.where(causal(C, reverse), d_scores, 0)
            d_system = jnp.where(causal(C, reverse, strict=True), d_system, 0)
        d_beta = _row_sums(dr * corrections, exact) + _row_sums(d_system * self.overlaps, exact)
        d_value = self.beta.down * dr
        of_qk = Cotangents(d_scores, precise(d_output, start, exact), precise(u, d_end, exact))
        d_overlaps, d_key = self.beta.down * d_system, -precise(d_value, start, exact)
        of_kk = Cotangents(d_overlaps, d_key, jnp.zeros_like(of_qk.key))
        dq, dk_reading, dk_read, dk_left = self._score_gradients(of_qk, of_kk)
        d_gates = self._flow(dq, dk_reading - dk_read, dk_left, u * du, state * d_state, reverse)
        dk = dk_reading + dk_read + dk_left
        if isinstance(qk, Blockwise):
            own_query, own_key = qk.own_gradients(d_scores)
            dq, dk = (dq + own_query) * qk.scale, dk + own_key
        return Gradients(dq, dk, d_value, d_beta, d_gates, d_start)

    def _score_gradients(
        self, of_qk: Cotangents, of_kk: Cotangents
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Cotangents of queries, of keys that read, of keys that are read in the chunk, and of these by the next."""
        qk: Any = self.qk
        kk: Any = self.kk
        if isinstance(qk, Blockwise):
            (_, key), d_scores = qk.operands, (of_qk.scores, of_kk.scores)
            (dq, dk_reading), dk_read = qk.blocks.score_gradients(qk.operands, key, d_scores, digits(self._exact))
        else:
            dq, dk_read = _pair_gradients(qk, of_qk.scores, self._exact)
            dk_reading, dk_more = _pair_gradients(kk, of_kk.scores, self._exact)
            dk_read = dk_read + dk_more
        dq = dq + scaled(of_qk.query, qk.since)
        if qk.since is None:
            dq = dq * qk.scale
        dk_reading = dk_reading + scaled(of_kk.query, kk.since)
        return dq, dk_reading, dk_read, scaled(of_qk.key, qk.until)

    def _flow(
        self, dq: jax.Array, dk: jax.Array, dk_left: jax.Array, left: jax.Array, through: jax.Array, reverse: bool
    ) -> Any:
        """The gradient of key gates or the parts of that of heads' gates; `None` without gates.

        `dk` is the cotangent of keys that read less that of keys that are read, in the chunk: pairs of tokens on one
        side of a gate are in both, and cancel. What later chunks read is in `dk_left` by key dim, and in `left` by
        value dim, which cancels better: the systems' right sides are made of it.
        """
        qk: Any = self.qk
        (query, key), total = qk.operands, qk.chunk.total_decay
        inside = query * dq + key * dk
        if isinstance(qk, Mild):
            through = (key * dk_left).sum(0, keepdims=True) + through.sum(0, keepdims=True) * total
            return cumsum_rows(inside - key * dk_left, not reverse) + through
        if isinstance(qk, Blockwise):
            through = through.sum(0, keepdims=True) * total
            return qk.blocks.gate_gradient(inside, key * dk_left, through, self._exact, reverse)
        if total is None:
            return None
        through = through.sum(keepdims=True) * total
        return Flow(_row_sums(inside, self._exact), _row_sums(left, self._exact), through)


def _pair_gradients(gates: Gated | Mild, d_scores: jax.Array, exact: bool) -> tuple[jax.Array, jax.Array]:
    """Cotangents of query and key from those of their scores, which are 0 where nothing is visible."""
    if isinstance(gates, Mild):
        query, key = _decayed(gates)
        return precise(d_scores, key, exact) * gates.since, precise(d_scores, query, exact, matmul_tn) * gates.until
    query, key = gates.operands
    # decays may be infinite where nothing is visible
    d_products = d_scores if gates.decays is None else jnp.where(d_scores == 0, 0, d_scores * gates.decays)
    return precise(d_products, key, exact), precise(d_products, query, exact, matmul_tn)


def _decayed(gates: Gates) -> tuple[jax.Array, jax.Array]:
    """Decayed query and key, before they are rounded."""
    query, key = gates.operands
    return scaled(query, gates.since), scaled(key, gates.until)


def _float32_scores(gates: Gates) -> jax.Array:
    """Scores before they are rounded: the system is solved as it is, not as its entries round."""
    if isinstance(gates, Gated):
        products = matmul_nt(*gates.operands)
        return products if gates.decays is None else products * gates.decays
    if isinstance(gates, Mild):
        query, key = _decayed(gates)
        return precise(query, key, gates.operands[0].dtype == F32, matmul_nt)
    return gates.chunk.scores


def _row_sums(x: jax.Array, exact: bool) -> jax.Array:
    """Sums of the rows of `x [C, ·]`, along the lanes `[1, C]`."""
    ones = jnp.ones((8, x.shape[1]), F32 if exact else jnp.bfloat16)
    return precise(ones, x, exact, matmul_nt)[:1]
