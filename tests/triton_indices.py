"""The index arithmetic of the Triton kernels, bounded for shapes far beyond any memory; needs no GPU.

Each launch of a call is compiled to Triton's intermediate language as it would be on a Hopper GPU, and what values its
integers can take is followed from the sizes and the number of programs to every offset. Run as a script, in a process
of its own: where kernels have been interpreted they cannot be compiled any more.
"""

import re
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

NAME = r"%[\w#-]+"
# Calls of softmax attention: shapes of its arrays, of those without a gradient, and options.
LONG = {"query": (1, 1 << 22, 64, 128), "key": (1, 1 << 22, 16, 128), "value": (1, 1 << 22, 16, 128)}
ROWS = {"query": (1 << 17, 300, 32, 128), "key": (1 << 17, 300, 8, 128), "value": (1 << 17, 300, 8, 64)}
PAIRS = {**dict.fromkeys(("query", "key", "value"), (4, 1 << 17, 16, 64)), "bias": (4, 16, 1 << 17, 1 << 17)}
CACHE = {"query": (1 << 12, 1, 32, 128), **dict.fromkeys(("key", "value"), (1 << 12, 1 << 20, 8, 128))}
ATTENTION = {
    "a long row": (LONG, {}, {"causal": True}),
    "a window": (LONG, {}, {"sliding_window": (1000, 1000), "logits_soft_cap": 5.0}),
    "packed sequences": (LONG, {"cu_seqlens": (70_001,)}, {"causal": True}),
    "many rows": (ROWS, {"query_offset": (1 << 17,)}, {"causal": True}),
    "pairs": (PAIRS, {"attention_mask": (1, 1, 1 << 17, 1 << 17)}, {}),
    "a cache": (CACHE, {"query_offset": (1 << 12,)}, {"causal": True}),
}
REACHED = []  # kernel, furthest offset, programs

INTEGER = re.compile(r"(?:tensor<[\dx]*)?i(32|64)>?$")
SAME = (
    "tt.splat",
    "tt.broadcast",
    "tt.expand_dims",
    "tt.trans",
    "tt.reshape",
    "arith.extsi",
    "arith.extui",
    "arith.trunci",
)


@dataclass(frozen=True)
class Range:
    low: int
    high: int

    def corners(self, other, function):
        each = [function(a, b) for a in (self.low, self.high) for b in (other.low, other.high)]
        return Range(min(each), max(each))


def _divide(a, b):
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _remainder(a, b):
    most = max(abs(b.low), abs(b.high)) - 1
    return Range(0 if a.low >= 0 else -most, min(max(a.high, 0), most))


RULES = {
    "arith.addi": lambda a, b: a.corners(b, lambda x, y: x + y),
    "arith.subi": lambda a, b: a.corners(b, lambda x, y: x - y),
    "arith.muli": lambda a, b: a.corners(b, lambda x, y: x * y),
    "arith.divsi": lambda a, b: a.corners(b, _divide),
    "arith.remsi": _remainder,
    "arith.minsi": lambda a, b: a.corners(b, min),
    "arith.maxsi": lambda a, b: a.corners(b, max),
    "arith.shrsi": lambda a, b: a.corners(b, lambda x, y: x >> y),
    "arith.shli": lambda a, b: a.corners(b, lambda x, y: x << y),
    "arith.andi": lambda a, b: Range(0, min(a.high, b.high)),
    "arith.ori": lambda a, b: Range(0, (1 << max(a.high, b.high).bit_length()) - 1),
    "arith.xori": lambda a, b: Range(0, (1 << max(a.high, b.high).bit_length()) - 1),
}


