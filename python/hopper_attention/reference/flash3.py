"""FlashAttention-3 forward in the order in which the kernel of this package works (src/kernels).

One tile of queries walks its key blocks from the right; the row sums stay split over the four threads that share a
row of the WGMMA accumulator until the last block is done.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from hopper_attention.reference.arrays import FP8_DTYPES, algorithm, divide, log_sum, round_to, safe
from hopper_attention.reference.mask import Mask, block_range, lengths, visible

LOG2_E = math.log2(math.e)
THREADS_OF_ROW = 4  # of the accumulator's 8 columns, thread t of a row holds 2 t and 2 t + 1
FP8_MAX_OFFSET = 8.0  # P is at most 2^8 instead of 1: e4m3 ends at 448, and small P keep their bits


@dataclass(frozen=True)
class Exponent:
    """How a score becomes a power of 2. inner: softmax scale / softcap, 0 without softcap; scale_log2: log2(e) times
    the scale, or times the softcap; offset: what is added to every exponent.
    """

    inner: float
    scale_log2: float
    offset: float


@dataclass
class RowState:
    """What the online softmax keeps for each row of a tile: maximum (R, 1) of the scores before scaling; partial_sum
    (R, 4), one sum for each thread; accumulator (R, Dv), the unnormalised output.
    """

    maximum: np.ndarray
    partial_sum: np.ndarray
    accumulator: np.ndarray


@algorithm
def flash_attention_3(
    q, k, v, *, mask=Mask(), scale=None, softcap=0.0, sink=None, block_q=128, block_k=128, p_dtype=None,
    q_descale=1.0, k_descale=1.0, v_descale=1.0,
):  # fmt: skip
    """Scores stay unscaled; the scale enters the exponent, one multiply-add for each score: with c = scale log2(e),

        P = exp2(c S - c m),   exp(scale (S - m)) = exp2(c S - c m)

    With softcap, S is tanh(scale S / softcap) and c = softcap log2(e). `p_dtype` rounds P to the type of the second
    product ("bfloat16", "float16", "float8_e4m3fn"; None keeps it); the row sum takes P before rounding. For fp8 the
    exponent is raised by 8, which cancels in O and is taken off LSE; scores and output are multiplied by the
    descales. q (N, D), k (M, D), v (M, Dv) -> out (N, Dv), LSE (N,), natural log.
    Passes: Q, O, LSE once; K and V once for each tile of queries.
    Source: Shah et al., FlashAttention-3 (2024), Algorithms 1 and 2 and section 3.3.
    """
    scale = (q.shape[-1] ** -0.5 if scale is None else scale) * q_descale * k_descale
    exponent = Exponent(
        inner=scale / softcap if softcap else 0.0,
        scale_log2=(softcap if softcap else scale) * LOG2_E,
        offset=FP8_MAX_OFFSET if p_dtype in FP8_DTYPES else 0.0,
    )
    out = np.zeros((len(q), v.shape[1]), q.dtype)
    lse = np.full(len(q), -np.inf, q.dtype)
    for first_row in range(0, len(q), block_q):
        rows = np.arange(first_row, min(first_row + block_q, len(q)))
        state = tile(q, k, v, rows, mask, exponent, block_k, p_dtype)
        out[rows], lse[rows] = finalize(state, exponent, sink, v_descale)
    return out, lse


def tile(q, k, v, rows, mask, exponent, block_k, p_dtype):
    """The rows of one tile over all their key blocks, unnormalised: one step for each block, the newest keys first."""
    length = lengths(len(q), len(k))
    begin, end = visible(mask, rows, length)
    blocks = block_range(mask, rows[0], rows[-1], length, block_k)
    state = RowState(
        np.full((len(rows), 1), -np.inf, q.dtype),
        np.zeros((len(rows), THREADS_OF_ROW), q.dtype),
        np.zeros((len(rows), v.shape[1]), q.dtype),
    )

    def step(n, masked):
        key = blocks.origin + n * block_k + np.arange(block_k)
        inside = (key < blocks.keys[1])[:, None]  # rows outside the tile's keys are zeroed in shared memory
        k_block = np.where(inside, k[np.minimum(key, len(k) - 1)], 0).astype(k.dtype)
        v_block = np.where(inside, v[np.minimum(key, len(k) - 1)], 0).astype(v.dtype)
        scores = q[rows] @ k_block.T
        if exponent.inner:
            scores = np.tanh(scores * q.dtype.type(exponent.inner))
        if masked:
            scores = np.where((key >= begin[:, None]) & (key < end[:, None]), scores, q.dtype.type(-np.inf))
        p = softmax(state, scores, exponent)
        state.accumulator += (p if p_dtype is None else round_to(p_dtype, p)) @ v_block

    for n in range(blocks.end - 1, blocks.full_end - 1, -1):  # right edge
        step(n, masked=True)
    for n in range(blocks.full_end - 1, blocks.full_begin - 1, -1):  # no mask
        step(n, masked=False)
    for n in range(blocks.full_begin - 1, blocks.begin - 1, -1):  # left edge
        step(n, masked=True)
    return state


def softmax(state, scores, exponent):
    """One block: new maximum, rescale of the sums, P = exp2(c S - c m + offset). Updates `state`, returns P (R,
    keys).
    """
    previous = state.maximum
    state.maximum = np.maximum(previous, scores.max(axis=1, keepdims=True))
    c = scores.dtype.type(exponent.scale_log2)
    shift = safe(state.maximum) * c - scores.dtype.type(exponent.offset)
    rescale = np.exp2((previous - safe(state.maximum)) * c)
    p = np.exp2(scores * c - shift)
    of_thread = np.pad(p, ((0, 0), (0, -p.shape[1] % 8))).reshape(len(p), -1, THREADS_OF_ROW, 2)
    state.partial_sum = state.partial_sum * rescale + of_thread.sum(axis=(1, 3))
    state.accumulator *= rescale
    return p


def finalize(state, exponent, sink, v_descale):
    """The one reduction over threads; O = accumulator / sum, LSE = (c m - offset) ln 2 + ln(sum), with the sink."""
    total = state.partial_sum.sum(axis=1, keepdims=True)
    number = total.dtype.type
    exponent_max = safe(state.maximum) * number(exponent.scale_log2) - number(exponent.offset)
    maximum = exponent_max * number(math.log(2))
    if sink is not None:
        highest = np.where(total == 0, number(sink), np.maximum(maximum, number(sink)))
        rescale = np.where(total == 0, number(0), np.exp(np.minimum(maximum - safe(highest), 0)))
        total = total * rescale + np.exp(number(sink) - safe(highest))
        state.accumulator *= rescale
        maximum = highest
    return divide(state.accumulator, total) * number(v_descale), log_sum(maximum, total)[:, 0]
