"""Fills in tables of times from the rows that were measured, `benchmarks/results`.

A page asks for one by `<!-- measured: TABLE -->`. `times` is how many times as long as
ours another library takes.
"""

import json
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
MARKER = re.compile(r"^<!-- measured: (\w+) -->$", re.MULTILINE)

# rows of benchmarks/gpu/ops.py that a page shows elsewhere, or not at all
UNSHOWN = (
    "gated_delta_rule, float32",
    "gated_delta_rule, one token, B256",
    "kda, B1 T65536",
)
OPS = ("linear_recurrence_h200", "delta_rule_h200")
# as in benchmarks/page/blocks.py
PEERS = {
    "scan": "`lax.scan`",
    "jax.nn": "`jax.nn`, XLA",
    "cudnn": "`jax.nn`, cuDNN",
}


def _read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def _times(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}"


def _table(*rows: Iterable[str]) -> str:
    lines = [list(row) for row in rows]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _calls(results: str) -> Iterator[tuple[str, dict[str, dict[str, Any]]]]:
    """Each call and its rows, by direction."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in _read(results)["rows"]:
        direction = row["direction"].replace("+", " + ")
        if row["name"] not in UNSHOWN:
            found.setdefault(row["name"], {})[direction] = row
    yield from ((_call(name), rows) for name, rows in found.items())


def _fla() -> Iterator[list[str]]:
    yield ["times", "call", "direction", "ours, ms", "fla, ms"]
    for call, rows in chain(*map(_calls, OPS)):
        for direction, row in rows.items():
            if theirs := row["fla_ms"]:
                times = _times(theirs / row["ms"])
                yield [times, call, direction, f"{row['ms']:.3f}", f"{theirs:.2f}"]


NUMBERS = {
    "ms": ("ms", "{:.3f}"),
    "floor_ms": ("floor, ms", "{:.3f}"),
    "largest_error": ("error", "{:.1e}"),
    "beside_inputs_and_outputs_mib": ("beside, MiB", "{:.0f}"),
}


def _triton(results: str) -> Iterator[list[str]]:
    yield ["call", *(title for title, _ in NUMBERS.values()), "measured"]
    for call, rows in _calls(results):
        cells = (_both(rows, name, form) for name, (_, form) in NUMBERS.items())
        yield [call, *cells, _dates(rows)]


def _dates(rows: dict[str, dict[str, Any]]) -> str:
    """When the rows of a call were measured, in November 2026."""
    days = dict.fromkeys(row.get("date", "")[8:] for row in rows.values())
    # older files do not say
    return " / ".join(f"{each} Nov" if each else "before 17 Nov" for each in days)


def _both(rows: dict[str, dict[str, Any]], name: str, form: str) -> str:
    """A number forward / forward + backward, - where it was not measured."""
    directions = ("forward", "forward + backward")
    found = [
        form.format(rows[each][name]) if each in rows else "-" for each in directions
    ]
    # one that a table does not break at its minus sign
    return " / ".join(found[: 1 + ("forward + backward" in rows)]).replace(
        "e-", "e\u2011"
    )


def _cudnn() -> Iterator[list[str]]:
    yield ["times", "query / key heads", "direction", "ours, ms", "cuDNN, ms"]
    for row in _read("attention_h200")["rows"]:
        direction = row["direction"].replace("+", " + ")
        milliseconds = (f"{row[each]:.3f}" for each in ("ours_ms", "cudnn_ms"))
        yield [_times(1 / row["ratio"]), row["name"], direction, *milliseconds]


def _attention() -> dict[str, dict[str, dict[str, Any]]]:
    """The rows of benchmarks/gpu/attention.py, by call and direction."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in _read("flash_attention_h200")["rows"]:
        direction = row["direction"].replace("+", " + ")
        row = row | {"ms": row[f"{row['chosen']}_ms"]}
        found.setdefault(row["name"], {})[direction] = row
    return found


def _pytorch() -> Iterator[list[str]]:
    yield ["times", "call", "ours on", "ours, ms", "flex_attention, ms"]
    for call, rows in _attention().items():
        if not all(row.get("flex_ms") for row in rows.values()):
            continue
        times = " / ".join(_times(row["flex_ms"] / row["ms"]) for row in rows.values())
        runs = rows["forward"]["chosen"]
        milliseconds = (_both(rows, name, "{:.2f}") for name in ("ms", "flex_ms"))
        yield [times, call, f"`{runs}`", *milliseconds]


