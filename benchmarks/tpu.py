"""`make tpu`: compiles every TPU kernel for TPUs that are not there, and reads what the compiler made of it.

libtpu's compiler runs on any Linux machine. What it refuses here (too much VMEM, a layout that does not exist) it
refuses on the chip. It also prints its schedule: a bundle is a cycle where nothing stalls. So bundles bound what the
schedule allows and never a time: what waits for memory, and how transfers overlap, only a chip can tell.

It takes long, so its file grows row by row, and rows that the same kernels and compiler have left there are kept.
"""

import argparse
import fcntl
import hashlib
import importlib.metadata
import itertools
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

UNIT = 128  # tokens of a head, by which kernels are compared


class Chip(NamedTuple):
    """One core as JAX counts devices; public figures."""

    topology: str
    clock: float  # GHz
    bandwidth: float  # GB/s


CHIPS = {
    "v4": Chip("v4:2x2x1", 1.05, 614),
    "v5e": Chip("v5e:2x2", 1.5, 819),
    "v5p": Chip("v5p:2x2x1", 1.75, 2765),
    "v6e": Chip("v6e:2x2", 1.75, 1640),
    "tpu7x": Chip("tpu7x:2x2x1", 1.9, 3690),
}


@dataclass(frozen=True)
class Case:
    name: str
    decay: str = "key"
    B: int = 1
    T: int = 4096
    H: int = 8
    Hkv: int = 8
    K: int = 128
    V: int = 128
    dtype: str = "bfloat16"
    N: int = 0  # packed sequences
    state: bool = False
    reverse: bool = False
    bounded: bool = False  # the schedule for gates of -5 · sigmoid(…) is read too

    @property
    def names(self) -> list[str]:
        """Those of its rows."""
        return [self.name, f"{self.name}, Kimi-K3's"] if self.bounded else [self.name]


CASES = [
    Case("key gates", bounded=True),
    Case("head gates", decay="head"),
    Case("constant decay", decay="constant"),
    Case("no decay", decay="none"),
    Case("key gates, states, reverse", state=True, reverse=True),
    Case("key gates, grouped heads", Hkv=2),
    Case("key gates, packed", N=8, state=True),
    Case("key gates, T = 4000", T=4000),
    Case("head gates, packed, reverse", decay="head", N=8, reverse=True),
    Case("key gates, K = V = 64", K=64, V=64),
    Case("key gates, K = V = 256", K=256, V=256),
    Case("head gates, K = V = 256", decay="head", K=256, V=256),
    Case("key gates, float32", dtype="float32"),
    Case("head gates, float32", decay="head", dtype="float32"),
    Case("key gates, float32, K = V = 256", dtype="float32", K=256, V=256),
    Case("head gates, float32, K = V = 256", decay="head", dtype="float32", K=256, V=256),
    Case("key gates, few tokens, odd heads", T=100, H=3, Hkv=1, K=64, V=128, state=True),
    Case("head gates, few tokens", decay="head", T=100),
    Case("constant decay, packed", decay="constant", N=8, state=True),
]

# of the delta rule
DELTA_RULE = [
    Case("head gates", decay="head"),
    Case("key gates", bounded=True),
    Case("no gates", decay="none"),
    Case("head gates, states, reverse", decay="head", state=True, reverse=True),
    Case("head gates, shared queries and keys", decay="head", Hkv=2),
    Case("head gates, packed", decay="head", N=8, state=True),
    Case("key gates, packed", N=8, state=True),
    Case("head gates, K = V = 64", decay="head", K=64, V=64),
    Case("head gates, K = V = 256", decay="head", K=256, V=256),
    Case("key gates, V = 256", V=256, state=True),
    Case("head gates, float32", decay="head", dtype="float32"),
    Case("key gates, float32", dtype="float32"),
    Case("head gates, float32, K = V = 256", decay="head", dtype="float32", K=256, V=256),
    Case("head gates, few tokens, float32, K = V = 256", decay="head", T=50, dtype="float32", K=256, V=256),
    Case("key gates, few tokens, odd heads", T=100, H=3, Hkv=1, K=64, V=128, state=True),
]

# of the convolution, whose channels are heads of `K`
CONVOLUTION = [
    Case("rows"),
    Case("rows, float32", dtype="float32"),
    Case("rows, states", state=True),
    Case("packed", N=8),
    Case("packed, states", N=8, state=True),
    Case("rows, T = 4000", T=4000),
    Case("rows, few tokens", T=100, state=True),
    Case("rows, one token", B=8, T=1, state=True),
]
TAPS = 4


