"""Reads collectives off a compiled program."""

import math
import re
from collections import Counter

KINDS = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "f64": 8}


def collectives(text):
    """How often each collective runs in the program and the bytes a device gets by it: `{(kind, bytes): times}`."""
    bodies = {}
    for line in text.splitlines():
        if opening := re.match(r"(ENTRY )?%?(\S+) \(.*\{$", line):
            bodies[opening[2]] = lines = []
            entry = opening[2] if opening[1] else None
            bodies |= {"ENTRY": lines} if entry else {}
        elif bodies:
            lines.append(line)

    def count(name):
        found = Counter()
        for line in bodies[name]:
            if match := re.search(rf"= (\S+) ({KINDS})(?:-start)?\(", line):
                shapes = re.findall(r"(\w+)\[([\d,]*)\]", match[1])
                sizes = [BYTES[kind] * math.prod(map(int, filter(None, dims.split(",")))) for kind, dims in shapes]
                found[match[2], sizes[-1]] += 1
            for inner in re.findall(r"(?:body|to_apply|calls|computation)=%?([\w.-]+)", line):
                times = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
                inside = count(inner)
                if " while(" in line and inside:
                    inside = {key: number * int(times[1]) for key, number in inside.items()}
                found.update(inside)
        return found

    return count("ENTRY")


def totals(found):
    """Number of collectives and bytes of all of them."""
    return sum(found.values()), sum(size * times for (_, size), times in found.items())