def _bench(name: str) -> Iterator[list[str]]:
    """Every op and peer, at the most tokens that both ran."""
    directions = ("forward", "forward+backward")
    heads = (f"{each.replace('+', ' + ')}, times (tokens)" for each in directions)
    yield ["op", "beside", *heads]
    longest: dict[tuple[str, str], dict[str, Any]] = {}
    for row in _read(name)["rows"]:
        if row["who"] != "ejkernel" and row.get("ratio"):
            known = longest.setdefault((row["op"], row["who"]), {})
            if known.get(row["direction"], row)["tokens"] <= row["tokens"]:
                known[row["direction"]] = row
    for (op, peer), rows in longest.items():
        cells = (
            f"{_times(rows[each]['ratio'])} ({rows[each]['tokens']:,})"
            if each in rows
            else "-"
            for each in directions
        )
        yield [f"`{op}`", PEERS[peer], *cells]


def _flash() -> Iterator[list[str]]:
    yield ["call", "runs on", "Triton, ms", "cuDNN, ms", "XLA, ms", "flex, ms", "error"]
    columns = {
        "triton_ms": "{:.3f}",
        "cudnn_ms": "{:.3f}",
        "xla_ms": "{:.2f}",
        "flex_ms": "{:.3f}",
        "largest_error": "{:.1e}",
    }
    for call, rows in _attention().items():
        if "tangents" in rows:
            continue
        cells = []
        for name, form in columns.items():
            known = {way: row for way, row in rows.items() if row.get(name)}
            cells.append(_both(known, name, form) if known else "-")
        yield [call, f"`{rows['forward']['chosen']}`", *cells]


def _schedules(name: str) -> Iterator[list[str]]:
    """Bundles and their share of the floor, kernels below one another, chips beside."""
    rows = _read(name)["rows"]
    chips = list(dict.fromkeys(row["chip"] for row in rows))
    yield ["kernel", *chips]
    by_kernel: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        share = f"{row['bundles']:.0f} ({row['bundles'] / row['floor']:.2f})"
        by_kernel.setdefault((row["case"], row["kernel"]), {})[row["chip"]] = share
    for (case, kernel), cells in by_kernel.items():
        yield [f"{case}, {kernel}", *(cells.get(chip, "-") for chip in chips)]


def _compiled(name: str) -> Iterator[list[str]]:
    """Largest temporaries of a case's program, in MiB, by chip."""
    rows = _read(name)["rows"]
    chips = list(dict.fromkeys(row["chip"] for row in rows))
    yield ["call, with gradients", *chips]
    for case in dict.fromkeys(row["case"] for row in rows):
        found = {row["chip"]: row["temporaries"] for row in rows if row["case"] == case}
        yield [
            case,
            *(f"{found[each] / 2**20:.0f}" if each in found else "-" for each in chips),
        ]


def _mesh(file: str, axes: str, memory: bool) -> Iterator[list[str]]:
    """What a device runs, moves and may hold of calls sharded by rows and heads."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in _read(file)["rows"]:
        if row["sharded"] != "time" and axes in row["axes"]:
            found.setdefault((row["call"], row["direction"]), []).append(row)
    counts = sorted({row["devices"] for rows in found.values() for row in rows})
    named = [f"MiB on each of {each}" for each in counts]
    held = ["MiB on one", *named] if memory else []
    yield ["call", "direction", "kernels", "moves", *held]
    for (call, direction), rows in found.items():
        kernels = sorted({row["kernels"] for row in rows})
        largest = max(rows, key=lambda row: row["moved"])
        cells = [_call(call), direction, _range(kernels), _moves(largest)]
        if memory:
            cells.append(f"{rows[0]['of_one'] / 2**20:.1f}")
            for count in counts:
                each = [row["temporaries"] for row in rows if row["devices"] == count]
                cells.append(f"{max(each) / 2**20:.1f}")
        yield cells


def _mesh_time(file: str) -> Iterator[list[str]]:
    """The same of `ejkernel.parallel`."""
    rows = [row for row in _read(file)["rows"] if row["sharded"] == "time"]
    counts = sorted({row["devices"] for row in rows})
    yield ["call", "direction", "kernels", *(f"moves, {each}" for each in counts)]
    found: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["call"], row["direction"]), {})[row["devices"]] = row
    for (call, direction), by_count in found.items():
        kernels = sorted({row["kernels"] for row in by_count.values()})
        said = (_moves(by_count[each]) for each in counts)
        yield [_call(call), direction, _range(kernels), *said]


def _mesh_step() -> Iterator[list[str]]:
    """What a training step moves: what layers hand on, and the rest."""
    steps = [_read(file)["training_step"] for file in ("gpu_mesh", "tpu_mesh")]
    meshes = zip(("H200s", "v5e"), (step["mesh"] for step in steps), strict=True)
    yield [
        "a step moves",
        *(f"{rows} by {heads} {what}" for what, (rows, heads) in meshes),
    ]
    for name, between in (
        ("between layers", True),
        ("gradients of parameters, and the loss", False),
    ):
        cells = [name]
        for step in steps:
            moved = [
                each
                for each in step["moved"]
                if (each[1] == step["between_layers"]) == between
            ]
            kinds: dict[str, int] = {}
            for kind, _, times in moved:
                kinds[kind] = kinds.get(kind, 0) + times
            total = sum(size * times for _, size, times in moved)
            cells.append(_moves({"collectives": kinds, "moved": total}))
        yield cells
    yield ["kernels", *(str(step["kernels"]) for step in steps)]


def _call(name: str) -> str:
    """A row's name, the op in it as code."""
    op, *options = name.split(", ", 1)
    return ", ".join([f"`{op}`", *options])