@dataclass
class Row:
    """One kernel of a case on a chip; `bundles` (0 where not read) and `floor` are cycles for 128 tokens of a head."""

    case: str
    chip: str
    kernel: str
    bundles: float
    floor: float
    temporaries: int
    seconds: float


def prepare(folder: str | None) -> None:
    """What libtpu asks the environment of a machine without a TPU, and where it writes its schedules, if anywhere."""
    os.environ.update(TPU_SKIP_MDS_QUERY="1", TPU_WORKER_HOSTNAMES="localhost", TPU_ACCELERATOR_TYPE="v5litepod-4")
    os.environ.update(ALLOW_MULTIPLE_LIBTPU_LOAD="1", JAX_PLATFORMS="cpu")
    if folder:
        os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"


def convolution(case: Case) -> tuple[Callable[..., Any], list[Any]]:
    """Output, final state and gradients of the convolution."""
    import jax
    import jax.numpy as jnp

    import ejkernel

    D = case.H * case.K
    x = jax.ShapeDtypeStruct((case.B, case.T, D), case.dtype)
    arrays = {"x": x, "weight": jax.ShapeDtypeStruct((TAPS, D), jnp.float32)}
    if case.state:
        arrays["initial_state"] = jax.ShapeDtypeStruct((case.N or case.B, TAPS - 1, D), case.dtype)
    borders = {"cu_seqlens": jax.ShapeDtypeStruct((case.N + 1,), jnp.int32)} if case.N else {}

    def run(arrays: dict[str, Any], borders: dict[str, Any], d_output: Any) -> Any:
        results, pull = jax.vjp(lambda each: ejkernel.causal_conv1d(**each, **borders, activation="silu"), arrays)
        return results, pull((d_output, jnp.ones_like(results[1])))

    return run, [arrays, borders, x]


def program(op: str, case: Case) -> tuple[Callable[..., Any], list[Any]]:
    """Output, final state and gradients, from arrays `[B, T, heads · D]` as a model's projections leave them."""
    if op == "convolution":
        return convolution(case)
    import jax
    import jax.numpy as jnp

    import ejkernel

    B, T, H, Hkv, K, V = case.B, case.T, case.H, case.Hkv, case.K, case.V
    rows = case.N or B

    def shape(*sizes: int, dtype: Any = jnp.float32) -> Any:
        return jax.ShapeDtypeStruct(sizes, dtype)

    arrays = {
        "query": shape(B, T, H * K, dtype=case.dtype),
        "key": shape(B, T, Hkv * K, dtype=case.dtype),
        "value": shape(B, T, Hkv * V, dtype=case.dtype),
    }
    gates = {"head": ("g", shape(B, T, H)), "key": ("g", shape(B, T, H * K)), "constant": ("g_gamma", shape(H))}
    if case.decay in gates:
        name, array = gates[case.decay]
        arrays[name] = array
    if case.state:
        arrays["initial_state"] = shape(rows, H, K, V)
    borders = {"cu_seqlens": shape(case.N + 1, dtype=jnp.int32)} if case.N else {}
    heads = {"query": H, "key": Hkv, "value": Hkv}
    if case.decay == "key" or op == "recurrent":
        heads["g"] = H
    front = ejkernel.recurrent
    if op == "delta_rule":
        arrays["beta"] = shape(B, T, H)
        front = {"none": ejkernel.delta_rule, "head": ejkernel.gated_delta_rule, "key": ejkernel.kda}[case.decay]
        # value heads that share queries and keys, as Gated DeltaNet's
        arrays |= {"query": arrays["key"], "value": shape(B, T, H * V, dtype=case.dtype)}
        heads |= {"query": Hkv, "value": H}

    def run(arrays: dict[str, Any], borders: dict[str, Any], d_output: Any) -> Any:
        def output(arrays: dict[str, Any]) -> Any:
            split = {name: x.reshape(B, T, heads[name], -1) if name in heads else x for name, x in arrays.items()}
            found, state = front(**split, **borders, reverse=case.reverse)
            return found.reshape(B, T, H * V), state

        results, pull = jax.vjp(output, arrays)
        return results, pull((d_output, jnp.ones_like(results[1])))

    return run, [arrays, borders, shape(B, T, H * V, dtype=case.dtype)]


