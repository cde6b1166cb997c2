r"""The recurrence's Triton kernels on one NVIDIA GPU: times, memory floors and errors, checked on a slice of each row.

python -m benchmarks.gpu_linear_recurrence --json benchmarks/results/linear_recurrence_h200.json \
    [--fla] [row ...]
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import gpu_rows
from benchmarks.gpu_rows import clock
from benchmarks.timing import Row
from ejkernel.kernels.linear_recurrence import triton as triton_gpu
from ejkernel.kernels.linear_recurrence import xla
from ejkernel.kernels.linear_recurrence.call import Call


@dataclass(frozen=True)
class Work(gpu_rows.Work):
    decay: str = "key"
    gate: str = "sixteenth"
    learn_gate: bool = True

    @property
    def call(self) -> Call:
        return Call(
            batch=self.B,
            tokens=self.T,
            heads=self.H,
            key_dim=self.K,
            value_dim=self.V,
            sequences=self.sequences or self.B,
            packed=bool(self.sequences),
            decay=self.decay,  # type: ignore[arg-type]
            value_decay=False,
            scale=self.K**-0.5,
            reverse=False,
            dtype=np.dtype(jnp.dtype(self.dtype)),
        )


GLA = Work("gla", fla=1.37, bar=0.45)
HEAD = Work("g_gamma", decay="constant", fla=0.38, bar=0.18)
WORKS = [
    GLA,
    replace(GLA, name="gla-unscaled", gate="plain"),
    replace(GLA, name="gla-strong", gate="strong", bar=1.1),
    replace(GLA, name="gla-shipped", gate="shipped"),
    replace(GLA, name="gla-backward", backward=True, fla=5.85, bar=1.65),
    replace(GLA, name="gla-unscaled-backward", gate="plain", backward=True, fla=5.85, bar=1.65),
    replace(GLA, name="gla-strong-backward", gate="strong", backward=True, fla=5.85, bar=3.5),
    replace(GLA, name="gla-shipped-backward", gate="shipped", backward=True, fla=5.85, bar=1.65),
    HEAD,
    replace(HEAD, name="g_gamma-backward", backward=True, learn_gate=False, fla=1.84, bar=0.72),
    replace(HEAD, name="g_gamma-learned-backward", backward=True, fla=1.84, bar=0.72),
    replace(HEAD, name="simple_gla", decay="head"),
    replace(HEAD, name="simple_gla-backward", decay="head", backward=True, fla=1.84, bar=0.72),
    Work("none", decay="none"),
    Work("none-backward", decay="none", backward=True),
    replace(GLA, name="gla-long", B=1, T=65536, fla=None, bar=0.98),
    replace(GLA, name="gla-narrow", B=2, T=8192, H=4, fla=None, bar=0.11),
    Work("decode", B=256, T=1, state=True, fla=0.24, bar=0.155),
    Work("gla-K64-V64", B=32, T=2048, H=8, K=64, V=64),
    Work("gla-K64-V128", K=64),
    Work("gla-K256-V256", H=8, K=256, V=256),
    Work("gla-float32", dtype="float32"),
    Work("simple_gla-float32", decay="head", dtype="float32"),
    Work("gla-float16", dtype="float16"),
    Work("simple_gla-float16", decay="head", dtype="float16"),
    Work("simple_gla-float16-backward", decay="head", dtype="float16", backward=True),
    Work("gla-T32768", B=1, T=32768),
    Work("gla-T32768-packed", B=1, T=32768, sequences=32),
]


def inputs(work: Work, seed: int) -> tuple[Any, ...]:
    """query, key, value, log decay, initial state, borders, and the output's cotangent."""
    call, keys = work.call, jax.random.split(jax.random.key(seed), 6)
    tokens = (call.batch, call.tokens, call.heads)

    def normal(key: jax.Array, *shape: int, dtype: Any = call.dtype) -> jax.Array:
        return jax.random.normal(key, shape, jnp.float32).astype(dtype)

    decay = None
    if work.decay == "constant":
        decay = jnp.broadcast_to(jnp.log(1 - 2.0 ** (-5.0 - jnp.arange(work.H))), (call.sequences, work.H))
    elif work.decay != "none":
        gate = jax.random.normal(keys[3], tokens + ((work.K,) if work.decay == "key" else ()))
        if work.gate == "shipped":  # Kimi-K3's
            decay = -5 * jax.nn.sigmoid(gate)
        else:
            decay = jax.nn.log_sigmoid(gate) * {"sixteenth": 1 / 16, "plain": 1.0, "strong": 30.0}[work.gate]
    state = normal(keys[4], call.sequences, work.H, work.K, work.V, dtype=jnp.float32) if work.state else None
    query, key = normal(keys[0], *tokens, work.K), normal(keys[1], *tokens, work.K)
    return query, key, normal(keys[2], *tokens, work.V), decay, state, work.borders, normal(keys[5], *tokens, work.V)


