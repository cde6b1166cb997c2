"""Device code: which part of a walk a program does, whether strong gates leave it to another kernel, and weights."""

import triton
import triton.language as tl

from ejkernel.kernels.chunks.triton.device.places import CUT, load_kept, visit


@triton.jit
def part_of_walk(NX: tl.constexpr, NZ: tl.constexpr, H: tl.constexpr):
    """Parts of z and of x, head, and time segment of this program."""
    i_program = tl.program_id(0)
    return i_program % NZ, (i_program // NZ) % NX, (i_program // (NZ * NX)) % H, i_program // (NZ * NX * H)


@triton.jit
def any_flagged(p_flag, i_chunk, n_chunks, i_h, H: tl.constexpr):
    """Whether any of a head's `n_chunks` chunks from `i_chunk` on is flagged."""
    o_flag = tl.arange(0, 64)
    b_flag = tl.zeros([64], tl.int32)
    for i_step in range(0, n_chunks, 64):
        p_flags = p_flag + (i_chunk + i_step + o_flag) * H + i_h
        b_flag = b_flag | tl.load(p_flags, mask=i_step + o_flag < n_chunks, other=0)
    return tl.max(b_flag, 0) != 0


@triton.jit
def all_flagged(p_flag, i_chunk, n_chunks, i_h, H: tl.constexpr):
    """Whether all of a head's `n_chunks` chunks from `i_chunk` on are flagged, and there is one."""
    o_flag = tl.arange(0, 64)
    b_mild = tl.zeros([64], tl.int32)
    for i_step in range(0, n_chunks, 64):
        p_flags = p_flag + (i_chunk + i_step + o_flag) * H + i_h
        b_mild = b_mild | (tl.load(p_flags, mask=i_step + o_flag < n_chunks, other=1) == 0).to(tl.int32)
    return (tl.max(b_mild, 0) == 0) & (n_chunks > 0)


@triton.jit
def mark_sequences(p, p_mine, i_n, i_from, n_steps, i_h, CALL: tl.constexpr):
    """Marks the listed chunks, `n_steps` from the `i_from`-th on, of sequences in which some chunk is flagged.

    A program walks over several sequences. That for strong gates gives results for those that have some of their own,
    and for no others: else one would change the bits of another.
    """
    p_flags = p.flag + (i_n.to(tl.int64) * CALL.heads + i_h) * p.T
    is_mine = 0
    for i_step in range(0, n_steps):
        chunk = visit(i_from + i_step, i_n, 0, 0, p, CALL)
        is_mine = tl.where((chunk.entry & CUT) != 0, 0, is_mine) | tl.load(p_flags + chunk.i_row)
        tl.store(p_mine + chunk.i_row, is_mine)
    # what other threads have written
    tl.debug_barrier()
    for i_step in range(0, n_steps):
        chunk = visit(i_from + n_steps - 1 - i_step, i_n, 0, 0, p, CALL)
        is_mine = tl.where((chunk.next_entry & CUT) != 0, 0, is_mine) | tl.load(p_mine + chunk.i_row)
        tl.store(p_mine + chunk.i_row, is_mine)
    tl.debug_barrier()


@triton.jit
def load_weights(p_rows, o_r, m_r, CALL: tl.constexpr):
    """A chunk's rows: weights towards its end and towards its start, and sums of gates, whole and fractional."""
    # a tile of all four is large enough for the compiler to fetch it ahead of its chunk, as one of them is not
    o_pair = tl.arange(0, 2)
    p_tile = p_rows + o_r[:, None, None] * 4 + o_pair[None, :, None] * 2 + o_pair[None, None, :]
    b_weight, b_sum = tl.split(load_kept(p_tile, m_r[:, None, None], CALL))
    b_near, b_far = tl.split(b_weight)
    b_whole, b_part = tl.split(b_sum)
    return b_near, b_far, b_whole, b_part


@triton.jit
def load_factors(
    p_factors, i_chunk, o_d, takes, is_real, D: tl.constexpr, REVERSE: tl.constexpr, CALL: tl.constexpr,
):  # fmt: skip
    """Decays of a state's dims until a chunk's rows meet it, and from there on; of a listed chunk, if it has any."""
    if CALL.listed:
        FIRST: tl.constexpr = 2 if REVERSE else 0
        p_row = p_factors + i_chunk * (5 * D)
        b_before = tl.load(p_row + tl.where(takes, FIRST * D, 4 * D) + o_d, mask=o_d < D, other=0.0)
        b_after = tl.load(p_row + tl.where(is_real, (FIRST + 1) * D, 4 * D) + o_d, mask=o_d < D, other=0.0)
    else:
        p_pair = p_factors + i_chunk * (4 * D) + (2 * D if REVERSE else 0)
        b_before = tl.load(p_pair + o_d, mask=o_d < D, other=0.0)
        b_after = tl.load(p_pair + D + o_d, mask=o_d < D, other=0.0)
    return b_before, b_after
