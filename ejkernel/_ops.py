"""The one table of ops: `ejkernel info`, `ejkernel bench`, the pages and their tests are made from it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import ejkernel
from ejkernel._dispatch import Implementation
from ejkernel.kernels.attention import ATTENTION, FLASH_ATTENTION
from ejkernel.kernels.attention.paged import PAGED_ATTENTION
from ejkernel.kernels.convolution import IMPLEMENTATIONS as CONVOLUTION
from ejkernel.kernels.delta_rule import IMPLEMENTATIONS as DELTA_RULE
from ejkernel.kernels.linear_recurrence import IMPLEMENTATIONS as LINEAR_RECURRENCE

# Implementations and devices as people write them; `None` is every device.
NAMES = {"xla": "XLA", "triton": "Triton", "cudnn": "cuDNN", "pallas": "Pallas", "splash": "splash"}
DEVICES = {None: "anything", "cuda": "NVIDIA GPUs", "tpu": "TPUs"}
CORES = {
    "linear recurrence": LINEAR_RECURRENCE,
    "delta rule": DELTA_RULE,
    "softmax": FLASH_ATTENTION,
    "convolution": CONVOLUTION,
}
TAPS = 4  # how many tokens the convolution spans in published layers


@dataclass(frozen=True)
class Op:
    """An op of the library.

    Attributes:
        function: The public function.
        core: The core that computes it.
        gates: The arrays beside query, key and value, each with its dims (`"BTH"`, `"BTHK"`).
        options: Other arguments that an ordinary call has.
        log_decay: The fixed log decay of each head, from the number of heads. It is written again here, as checks of
            the library must not take it from the library.
        fla: The function of flash-linear-attention that computes the same, as `module:name`.
        benchmark_gates: The gates of calls in benchmarks, if not `gates`.
        own_implementations: The op's implementations, if not those of its core.
        own_call: Arguments of an ordinary call, as shapes, if not query, key, value and gates. `ejkernel bench` does
            not time such an op.
    """

    function: Callable[..., Any]
    core: Literal["linear recurrence", "delta rule", "softmax", "convolution"] = "linear recurrence"
    gates: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    log_decay: Callable[[int], np.ndarray] | None = None
    fla: str | None = None
    benchmark_gates: Mapping[str, str] | None = None
    own_implementations: tuple[Implementation, ...] | None = None
    own_call: tuple[Any, ...] | None = None

    @property
    def name(self) -> str:
        return self.function.__name__

    @property
    def implementations(self) -> tuple[Implementation, ...]:
        """Fastest first."""
        return self.own_implementations or CORES[self.core]

    def output(self, **arrays: jax.Array) -> jax.Array:
        """The output alone of an ordinary call on these arrays."""
        results = self.results(arrays)
        return results[0] if isinstance(results, tuple) else results

    def results(self, arrays: Mapping[str, jax.Array], **options: Any) -> Any:
        """What an ordinary call on these arrays returns; `options` are more of its arguments.

        The convolution's channels are split into heads here, `x [B, T, H, K]` and `weight [1, W, H, K]`, so that it is
        measured and checked as the others are.
        """
        if self.core != "convolution":
            return self.function(**arrays, **self.options, **options)
        x, weight = (each.reshape(*each.shape[:2], -1) for each in (arrays["x"], arrays["weight"]))
        results = self.function(x, weight[0], **self.options, **options)
        return tuple(each.reshape(*each.shape[:2], *arrays["x"].shape[2:]) for each in results)

    def runs_on(self) -> str:
        """The names of its implementations as people write them: `XLA, Triton, Pallas`."""
        return ", ".join(NAMES[each.name] for each in reversed(self.implementations))

    def ordinary_call(self) -> tuple[list[Any], dict[str, Any]]:
        """Arguments of a call of ordinary size, as shapes."""
        if self.own_call is not None:
            return list(self.own_call), dict(self.options)
        sizes = {"B": 1, "T": 1024, "H": 8, "K": 64}
        x = jax.ShapeDtypeStruct(tuple(sizes.values()), jnp.bfloat16)
        if self.core == "convolution":
            B, T, H, K = x.shape
            weight = jax.ShapeDtypeStruct((TAPS, H * K), jnp.float32)
            return [jax.ShapeDtypeStruct((B, T, H * K), x.dtype), weight], dict(self.options)
        gates = {
            name: jax.ShapeDtypeStruct(tuple(sizes[dim] for dim in dims), jnp.float32)
            for name, dims in self.gates.items()
        }
        return [x, x, x], {**self.options, **gates}


def _paged_call() -> tuple[Any, ...]:
    """64 single tokens of sequences that have up to 4096 in pages of 64."""
    query, new = (jax.ShapeDtypeStruct((64, heads, 128), jnp.bfloat16) for heads in (32, 8))
    pages: Any = jax.ShapeDtypeStruct((4096, 64, 8, 128), jnp.bfloat16)
    table, lengths, borders = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((64, 64), (64,), (65,)))
    return query, new, new, ejkernel.PagedCache(pages, pages), table, lengths, borders


HEAD_GATE, KEY_GATE, BETA = {"g": "BTH"}, {"g": "BTHK"}, {"beta": "BTH"}
OPS = {
    op.name: op
    for op in (
        Op(ejkernel.linear_attention, fla="fla.ops.linear_attn:chunk_linear_attn"),
        Op(
            ejkernel.retention,
            log_decay=lambda heads: np.log1p(-(2.0 ** (-5 - np.arange(heads)))),
            fla="fla.ops.retention:chunk_retention",
        ),
        Op(
            ejkernel.lightning_attn,
            options={"layer_idx": 3, "num_layers": 12},
            log_decay=lambda heads: -(8 / heads) * (1 - 3 / 12) * np.arange(heads),
            fla="fla.ops.lightning_attn:chunk_lightning_attn",
        ),
        Op(ejkernel.simple_gla, gates=HEAD_GATE, fla="fla.ops.simple_gla:chunk_simple_gla"),
        Op(ejkernel.recurrent_gla, gates=KEY_GATE, fla="fla.ops.gla:chunk_gla"),
        Op(ejkernel.recurrent, gates=KEY_GATE, benchmark_gates={"gk": "BTHK", "gv": "BTHV"}),
        Op(ejkernel.delta_rule, "delta rule", gates=BETA, fla="fla.ops.delta_rule:chunk_delta_rule"),
        Op(
            ejkernel.gated_delta_rule,
            "delta rule",
            gates=HEAD_GATE | BETA,
            fla="fla.ops.gated_delta_rule:chunk_gated_delta_rule",
        ),
        Op(ejkernel.kda, "delta rule", gates=KEY_GATE | BETA, fla="fla.ops.kda:chunk_kda"),
        Op(ejkernel.flash_attention, "softmax", options={"causal": True}),
        Op(ejkernel.attention, "softmax", options={"causal": True, "dtype": None}, own_implementations=ATTENTION),
        Op(ejkernel.causal_conv1d, "convolution", options={"activation": "silu"}),
        Op(ejkernel.paged_attention, "softmax", own_implementations=PAGED_ATTENTION, own_call=_paged_call()),
    )
}
# ops that take query, key, value and gates, which benchmarks, checks and tests call in one way
COMMON = {name: op for name, op in OPS.items() if op.own_call is None}


def platform_table() -> str:
    """Which implementations each op has on which device, fastest first, in Markdown."""
    rows = [["op", *DEVICES.values()], ["---"] * (len(DEVICES) + 1)]
    for name, op in OPS.items():
        by_device = (
            [each.name for each in op.implementations if device in (each.devices or (None,))] for device in DEVICES
        )
        rows.append([f"`{name}`", *(", ".join(f"`{each}`" for each in names) for names in by_device)])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)
