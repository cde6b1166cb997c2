"""Device code that both walks share: a program's part of the work, its first state, its chunks, weights and decays."""

import triton
import triton.language as tl

from ejkernel.kernels.chunks.triton.device.places import CUT, chunk_at, load_kept


@triton.jit
def part_of_walk(NX: tl.constexpr, NZ: tl.constexpr, H: tl.constexpr):
    """Parts of z and of x, head, and time segment of this program."""
    i_program = tl.program_id(0)
    return i_program % NZ, (i_program // NZ) % NX, (i_program // (NZ * NX)) % H, i_program // (NZ * NX * H)


@triton.jit
def any_chunk(p_flag, i_chunk, n_chunks, i_h, FLAGGED: tl.constexpr, H: tl.constexpr):
    """Not 0 if any of a head's `n_chunks` chunks from `i_chunk` on is flagged, or without FLAGGED if any is not."""
    o_flag = tl.arange(0, 64)
    b_any = tl.zeros([64], tl.int32)
    for i_step in range(0, n_chunks, 64):
        p_flags = p_flag + (i_chunk + i_step + o_flag) * H + i_h
        b_flag = tl.load(p_flags, mask=i_step + o_flag < n_chunks, other=0 if FLAGGED else 1)
        b_any = b_any | (b_flag if FLAGGED else (b_flag == 0).to(tl.int32))
    return tl.max(b_any, 0)


@triton.jit
def load_start(p, i_n, i_block, i_h, o_state, m_state, CALL: tl.constexpr):
    """The state that a walk starts from: that of its time segment, or of its sequence where time is not cut."""
    i_start = i_n.to(tl.int64)
    if CALL.walk.segmented:
        i_start = i_block.to(tl.int64)
    if CALL.packed:
        m_state = m_state & (i_n < p.N)
    p_state = p.start + (i_start * CALL.heads + i_h) * (CALL.walk.x_dim * CALL.walk.z_dim) + o_state
    return tl.load(p_state, mask=m_state, other=0.0).to(tl.float32) * CALL.start_scale


@triton.jit
def mark_sequences(p, p_marks, span, i_from, n_steps, i_h, CALL: tl.constexpr):
    """Marks the listed chunks, `n_steps` from the `i_from`-th on, of sequences in which some chunk is flagged.

    A program walks over several sequences. The kernel of strong gates stores results of marked sequences alone, lest
    the gates of one sequence change the bits of another.
    """
    p_flags = p.flag + (span.i_n.to(tl.int64) * CALL.heads + i_h) * p.T
    mark = 0
    for i_step in range(0, n_steps):
        chunk = chunk_at(i_from + i_step, span, p, CALL)
        mark = tl.where((chunk.entry & CUT) != 0, 0, mark) | tl.load(p_flags + chunk.i_row)
        tl.store(p_marks + chunk.i_row, mark)
    # threads read what other threads have written
    tl.debug_barrier()
    for i_step in range(0, n_steps):
        chunk = chunk_at(i_from + n_steps - 1 - i_step, span, p, CALL)
        mark = tl.where((chunk.next_entry & CUT) != 0, 0, mark) | tl.load(p_marks + chunk.i_row)
        tl.store(p_marks + chunk.i_row, mark)
    tl.debug_barrier()


@triton.jit
def load_weights(p_rows, o_r, m_r, CALL: tl.constexpr):
    """Of a chunk's rows: weights towards its end and towards its start, and sums of gates, whole and fractional."""
    # one tile of all four is large enough for the compiler to fetch it a chunk ahead, as a tile of each is not
    o_pair = tl.arange(0, 2)
    p_tile = p_rows + o_r[:, None, None] * 4 + o_pair[None, :, None] * 2 + o_pair[None, None, :]
    b_weight, b_sum = tl.split(load_kept(p_tile, m_r[:, None, None], CALL))
    b_near, b_far = tl.split(b_weight)
    b_whole, b_part = tl.split(b_sum)
    return b_near, b_far, b_whole, b_part


@triton.jit
def load_factors(
    p_factors, i_chunk, o_d, takes, is_real, D: tl.constexpr, COLUMNS: tl.constexpr, CALL: tl.constexpr,
):  # fmt: skip
    """Decays of a state's rows, or COLUMNS, to a chunk's reference and on to its end; 1 if a listed chunk has none."""
    REVERSE: tl.constexpr = CALL.reverse
    if CALL.listed:
        FIRST: tl.constexpr = 2 if REVERSE else 0
        p_row = p_factors + i_chunk * (5 * D)
        b_before = tl.load(p_row + tl.where(takes, FIRST * D, 4 * D) + o_d, mask=o_d < D, other=0.0)
        b_after = tl.load(p_row + tl.where(is_real, (FIRST + 1) * D, 4 * D) + o_d, mask=o_d < D, other=0.0)
    else:
        p_pair = p_factors + i_chunk * (4 * D) + (2 * D if REVERSE else 0)
        b_before = tl.load(p_pair + o_d, mask=o_d < D, other=0.0)
        b_after = tl.load(p_pair + D + o_d, mask=o_d < D, other=0.0)
    if COLUMNS:
        return b_before[None, :], b_after[None, :]
    else:
        return b_before[:, None], b_after[:, None]