def overflows(text, sizes, programs, loaded, blocks=0):
    """The lines of a kernel whose result may not fit its type, and the largest offset that any pointer gets.

    `sizes` are its integer arguments in order. What it reads from memory are borders and counts that grow from one
    sequence to the next, `loaded` at most; so the difference of two of them is between 0 and that, and a block's
    number less one of them is its number in its sequence, at most `blocks`. What is made of floats is followed only to
    see that no pointer gets it.
    """
    known, found, furthest, read, made_of_floats = {}, [], 0, set(), set()
    # integers that go around a loop or through a reduction are flags and the like; a loop is held to it
    carried, open_blocks = Range(0, (1 << loaded.bit_length()) - 1), []
    arguments = re.findall(r"(%\w+): i(?:32|64)", next(line for line in text.splitlines() if "tt.func" in line))
    known |= {name: Range(size, size) for name, size in zip(arguments, sizes, strict=True)}
    for line in text.splitlines():
        line = line.strip()
        if loop := re.search(rf"scf\.for ({NAME}) = ({NAME}) to ({NAME}) step", line):
            name, start, end = loop.groups()
            known[name] = Range(known[start].low, max(known[end].high - 1, known[start].low))
            around = re.search(r"iter_args\((.*?)\) ->", line)
            known |= {each: carried for each in re.findall(r"(%\w+) =", around[1] if around else "")}
            if made := re.match(r"(%\w+)(?::(\d+))? = scf", line):
                known |= {made[1]: carried} | {f"{made[1]}#{i}": carried for i in range(int(made[2] or 0))}
            open_blocks.append("loop")
            continue
        if line.startswith("}") and open_blocks:
            open_blocks.pop()
        if line.endswith("{"):
            open_blocks.append("block")
        if line.startswith("scf.yield") and open_blocks and open_blocks[-1] == "loop":
            values, types = line.removeprefix("scf.yield").rsplit(" : ", 1)
            for each, kind in zip(values.split(","), re.findall(r"tensor<\S+>|\w+", types), strict=True):
                value = known.get(each.strip())
                if INTEGER.search(kind) and not (value and 0 <= value.low <= value.high <= carried.high):
                    found.append(f"{line}  # {each.strip()} grows around the loop")
            continue
        if reduced := re.match(r'(%\w+) = "tt\.reduce"', line):
            known[reduced[1]] = carried
            made_of_floats |= {reduced[1]} if made_of_floats & set(re.findall(NAME, line)[1:]) else set()
        if line.startswith("^bb0("):
            known |= {each: carried for each in re.findall(r"(%\w+): i32", line)}
        if offset := re.match(rf"{NAME} = tt\.addptr {NAME}, ({NAME})", line):
            assert offset[1] not in made_of_floats, line
            furthest = max(furthest, known[offset[1]].high)
            continue
        made = re.match(rf"({NAME}) = (\S+) (.*?) : (.*)$", line)
        if not made:
            continue
        name, op, operands, types = made.groups()
        result = INTEGER.search(types.split("->")[-1].strip())
        if op == "tt.load":
            if re.search(r"tt\.ptr<i32>", types):
                known[name] = Range(0, loaded)
                read.add(name)
            continue
        if op == "arith.constant":
            if result and (value := re.match(r"(?:dense<)?(-?\d+)>?$", operands)):
                known[name] = Range(int(value[1]), int(value[1]))
            continue
        if not result or op == "arith.cmpi":
            continue
        names = re.findall(NAME, operands)
        if op in ("arith.fptosi", "tt.bitcast") or made_of_floats & set(names):
            known[name] = Range(0, 0)
            made_of_floats.add(name)
            continue
        if op == "tt.get_program_id":
            known[name] = Range(0, programs - 1)
        elif op == "tt.get_num_programs":
            known[name] = Range(programs, programs)
        elif op == "tt.make_range":
            ends = dict(re.findall(r"(end|start) = (-?\d+)", line))
            known[name] = Range(int(ends["start"]), int(ends["end"]) - 1)
        elif op in SAME:
            known[name] = Range(0, 1) if re.search(r"\bi1>? to|xi1> to", types) else known[names[0]]
            read |= {name} if names[0] in read else set()
        elif op == "arith.select":
            a, b = known[names[-2]], known[names[-1]]
            known[name] = Range(min(a.low, b.low), max(a.high, b.high))
            read |= {name} if read & set(names[-2:]) else set()
        elif op == "arith.subi" and names[1] in read:
            known[name] = Range(0, loaded if names[0] in read else blocks)
        elif op in RULES:
            known[name] = RULES[op](known[names[0]], known[names[1]])
        else:
            raise NotImplementedError(f"no rule for {line}")
        bits = int(result[1])
        if not -(2 ** (bits - 1)) <= known[name].low <= known[name].high < 2 ** (bits - 1):
            found.append(f"{line}  # {known[name].low} … {known[name].high}")
    return found, furthest


def recorded(program):
    """What `program` launches when it is traced: kernel, arguments, number of programs, constants."""
    from ejkernel.kernels import _launch

    found = {}

    def record(kernel, inputs, outputs, *, constants, programs, tile, in_place=None):
        given = {name: each for name, each in {**inputs, **outputs}.items() if each is not None}
        flat = _launch.flat(kernel, (*inputs, *outputs), tuple(given))
        found[kernel, programs, str(constants)] = flat, list(given.values()), programs, constants
        return _launch.named(outputs, {name: jnp.zeros(x.shape, x.dtype) for name, x in outputs.items() if x})

    _launch.launch, _launch.unavailable = record, lambda: None
    program()
    return list(found.values())