def _range(numbers: list[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"


def _moves(row: dict[str, Any]) -> str:
    said = ", ".join(f"{times} {kind}" for kind, times in row["collectives"].items())
    return f"{said}, {row['moved'] / 2**20:.2f} MiB" if said else "nothing"


def _layers() -> Iterator[list[str]]:
    columns = {
        "output": "output",
        "gradients": "gradients",
        "decoding": "decoding",
        "float64": "both in float64",
        "ours": "ours",
        "theirs": "theirs",
    }
    yield ["layer", "reference", *columns.values()]
    for row in _read("layers")["rows"]:
        cells = (
            f"{row[name]:.1e}".replace("e-", "e\u2011") if name in row else "-"
            for name in columns
        )
        yield [f"`{row['layer']}`", row["reference"], *cells]


def _layers_files() -> Iterator[list[str]]:
    rows = _read("layers")["files"]
    yield ["files of", "layers", "shards"]
    names = ", ".join(f"`{row['model_type']}`" for row in rows)
    yield [
        names,
        *(str(sum(row[name] for row in rows)) for name in ("layers", "shards")),
    ]


def _layers_versions() -> Iterator[list[str]]:
    found = _read("layers")
    yield ["measured", *found["versions"]]
    yield [found["date"], *found["versions"].values()]


def _layer_steps() -> Iterator[list[str]]:
    """What one layer's step of decoding starts and moves, as compiled."""
    yield [
        "layer",
        "batch",
        "kernels: products, ours, other",
        "MB moved",
        "MB of parameters, and of states read and written",
    ]
    for row in _read("steps_compiled")["rows"]:
        layer, kind = row["name"].split(", ")
        cells = [_kernels(row), f"{_moved(row):.1f}", f"{_least(row):.1f}"]
        yield [f"`{layer}`", kind.removeprefix("step B"), *cells]


def _layer_training() -> Iterator[list[str]]:
    """What training a layer starts, as compiled, and what kernels of XLA move."""
    yield ["layer", "", "kernels: products, ours, other", "MB moved by others"]
    for row in _read("layers_compiled")["rows"]:
        layer, kind = row["name"].split(", ")
        yield [f"`{layer}`", kind, _kernels(row), f"{row['others_mb']:.0f}"]


def _layer_times() -> Iterator[list[str]]:
    """Milliseconds of whole layers, forward / with gradients."""
    rows = {row["name"]: row for row in _read("layers_h200")["rows"]}
    yield ["layer", "`B8 T4096`", "packed", "its projections alone"]
    for layer in dict.fromkeys(name.split(", ")[0] for name in rows):

        def cell(kind: str, number: str = "ms", layer: str = layer) -> str:
            found = (rows.get(f"{layer}, {kind}{each}", {}) for each in DIRECTIONS)
            return " / ".join(_short(each.get(number)) for each in found)

        yield [f"`{layer}`", cell(""), cell("packed "), cell("", "projections_ms")]


DIRECTIONS = ("forward", "gradients")


def _step_times() -> Iterator[list[str]]:
    """Milliseconds of a token of 24 layers, and of reading and writing its bytes."""
    found = _read("steps_h200")
    times = {row["name"]: row["ms"] for row in found["rows"]}
    counts = {row["name"]: _least(row) for row in _read("steps_compiled")["rows"]}
    yield ["layer", "one row", "bytes", "64 rows", "bytes"]
    for layer in dict.fromkeys(name.split(", ")[0] for name in times):
        cells = [f"`{layer}`"]
        for rows in (1, 64):
            name = f"{layer}, step B{rows}"
            least = counts.get(name)
            bandwidth = found["copy_bandwidth_tb_s"] * 1e3
            cells += [_short(times.get(name)), _short(least and 24 * least / bandwidth)]
        yield cells


def _least(row: dict[str, Any]) -> float:
    """MB of a step's weights, and of the states that it reads and writes."""
    # a cache is read, and a token of it written
    twice = 1 if row["name"].startswith("MultiHeadAttention") else 2
    return row["parameters_mb"] + twice * row["carried_mb"]


def _short(number: float | None) -> str:
    """To two digits, or three from 10 on."""
    if number is None:
        return "-"
    return f"{number:#.2g}" if number < 10 else f"{number:#.3g}"


def _kernels(row: dict[str, Any]) -> str:
    return ", ".join(
        str(row[f"{each}_kernels"]) for each in ("products", "ours", "others")
    )


def _moved(row: dict[str, Any]) -> float:
    return sum(row[f"{each}_mb"] for each in ("products", "ours", "others"))


def _numerics() -> Iterator[list[str]]:
    """The largest errors of each op by dtype, over all kinds of input."""
    dtypes = ("float32", "bfloat16", "float16")
    yield ["op", "by", *dtypes]
    worst: dict[tuple[str, str], dict[str, list[float]]] = {}
    for row in _read("numerics")["rows"]:
        cell = worst.setdefault((row["op"], row["by"]), {}).setdefault(
            row["dtype"], [0.0, 0.0]
        )
        for name, error in row["errors"].items():
            gradient = name.startswith("d ")
            cell[gradient] = max(cell[gradient], error or 0.0)
    for (op, by), cells in worst.items():
        shown = (" / ".join(f"{each:.0e}" for each in cells[name]) for name in dtypes)
        yield [op, by, *(each.replace("e-", "e\u2011") for each in shown)]


def _one_query() -> Iterator[list[str]]:
    """Decoding beside einsums, by call, on two releases of JAX."""
    names = ("flash_attention", "attention")
    both = [_read(each) for each in ("calls_cpu", "calls_cpu_newest")]
    heads = (f"`{name}`, JAX {each['jax']}" for each in both for name in names)
    yield ["heads, dims, dtype", "keys", *heads]
    found: dict[tuple[str, str], list[str]] = {}
    for each in both:
        for row in each["rows"]:
            if row["name"] in names and row["group"].startswith("one query, "):
                _, keys, heads_and_dims, dtype = row["group"].split(", ")
                call = f"{heads_and_dims}, {dtype}", keys.removesuffix(" keys")
                found.setdefault(call, []).append(_times(row["ratio"]))
    for call, cells in found.items():
        yield [*call, *cells]


def _overhead() -> Iterator[list[str]]:
    """What calls cost beside `jax.nn.dot_product_attention`'s, by op."""
    groups: dict[str, dict[str, Any]] = {}
    for row in _read("calls_cpu")["rows"]:
        if row["group"].startswith("overhead, "):
            rows = groups.setdefault(row["group"].removeprefix("overhead, "), {})
            rows[row["name"]] = row
    yield ["", *(f"{group}, ms (times)" for group in groups)]
    for name in next(iter(groups.values())):
        rows = [each[name] for each in groups.values()]
        said = (f"{row['median_ms']:.0f} ({_times(row['ratio'])})" for row in rows)
        known = "jax.nn.dot_product_attention" if name == "jax.nn" else name
        yield [f"`{known}`", *said]


TABLES = {
    "numerics": _numerics,
    "one_query": _one_query,
    "overhead": _overhead,
    "tpu_schedules": lambda: _schedules("tpu_schedules"),
    "tpu_delta_rule_schedules": lambda: _schedules("tpu_delta_rule_schedules"),
    "tpu_convolution_schedules": lambda: _schedules("tpu_convolution_schedules"),
    "tpu_compiled": lambda: _compiled("tpu_compiled"),
    "tpu_delta_rule_compiled": lambda: _compiled("tpu_delta_rule_compiled"),
    "tpu_convolution_compiled": lambda: _compiled("tpu_convolution_compiled"),
    "gpu_mesh": lambda: _mesh("gpu_mesh", "", memory=True),
    "gpu_mesh_time": lambda: _mesh_time("gpu_mesh"),
    "mesh_step": _mesh_step,
    "tpu_mesh": lambda: _mesh("tpu_mesh", "Explicit", memory=False),
    "tpu_mesh_time": lambda: _mesh_time("tpu_mesh"),
    "layers": _layers,
    "layer_steps": _layer_steps,
    "layer_training": _layer_training,
    "layer_times": _layer_times,
    "step_times": _step_times,
    "layers_files": _layers_files,
    "layers_versions": _layers_versions,
    "flash": _flash,
    "linear_recurrence": lambda: _triton("linear_recurrence_h200"),
    "delta_rule": lambda: _triton("delta_rule_h200"),
    "fla": _fla,
    "cudnn": _cudnn,
    "pytorch": _pytorch,
    "bench_h200": lambda: _bench("bench_h200"),
}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """What MkDocs makes a page of, given the text that the page's file holds."""
    return MARKER.sub(lambda found: _table(*TABLES[found[1]]()), markdown)
