"""Layers of linear attention: what they carry does not grow with the sequence."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from ejkernel import _checks
from ejkernel.layers._lags import lagged
from ejkernel.layers._padding import without_padding
from ejkernel.layers._projection import into_heads, merge, out_of_heads, per_head, split
from ejkernel.linear_attention import Result, lightning_attn, recurrent_gla, retention


class _LinearAttention(nnx.Module):
    """Projections around an op of the family: its output is normalised per head and gated by the input."""

    def __init__(
        self, width: int, heads: int, *, key_width: int | None = None, value_width: int | None = None, rngs: nnx.Rngs
    ) -> None:
        self.width, self.heads = _checks.positive_int("width", width), heads
        key_width = width if key_width is None else key_width
        value_width = width if value_width is None else value_width
        self.key_dim = per_head("key_width", key_width, heads)
        self.value_dim = per_head("value_width", value_width, heads)
        self.query = into_heads(width, key_width, rngs)
        self.key = into_heads(width, key_width, rngs)
        self.value = into_heads(width, value_width, rngs)
        self.output_gate = into_heads(width, value_width, rngs)
        self.norm = nnx.RMSNorm(self.value_dim, rngs=rngs)
        self.out = out_of_heads(value_width, width, rngs)

    def __call__(
        self, x: jax.Array, state: jax.Array | None = None, cu_seqlens: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Runs over the tokens of `x` and returns the output, shaped like it, and the state after them.

        Args:
            x: `[B, T, width]`, or packed `[T, width]` or `[1, T, width]`.
            state: `[B, H, K, V]`, packed `[N, H, K, V]`, from an earlier call that this one continues; `None` starts
                from nothing.
            cu_seqlens: Borders of the packed sequences, `[N + 1]`. Tokens past the last one are padding: output 0, no
                gradient, no effect.
        """
        dims, x, cu_seqlens = self.check(x, cu_seqlens)
        if state is not None:
            state = _checks.carried(dims, "state", state, "H K V")
        query, key, value = (split(project(x), self.heads) for project in (self.query, self.key, self.value))
        output, state = self.attend(x, query, key, value, initial_state=state, cu_seqlens=cu_seqlens)
        return self.finish(x, output, cu_seqlens), state

    def check(self, x: Any, cu_seqlens: Any) -> tuple[_checks.Dims, jax.Array, jax.Array | None]:
        dims = _checks.Dims(width=self.width, H=self.heads, K=self.key_dim, V=self.value_dim)
        x, cu_seqlens = _checks.layer_input(dims, x, cu_seqlens)
        return dims, without_padding(x, cu_seqlens), cu_seqlens

    def finish(self, x: jax.Array, output: jax.Array, cu_seqlens: jax.Array | None) -> jax.Array:
        return without_padding(self.out(merge(self.norm(output)) * jax.nn.silu(self.output_gate(x))), cu_seqlens)

    def attend(self, x: jax.Array, query: jax.Array, key: jax.Array, value: jax.Array, **options: Any) -> Result:
        raise NotImplementedError


class GatedState(NamedTuple):
    """What gated linear attention carries from token to token.

    Attributes:
        recent: `[B, window, width]`, the last inputs.
        memory: `[B, H, K, V]`.
    """

    recent: jax.Array
    memory: jax.Array