def launches(case):
    """What a call of the linear recurrence and its gradients launch."""
    from ejkernel.kernels.linear_recurrence import triton as triton_gpu

    call = case.call
    B, T, H, N = call.batch, call.tokens, call.heads, call.sequences

    def shape(*sizes, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(sizes, dtype)

    tokens = [shape(B, T, heads, dim, dtype=call.dtype) for heads, dim in ((H, case.K), (case.Hkv, case.K))]
    value, d_output = (shape(B, T, heads, case.V, dtype=call.dtype) for heads in (case.Hkv, H))
    gates = {"none": None, "constant": shape(N, H), "head": shape(B, T, H), "key": shape(B, T, H, case.K)}
    by_value = shape(B, T, H, case.V) if case.value_gate else None
    state = shape(N, H, case.K, case.V)
    borders = shape(N + 1, dtype=jnp.int32) if call.packed else None

    def run(inputs, borders, d_output, d_last):
        def forward(query, key, value, gate, by_value, state):
            return triton_gpu.run(call, query, key, value, gate, by_value, state, borders)

        results, pull = jax.vjp(forward, *inputs)
        return results, pull((d_output, d_last))

    inputs = (*tokens, value, gates[case.decay], by_value, state)
    return recorded(lambda: jax.jit(run).lower(inputs, borders, d_output, state))


def attention_launches(shapes, fixed, options):
    """What a call of `flash_attention` and its gradients launch; `shapes` are those of its arrays by name."""
    from ejkernel.attention import flash_attention

    arrays = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
    kinds = {"attention_mask": bool}
    arrays_of_facts = {name: jax.ShapeDtypeStruct(each, kinds.get(name, jnp.int32)) for name, each in fixed.items()}

    def run(arrays, facts):
        def forward(arrays):
            return flash_attention(**arrays, **facts, **options, dtype=None, platform="triton")

        output, pull = jax.vjp(forward, arrays)
        return pull(output)

    return recorded(lambda: jax.jit(run).lower(arrays, arrays_of_facts))


def intermediate(kernel, values, constants):
    """The kernel in Triton's intermediate language, functions inlined, as it is compiled for Hopper."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler.compiler import make_backend

    pointers = {
        "bfloat16": "*bf16",
        "float16": "*fp16",
        "float32": "*fp32",
        "int32": "*i32",
        "uint32": "*u32",
        "bool": "*i1",
    }
    types = ["i32" if isinstance(each, int) else pointers[jnp.dtype(each.dtype).name] for each in values]
    signature = dict(zip(kernel.arg_names, (*types, "constexpr"), strict=True))
    target = GPUTarget("cuda", 90, 32)
    backend = make_backend(target)
    options = backend.parse_options({"sanitize_overflow": False})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    source = ASTSource(fn=kernel, signature=signature, constexprs={"CALL": constants})
    helpers = backend.get_codegen_implementation(options), backend.get_module_map()
    module = source.make_ir(target, options, *helpers, context)
    return backend.make_ttir(module, {}, options, 90).str_nodebug()


def bounds(case, arguments, sizes):
    """The largest border or count of a packed stream, and the largest number of a block in its sequence."""
    sequences = case.call.sequences
    owners = [each.shape[0] for each in arguments if not isinstance(each, int) and each.ndim == 1]
    whole = max(owners, default=0) - sequences - 1 if case.call.packed else 0
    # blocks past the last sequence count on in its padding; every sequence has a time segment of its own
    return case.T + sequences + 1, whole + (1 if len(sizes) == 3 else sequences + 1)


def main():
    from triton_cases import Case

    long = Case("a long row", B=1, T=1 << 22, H=64, Hkv=16, K=128, V=128, dtype="bfloat16")
    cases = [
        *(replace(long, name=f"{long.name}, {decay}", decay=decay) for decay in ("none", "constant", "head", "key")),
        replace(long, name="wide, both gates", K=512, V=512, value_gate="mild"),
        replace(long, name="value gates", decay="none", value_gate="mild"),
        replace(long, name="reverse", reverse=True, T=(1 << 22) - 77),
        replace(long, name="packed", lengths=(0,) * 70_000),
        replace(long, name="packed, one gate a head", decay="head", lengths=(0,) * 70_000, dtype="float32"),
        replace(long, name="many rows", B=1 << 17, T=300, H=32, dtype="float32"),
        replace(long, name="one token", B=1 << 20, T=1),
    ]
    for case in cases:
        for launch in launches(case):
            arguments = launch[1]
            check(case, launch, *bounds(case, arguments, [each for each in arguments if isinstance(each, int)]))
    for name, (shapes, fixed, options) in ATTENTION.items():
        tokens, sequences = shapes["key"][1], fixed.get("cu_seqlens", (1,))[0]
        for launch in attention_launches(shapes, fixed, options):
            check(name, launch, tokens + sequences, tokens // 16 + sequences)


def check(case, launch, loaded, blocks):
    """No arithmetic of a launch overflows, and offsets and programs are as many as they were made to be."""
    kernel, arguments, programs, constants = launch
    # a grid's first dimension; the others end at 65,535
    assert programs < 2**31, f"{case}: {kernel.__name__} in {programs} programs"
    text = intermediate(kernel, arguments, constants)
    sizes = [each for each in arguments if isinstance(each, int)]
    found, furthest = overflows(text, sizes, programs, loaded, blocks)
    assert not found, f"{case}: {kernel.__name__} may overflow in\n" + "\n".join(found)
    REACHED.append((kernel.__name__, furthest, programs))


if __name__ == "__main__":
    main()
    assert max(each[1] for each in REACHED) > 2**31 and max(each[2] for each in REACHED) > 65_535
    # every kernel of attention, with offsets past 32 bits
    named = {name for name, furthest, _ in REACHED if furthest > 2**31}
    assert named >= {"forward", "row_deltas", "query_gradient", "key_gradients", "bias_gradient", "attend_part"}, named