def steady(path: Path, turns: int, whole: int | None = None) -> int:
    """Bundles of the loop over blocks, without branches that are rarely taken.

    These are what a kernel does for the first and the last block of a sequence, and the exact path of strong gates. If
    there are loops inside of it, which have so many `turns`, all branches count. Of the two ways to compute a whole
    block, its largest branches, the first is for mild key gates and the second for bounded ones: `whole` says which.
    """
    bundles: list[str] = []
    depth: list[int] = []
    for line in path.read_text().splitlines():
        if found := re.match(r"^\s*0x[0-9a-f]+\s+(?:[A-Z]{2})?\s*:\s*(>*)", line):
            bundles.append(line)
            depth.append(len(found.group(1)))
        elif bundles:
            bundles[-1] += line
    starts: dict[str, int] = {}
    for i, text in enumerate(bundles):
        for region in re.findall(r"(?:Start/End empty|Start) region (\d+)", text):
            starts.setdefault(region, i)
    skipped = []
    for i, text in enumerate(bundles):
        branch = re.search(r"sbr\.rel \(!?%p\w+\) target = \$region(\d+)", text)
        if branch and depth[i] and starts.get(branch.group(1), 0) > i:
            skipped.append((i, starts[branch.group(1)]))
    # one that holds others is the loop's body
    inner = [each for each in skipped if not any(each[0] < other[0] and other[1] < each[1] for other in skipped)]
    if whole is not None:
        largest = sorted((each for each in inner if depth[each[0]] == 1), key=lambda each: each[0] - each[1])[:2]
        taken = sorted(largest)[whole]
        inner = [each for each in skipped if not (each[0] <= taken[0] and taken[1] <= each[1])]
    dead = {i for start, end in inner for i in range(start + 4, end)}
    if turns:
        return depth.count(1) + turns * depth.count(2)
    return sum(level == 1 and i not in dead for i, level in enumerate(depth))


def bytes_of(text: str) -> dict[str, int]:
    """What each kernel of a compiled program reads and writes, by its name."""
    sizes = {"bf16": 2, "f32": 4, "s32": 4}
    shapes: dict[str, int] = {}
    found = {}
    for line in text.splitlines():
        if made := re.match(r"\s*(?:ROOT )?%([\w.-]+) = (.*?) ([\w-]+)\(([^)]*)\)", line):
            name, result, kind, operands = made.groups()
            parts = re.findall(r"(bf16|f32|s32)\[([\d,]*)\]", result)
            total = 0
            for dtype, dims in parts:
                count = 1
                for dim in filter(None, dims.split(",")):
                    count *= int(dim)
                total += sizes[dtype] * count
            shapes[name] = total
            if kind == "custom-call" and "tpu_custom_call" in line:
                # an array may be read in blocks of two kinds
                found[name] = total + sum(shapes.get(each, 0) for each in set(re.findall(r"%([\w.-]+)", operands)))
    return found


def blocks_of(op: str, case: Case, kind: str) -> tuple[int, int]:
    """How often the loop of a kernel turns, and how often loops inside of it do."""
    import jax

    from ejkernel.kernels import convolution, delta_rule, linear_recurrence
    from ejkernel.kernels.chunks.pallas import plan

    if op == "convolution":
        facts = {"sequences": case.N or case.B, "layout": "packed" if case.N else "rows", "activation": "silu"}
        dtype = jax.numpy.dtype(case.dtype)
        conv = convolution.call.Call(case.B, case.T, case.H * case.K, TAPS, dtype=dtype, **facts)
        tiles = convolution.pallas.plan.sizes(conv, kind == "backward")
        turns = tiles.tokens // tiles.rows
        return case.B * tiles.blocks * tiles.channel_blocks, turns // min(turns, 2)

    H, K, V, rows, packed = case.H, case.K, case.V, case.N or case.B, case.N > 0
    facts = {"decay": case.decay, "scale": 1.0, "reverse": case.reverse, "dtype": jax.numpy.dtype(case.dtype)}
    call: Any
    if op == "delta_rule":
        call = delta_rule.call.Call(case.B, case.T, H, K, V, rows, packed, **facts)
        sizes_of, own = delta_rule.pallas.sizes, (case.Hkv, case.Hkv, H)
    else:
        call = linear_recurrence.call.Call(case.B, case.T, H, K, V, rows, packed, value_decay=False, **facts)
        sizes_of, own = plan.sizes, (H, case.Hkv, case.Hkv)
    arrays = [jax.ShapeDtypeStruct((case.B, case.T, heads, 1), call.dtype) for heads in own]
    sizes = sizes_of(call, *arrays)
    return case.B * H // sizes.heads * plan.number_of_visits(call, sizes), 0


