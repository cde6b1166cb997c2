"""Reads off a compiled program what runs in it and how often, loops counted by their turns (XLA's own analysis counts
one turn of each).
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator

KINDS = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "f64": 8}
SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")
CALLED = re.compile(r"(?:body|to_apply|calls|computation|branch_computations)=\{?%?([\w.-]+)")


def collectives(text: str) -> Counter[tuple[str, int]]:
    """How often each collective runs in the program and the bytes a device gets by it: `{(kind, bytes): times}`."""
    found: Counter[tuple[str, int]] = Counter()
    chains = set()
    for line, times, _ in instructions(text):
        if match := re.search(rf"= (.*?) ({KINDS})(-start)?\(", line):
            # a TPU spreads one over what it computes meanwhile
            if chain := re.search(r'chain_id="(\d+)"', line):
                if chain[1] in chains:
                    continue
                chains.add(chain[1])
            sizes = _bytes(match[1])
            # one that is started has what is sent, what is received and perhaps more
            found[match[2], sizes[:2][-1] if match[3] else sum(sizes)] += times
    return found


def totals(found: Counter[tuple[str, int]]) -> tuple[int, int]:
    """Number of collectives and bytes of all of them."""
    return sum(found.values()), sum(size * times for (_, size), times in found.items())


def dot_flops(text: str) -> int:
    """Multiplications and additions of the program's matrix products."""
    total = 0
    for line, times, shapes in instructions(text):
        if match := re.search(
            r"= (\w+\[[\d,]*\])\S* dot\((?:\w+\[[\d,]*\]\S* )?%?([\w.-]+), .*?lhs_contracting_dims=\{([\d,]*)", line
        ):
            left = shapes[match[2]]
            contracted = [left[int(each)] for each in match[3].split(",") if each]
            total += 2 * times * math.prod(_dims(match[1])) * math.prod(contracted)
    return total


def instructions(text: str) -> Iterator[tuple[str, int, dict[str, list[int]]]]:
    """Every instruction that runs, how often, and the dimensions of what is computed beside it, by name."""
    bodies: dict[str, list[str]] = {}
    lines: list[str] = []
    entry = ""
    for line in text.splitlines():
        if opening := re.match(r"(ENTRY )?%?(\S+) \(.*\{$", line):
            bodies[opening[2]] = lines = []
            entry = opening[2] if opening[1] else entry
        else:
            lines.append(line)
    shapes = {name: _shapes(lines) for name, lines in bodies.items()}

    def visit(name: str, times: int) -> Iterator[tuple[str, int, dict[str, list[int]]]]:
        for line in bodies[name]:
            yield line, times, shapes[name]
            turns = _turns(line, bodies) if " while(" in line else 1
            for inner in CALLED.findall(line):
                yield from visit(inner, times * turns)

    yield from visit(entry, 1)


def _turns(line: str, bodies: dict[str, list[str]]) -> int:
    """Of a loop; one that nobody knows them of counts once."""
    if known := re.search(r'known_trip_count":\{"n":"(\d+)"', line):
        return int(known[1])
    condition = re.search(r"condition=%?([\w.-]+)", line)
    bounds = re.findall(r" constant\((\d+)\)", "\n".join(bodies[condition[1]])) if condition else []
    return int(bounds[0]) if len(bounds) == 1 else 1


def _shapes(lines: list[str]) -> dict[str, list[int]]:
    made = (re.match(r"\s*(?:ROOT )?%?([\w.-]+) = (\w+\[[\d,]*\])", line) for line in lines)
    return {found[1]: _dims(found[2]) for found in made if found}


def _dims(shape: str) -> list[int]:
    found = SHAPE.search(shape)
    assert found is not None
    return [int(each) for each in found[2].split(",") if each]


def _bytes(shapes: str) -> list[int]:
    return [
        BYTES[kind] * math.prod(map(int, filter(None, dims.split(","))))
        for kind, dims in SHAPE.findall(shapes)
        if kind in BYTES
    ]


def launches(text: str) -> Iterator[tuple[str, str, int]]:
    """Of each kernel that a program for GPUs starts: its kind, its name and the bytes that it reads and writes.

    Kinds are the operation, of custom calls the target and of products "matmul". Of branches all are listed. The bytes
    are those of the arrays that a kernel is given; it may do without some.
    """
    bodies = dict(re.findall(r"^(?:ENTRY )?%?(\S+) \([^\n]*\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL))
    entry = re.search(r"^ENTRY %?(\S+)", text, re.MULTILINE)
    assert entry is not None

    def visit(name: str) -> Iterator[tuple[str, str, int]]:
        made = _operations(bodies[name])
        for own, (shape, kind, operands, line) in made.items():
            if kind in ("while", "call", "conditional"):
                called = re.findall(r"(?:body|to_apply|\w+_computations?)=\{?((?:%?[\w.-]+(?:, )?)+)", line)
                for each in itertools.chain(*map(_names, called)):
                    yield from visit(each)
            elif kind not in _NOTHING and not kind.endswith("-done"):
                inner = re.search(r"calls=%?([\w.-]+)", line)
                fused = _operations(bodies[inner[1]]) if inner and kind == "fusion" else {}
                read = sum(_read(fused, i, made[each][0]) for i, each in enumerate(operands) if each in made)
                target = re.search(r'custom_call_target="([^"]+)"', line)
                product = "gemm" in own or "cublas" in line or kind == "dot" or " dot(" in line
                yield "matmul" if product else target[1] if target else kind, own, read + _written(fused, shape)

    yield from visit(entry[1])


_NOTHING = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "partition-id", "after-all", "iota"}
_OPERATION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*?)\)", re.MULTILINE)
Operations = dict[str, tuple[str, str, list[str], str]]


def _operations(body: str) -> Operations:
    """Results, kinds, operands and lines by name."""
    lines = (line for line in body.splitlines() if " = " in line)
    found = ((_OPERATION.match(line), line) for line in lines)
    return {each[1]: (each[2], each[3], _names(each[4]), line) for each, line in found if each}


def _names(listed: str) -> list[str]:
    without_comments = re.sub(r"/\*.*?\*/", "", listed)
    return [each.strip().split(" ")[-1].lstrip("%") for each in re.split(r",(?![^\[{(]*[\]})])", without_comments)]


def _read(fused: Operations, number: int, shape: str) -> int:
    """Bytes of an operand, of which a fusion may read a slice only."""
    own = next((name for name, each in fused.items() if each[1:3] == ("parameter", [str(number)])), None)
    uses = [each for each in fused.values() if own is not None and own in each[2]]
    if uses and all(each[1] in ("slice", "dynamic-slice") for each in uses):
        return sum(sum(_bytes(each[0])) for each in uses)
    if uses and all(each[1] == "dynamic-update-slice" and each[2][0] == own for each in uses):
        return 0
    return sum(_bytes(shape))


def _written(fused: Operations, shape: str) -> int:
    """Bytes of a result, of which a fusion may write a slice only."""
    root = next((each for each in fused.values() if each[3].lstrip().startswith("ROOT")), None)
    if root is not None and root[1] == "dynamic-update-slice":
        return sum(_bytes(fused[root[2][1]][0]))
    return sum(_bytes(re.sub(r"s8\[\d+\]\S*", "", shape)))  # cuBLAS has a workspace