class GatedLinearAttention(_LinearAttention):
    """Gated linear attention: every token decides what each key dim forgets.

    The log decay is `log σ(x W_1 W_2 + b)`; `b` starts out so that the key dims remember for times between the two of
    `memory`, in tokens, the first head's shortest and the last head's longest.

    Queries, keys and values are made of the token and the `window` before it, by one weight a lag and dim. Keys start
    out as the queries of the token before, so that a query finds what followed when the text last looked like this.

    Args:
        width: Of the input and the output.
        heads: How many heads share the keys' and the values' width.
        key_width: Of all heads' keys together; `None` is `width`.
        value_width: Of all heads' values together; `None` is `width`.
        gate_rank: The width between the gate's two projections.
        memory: The shortest and the longest time that a key dim remembers at first, in tokens.
        window: How many tokens before its own a query, key or value is made of.
        rngs: Where parameters are drawn from.

    Examples:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> layer = GatedLinearAttention(64, heads=4, rngs=nnx.Rngs(0))
        >>> prompt, token = jnp.ones((2, 10, 64)), jnp.ones((2, 1, 64))
        >>> output, state = layer(prompt)
        >>> output, state = layer(token, state)
        >>> output.shape, state.memory.shape, state.recent.shape
        ((2, 1, 64), (2, 4, 16, 16), (2, 4, 64))
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        key_width: int | None = None,
        value_width: int | None = None,
        gate_rank: int = 16,
        memory: tuple[float, float] = (2.0, 2048.0),
        window: int = 4,
        rngs: nnx.Rngs,
    ) -> None:
        super().__init__(width, heads, key_width=key_width, value_width=value_width, rngs=rngs)
        self.window = _checks.positive_int("window", window)
        _checks.positive_int("gate_rank", gate_rank)
        if not isinstance(memory, tuple | list) or len(memory) != 2:
            _checks.fail("memory", repr(memory), "(shortest, longest), in tokens")
        shortest, longest = (_checks.positive("memory", each) for each in memory)
        self.gate_down = nnx.Linear(width, gate_rank, use_bias=False, rngs=rngs)
        self.gate_up = into_heads(gate_rank, heads * self.key_dim, rngs)
        times = jnp.geomspace(shortest, longest, heads * self.key_dim)
        self.gate_bias = nnx.Param(-jnp.log(jnp.expm1(1 / times)))  # log σ of it is -1 / times
        self.key.kernel[...] = self.query.kernel[...]
        taps = jax.random.normal(rngs.params(), (window, width)) * window**-0.5
        none = jnp.zeros((1, width))
        self.query_taps = nnx.Param(jnp.concatenate([taps, none]))
        self.key_taps = nnx.Param(jnp.concatenate([none, taps]))
        self.value_taps = nnx.Param(jnp.zeros((window + 1, width)).at[0].set(1.0))

    def __call__(  # type: ignore[override]
        self, x: jax.Array, state: GatedState | None = None, cu_seqlens: jax.Array | None = None
    ) -> tuple[jax.Array, GatedState]:
        """Runs over the tokens of `x` and returns the output, shaped like it, and the state after them.

        Args:
            x: `[B, T, width]`, or packed `[T, width]` or `[1, T, width]`.
            state: From an earlier call that this one continues; `None` starts from nothing.
            cu_seqlens: Borders of the packed sequences, `[N + 1]`. Tokens past the last one are padding: output 0, no
                gradient, no effect.
        """
        dims, x, cu_seqlens = self.check(x, cu_seqlens)
        recent, memory = None, None
        if state is not None:
            if not isinstance(state, GatedState):
                raise TypeError(f"state: got {type(state).__name__}; expected the GatedState of an earlier call")
            dims.sizes["window"] = self.window
            recent = _checks.carried(dims, "state.recent", state.recent, "window width")
            memory = _checks.carried(dims, "state.memory", state.memory, "H K V")
        delayed, recent = lagged(x, self.window, recent, cu_seqlens)

        def heads_of(project: nnx.Linear, taps: nnx.Param) -> jax.Array:
            mixed = sum(tap * each for tap, each in zip(taps[...], delayed, strict=True))
            return split(project(mixed), self.heads)

        query = heads_of(self.query, self.query_taps)
        key = heads_of(self.key, self.key_taps)
        value = heads_of(self.value, self.value_taps)
        log_decay = jax.nn.log_sigmoid(self.gate_up(self.gate_down(x)) + self.gate_bias[...])
        output, memory = recurrent_gla(
            query, key, value, g=split(log_decay, self.heads), initial_state=memory, cu_seqlens=cu_seqlens
        )
        return self.finish(x, output, cu_seqlens), GatedState(recent, memory)


class Retention(_LinearAttention):
    """Retention: memory fades at a fixed rate per head, the same for every token.

    Queries and keys are not rotated by their position, so the state alone continues a sequence.

    Args:
        width: Of the input and the output.
        heads: How many heads share the keys' and the values' width.
        key_width: Of all heads' keys together; `None` is `width`.
        value_width: Of all heads' values together; `None` is `width`.
        rngs: Where parameters are drawn from.

    Examples:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> layer = Retention(64, heads=4, rngs=nnx.Rngs(0))
        >>> output, states = layer(jnp.ones((30, 64)), cu_seqlens=jnp.array([0, 10, 30]))
        >>> output.shape, states.shape
        ((30, 64), (2, 4, 16, 16))
    """

    def attend(self, x: jax.Array, query: jax.Array, key: jax.Array, value: jax.Array, **options: Any) -> Result:
        return retention(query, key, value, **options)


class LightningAttention(_LinearAttention):
    """Lightning attention: memory fades at a fixed rate per head, slower in later layers.

    Args:
        width: Of the input and the output.
        heads: How many heads share the keys' and the values' width.
        layer_idx: Which layer of the model this is, from 0.
        num_layers: How many layers the model has.
        key_width: Of all heads' keys together; `None` is `width`.
        value_width: Of all heads' values together; `None` is `width`.
        rngs: Where parameters are drawn from.

    Examples:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> layer = LightningAttention(64, heads=4, layer_idx=1, num_layers=12, rngs=nnx.Rngs(0))
        >>> output, state = layer(jnp.ones((2, 10, 64)))
        >>> output.shape, state.shape
        ((2, 10, 64), (2, 4, 16, 16))
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        layer_idx: int,
        num_layers: int,
        key_width: int | None = None,
        value_width: int | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        super().__init__(width, heads, key_width=key_width, value_width=value_width, rngs=rngs)
        _checks.layer_number(layer_idx)
        self.layer_idx, self.num_layers = layer_idx, _checks.positive_int("num_layers", num_layers)

    def attend(self, x: jax.Array, query: jax.Array, key: jax.Array, value: jax.Array, **options: Any) -> Result:
        query, key, value = (jax.nn.silu(each) for each in (query, key, value))
        return lightning_attn(query, key, value, self.layer_idx, self.num_layers, **options)