def compile_for(chip: Chip, function: Any, *arguments: Any) -> Any:
    """A jitted function for one device of a chip."""
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, SingleDeviceSharding

    devices = topologies.get_topology_desc(platform="tpu", topology_name=chip.topology).devices
    place = SingleDeviceSharding(devices[0])
    given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), arguments)
    # Pallas asks the mesh in scope which TPU it lowers for
    with jax.sharding.use_abstract_mesh(Mesh(np.array(devices[:1]), ("device",)).abstract_mesh):
        return function.lower(*given).compile()


def decoding(name: str) -> dict[str, int]:
    """One token for many sequences, states donated: bytes of these, of results in their place, and beside them."""
    import jax
    import jax.numpy as jnp

    import ejkernel

    def step(state: Any, query: Any, key: Any, value: Any, gate: Any) -> Any:
        return ejkernel.recurrent_gla(query, key, value, gate, initial_state=state)

    state = jax.ShapeDtypeStruct((64, 16, 128, 128), jnp.float32)
    token = jax.ShapeDtypeStruct((64, 1, 16, 128), jnp.bfloat16)
    gate = jax.ShapeDtypeStruct(token.shape, jnp.float32)
    compiled = compile_for(CHIPS[name], jax.jit(step, donate_argnums=0), state, token, token, token, gate)
    memory = compiled.memory_analysis()
    states = 4 * 64 * 16 * 128 * 128
    return {"states": states, "in place": memory.alias_size_in_bytes, "temporaries": memory.temp_size_in_bytes}


def attention(name: str, packed: bool) -> dict[str, int]:
    """Softmax attention with its gradients: how many kernels, and bytes beside arguments and results."""
    import jax
    import jax.numpy as jnp

    import ejkernel

    def loss(query: Any, key: Any, value: Any, sinks: Any, borders: Any) -> Any:
        options = {"causal": True, "sliding_window": 1024, "logits_soft_cap": 30.0, "softmax_aux": sinks}
        options |= {"cu_seqlens": borders} if packed else {}
        return ejkernel.flash_attention(query, key, value, **options).astype(jnp.float32).sum()

    query, key = (jax.ShapeDtypeStruct((1, 4096, heads, 128), jnp.bfloat16) for heads in (8, 2))
    sinks = jax.ShapeDtypeStruct((8, 1), jnp.float32)
    borders = jax.ShapeDtypeStruct((9,), jnp.int32)
    compiled = compile_for(CHIPS[name], jax.jit(jax.grad(loss, (0, 1, 2, 3))), query, key, key, sinks, borders)
    kernels = compiled.as_text().count('custom_call_target="tpu_custom_call"')
    return {"kernels": kernels, "temporaries": compiled.memory_analysis().temp_size_in_bytes}


def measure(op: str, case: Case, name: str, folder: Path | None) -> Iterator[Row]:
    """The kernels of a case, compiled for a chip."""
    import jax

    chip = CHIPS[name]
    for path in folder.iterdir() if folder else ():
        path.unlink()
    function, arguments = program(op, case)
    start = time.perf_counter()
    compiled = compile_for(chip, jax.jit(function), *arguments)
    seconds = time.perf_counter() - start
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    units = case.B * case.H * case.T / UNIT
    kernels = bytes_of(compiled.as_text())
    moved_most = max(kernels.values())
    for kernel, moved in kernels.items():
        bundles = [0.0]
        kind = "backward" if "backward" in kernel else "forward"
        if folder:
            (path,) = (each for each in folder.glob(f"*-{kernel}-*-final_bundles.txt") if "analysis" not in each.name)
            blocks, turns = blocks_of(op, case, kind)
            wholes = (0, 1) if case.bounded else (None,)
            bundles = [steady(path, turns, whole) * blocks / units for whole in wholes]
        floor = moved / units / chip.bandwidth * chip.clock
        if floor > 0.1 * moved_most / units / chip.bandwidth * chip.clock:  # not what is done for a few tokens
            for row, found in zip(case.names, bundles, strict=folder is not None):
                yield Row(row, name, kind, round(found, 1), round(floor, 1), temporaries, round(seconds, 1))


FOUND: dict[str, Callable[[list[str]], dict[str, Any]]] = {
    "step": lambda chips: {chip: decoding(chip) for chip in chips},
    "flash_attention": lambda chips: {chip: attention(chip, packed=False) for chip in chips},
    "flash_attention, packed": lambda chips: {chip: attention(chip, packed=True) for chip in chips},
}


