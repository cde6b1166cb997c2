"""Device code: which part of a walk a program does, whether strong gates leave it to another kernel, and weights."""

import triton
import triton.language as tl


@triton.jit
def part_of_walk(NX: tl.constexpr, NZ: tl.constexpr, H: tl.constexpr):
    """Parts of z and of x, head, and time segment of this program."""
    i_program = tl.program_id(0)
    return i_program % NZ, (i_program // NZ) % NX, (i_program // (NZ * NX)) % H, i_program // (NZ * NX * H)


@triton.jit
def any_flagged(p, i_chunk, n_chunks, i_h, H: tl.constexpr):
    """Whether any of a head's `n_chunks` chunks from `i_chunk` on is flagged."""
    o_flag = tl.arange(0, 64)
    b_flag = tl.zeros([64], tl.int32)
    for i_step in range(0, n_chunks, 64):
        p_flags = p.flag + (i_chunk + i_step + o_flag) * H + i_h
        b_flag = b_flag | tl.load(p_flags, mask=i_step + o_flag < n_chunks, other=0)
    return tl.max(b_flag, 0) != 0


@triton.jit
def load_weights(p_weight, i_chunk, o_r, C: tl.constexpr):
    """A chunk's rows: weights towards its end and towards its start, and sums of gates, whole and fractional."""
    # a tile of all four is large enough for the compiler to fetch it ahead of its chunk, as one of them is not
    o_pair = tl.arange(0, 2)
    p_tile = p_weight + i_chunk * (4 * C) + o_r[:, None, None] * 4 + o_pair[None, :, None] * 2 + o_pair[None, None, :]
    b_weight, b_sum = tl.split(tl.load(p_tile))
    b_near, b_far = tl.split(b_weight)
    b_whole, b_part = tl.split(b_sum)
    return b_near, b_far, b_whole, b_part