def program(work: Work, run: Callable[..., Any], call: Call) -> Callable[..., Any]:
    def forward(query: Any, key: Any, value: Any, decay: Any, state: Any, borders: Any, doutput: Any) -> Any:
        return run(call, query, key, value, decay, None, state, borders)

    def both(query: Any, key: Any, value: Any, decay: Any, state: Any, borders: Any, doutput: Any) -> Any:
        def output(*differentiated: Any) -> Any:
            gate = differentiated[3] if work.learn_gate else decay
            return run(call, *differentiated[:3], gate, None, state, borders)[0]

        result, pull = jax.vjp(output, query, key, value, decay)
        return result, pull(doutput)

    return both if work.backward else forward


def errors(work: Work, arrays: tuple[Any, ...], results: Any) -> list[float]:
    """Relative errors of the results' first row and first two heads against XLA's in float32."""
    rows, heads = (1, min(2, work.H)) if not work.sequences else (work.B, min(2, work.H))
    call = replace(work.call, batch=rows, heads=heads, dtype=np.dtype(np.float32))
    if not work.sequences:
        call = replace(call, sequences=rows)

    def cut(x: Any) -> Any:
        if x is None or x.ndim == 1:
            return x
        state = (work.call.sequences, work.H, work.K, work.V)
        head = 1 if x.ndim == 2 or x.shape == state else 2
        x = x[: call.sequences if head == 1 else rows]
        return jax.lax.slice_in_dim(x, 0, heads, axis=head)

    small = [cut(x) for x in arrays]
    small = [x if x is None or x.dtype == jnp.int32 else x.astype(jnp.float32) for x in small]
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(program(work, xla.run, call))(*small)
    return gpu_rows.relative_errors(results, expected, cut)


def measure(work: Work, bandwidth: float) -> dict[str, Any]:
    sets = [inputs(work, seed) for seed in range(2)]
    function = jax.jit(program(work, triton_gpu.run, work.call))
    return gpu_rows.measured(
        work,
        bandwidth,
        function,
        sets,
        read=sets[0] if work.backward else sets[0][:6],
        errors=lambda results: errors(work, sets[0], results),
        timed=lambda: clock_in_place(work, sets[0]) if work.state else clock(function, sets),
    )


def clock_in_place(work: Work, arrays: tuple[Any, ...]) -> tuple[float, float]:
    """`clock` of steps whose state is donated, and so updated in place."""
    step = jax.jit(program(work, triton_gpu.run, work.call), donate_argnums=4)
    *before, state, borders, doutput = arrays
    states = [state + 0]

    def again(i: int) -> jax.Array:
        _, states[0] = step(*before, states[0], borders, doutput)
        return states[0]

    gpu_rows.in_batches(again, 200, 2)
    return gpu_rows.in_batches(again, 200)


def launch_overhead() -> dict[str, float]:
    """Microseconds a call under `jit` of one kernel with next to no work, and of the least XLA can be asked for."""
    work = Work("tiny", decay="none", B=1, T=16, H=1, K=16, V=16)
    arrays = inputs(work, 0)
    kernel, _ = clock(jax.jit(program(work, triton_gpu.run, work.call)), [arrays])
    add, _ = clock(jax.jit(lambda x: x + 1), [arrays[:1]])
    return {"triton": round(kernel * 1e3, 1), "xla": round(add * 1e3, 1)}


def fla_times() -> dict[str, float]:
    """flash-linear-attention on the same shapes, by CUDA events, where it and PyTorch are installed."""
    import torch
    from fla.ops.gla import chunk_gla
    from fla.ops.simple_gla import chunk_simple_gla
    from triton.testing import do_bench

    def make(*shape: int, dtype: Any = torch.bfloat16) -> Any:
        return torch.randn(*shape, device="cuda", dtype=dtype, requires_grad=True)

    B, T, H, K = 8, 4096, 16, 128
    q, k, v = (make(B, T, H, K) for _ in range(3))
    do = torch.randn_like(v)
    key_gate = (torch.nn.functional.logsigmoid(make(B, T, H, K, dtype=torch.float32)) / 16).detach().requires_grad_()
    head_gate = (torch.nn.functional.logsigmoid(make(B, T, H, dtype=torch.float32)) / 16).detach().requires_grad_()
    found = {}
    for name, function, gate in (("gla", chunk_gla, key_gate), ("simple_gla", chunk_simple_gla, head_gate)):
        found[name] = do_bench(lambda f=function, g=gate: f(q, k, v, g), return_mode="median")
        found[f"{name}-backward"] = do_bench(
            lambda f=function, g=gate: f(q, k, v, g)[0].backward(do), return_mode="median"
        )
    return found


def run() -> list[Row]:
    return gpu_rows.against_bars("recurrence", WORKS, measure)


def main() -> None:
    parser = gpu_rows.parser(__doc__)
    parser.add_argument("--fla", action="store_true", help="time flash-linear-attention in the same run")
    arguments = parser.parse_args()
    report = gpu_rows.report(arguments, WORKS, measure, facts=lambda: {"launch_us": launch_overhead()})
    if arguments.fla:
        report["fla_ms"] = fla_times()
        print(report["fla_ms"])
    gpu_rows.write(arguments, report)


if __name__ == "__main__":
    main()