@dataclass(frozen=True)
class Table:
    """The cases of an op, and the kernels that serve them."""

    cases: list[Case]
    scheduled: int  # the first so many have their schedules read, which takes the compiler much longer
    core: str

    def origin(self) -> dict[str, str]:
        """What rows depend on: the compiler, and the kernels and cases as a digest."""
        code = hashlib.sha256(repr((self.cases, CHIPS)).encode())
        kernels = Path(__file__).parents[1] / "ejkernel/kernels"
        for folder in (kernels / self.core, kernels / "chunks"):
            for path in sorted((folder / "pallas").rglob("*.py")):
                code.update(path.read_bytes())
        versions = {name: importlib.metadata.version(name) for name in ("jax", "libtpu")}
        return {**versions, "code": code.hexdigest()[:16]}


TABLES = {
    "recurrent": Table(CASES, 4, "linear_recurrence"),
    "delta_rule": Table(DELTA_RULE, 3, "delta_rule"),
    "convolution": Table(CONVOLUTION, 3, "convolution"),
}


class Report:
    """Rows and what else was found; in a file, if there is one, which several processes may write to."""

    def __init__(self, path: Path | None, table: Table) -> None:
        self.path, self.table, self.origin = path, table, table.origin()
        self.rows: dict[tuple[str, ...], Row] = {}
        self.found: dict[str, Any] = {}
        self.add()

    def of(self, case: Case, chip: str) -> list[Row]:
        return [row for key, row in self.rows.items() if key[0] in case.names and key[1] == chip]

    def add(self, rows: Iterable[Row] = (), **found: Any) -> None:
        self.rows |= {(row.case, row.chip, row.kernel): row for row in rows}
        self.found |= found
        if self.path is None:
            return
        with self.path.open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            self._take_up(json.loads(file.read() or "{}"))
            file.truncate(0)
            cases, chips = [name for case in self.table.cases for name in case.names], list(CHIPS)
            rows = sorted(self.rows.values(), key=lambda row: (cases.index(row.case), chips.index(row.chip)))
            content = {**self.origin, "rows": [asdict(row) for row in rows], **self.found}
            file.write(json.dumps(content, indent=1) + "\n")

    def _take_up(self, content: dict[str, Any]) -> None:
        """What the same code and compiler have left."""
        if {name: content.get(name) for name in self.origin} == self.origin:
            rows = [Row(**row) for row in content["rows"]]
            self.rows = {(row.case, row.chip, row.kernel): row for row in rows} | self.rows
            self.found = {name: each for name, each in content.items() if name in FOUND} | self.found


def said(row: Row) -> str:
    """One line of the table, without a word of time."""
    bundles = f", {row.bundles:5.0f} bundles, {row.bundles / row.floor:4.2f} of it" if row.bundles else ""
    memory = f"temporaries {row.temporaries / 2**20:.1f} MiB"
    return f"{row.case:32s} {row.chip:6s} {row.kernel:8s} floor {row.floor:5.0f}{bundles}, {memory}, {row.seconds} s"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tpu", description=str(__doc__).splitlines()[0])
    parser.add_argument("--op", default="recurrent", choices=TABLES)
    parser.add_argument("--chips", default=",".join(CHIPS))
    parser.add_argument("--cases", default="", help="only those whose name has this in it")
    parser.add_argument("--json", type=Path, help="where to write the rows")
    parser.add_argument("--schedule", action="store_true", help="read the schedules too, of the first cases")
    arguments = parser.parse_args()
    op, table = arguments.op, TABLES[arguments.op]
    report, refused = Report(arguments.json, table), 0
    chips = arguments.chips.split(",")
    with tempfile.TemporaryDirectory() as dumps:
        folder = Path(dumps) if arguments.schedule else None
        prepare(dumps if arguments.schedule else None)
        chosen = table.cases[: table.scheduled] if folder else table.cases
        cases = [case for case in chosen if arguments.cases in case.name]
        for case, chip in itertools.product(cases, chips):
            try:
                rows = report.of(case, chip)
                if not rows:
                    rows = list(measure(op, case, chip, folder))
                    report.add(rows)
                print(*map(said, rows), sep="\n", flush=True)
            except Exception as error:
                refused += 1
                print(f"{case.name:32s} {chip:6s} REFUSED: {str(error).strip()[:300]}", flush=True)
        if op == "recurrent" and not arguments.cases and not folder and set(chips) == set(CHIPS):
            for kind, find in FOUND.items():
                report.add(**{kind: find(chips)})
                for name, each in report.found[kind].items():
                    print(f"{kind}, {name}: {each}")
    return min(refused, 1)


if __name__ == "__main__":
    sys.exit(main())
