"""The computation behind the public functions: one sequence, one K/V head, in blocks.

One shared core for dense, varlen, paged and appended K/V: they differ only in where a key lives (keys.py). Passes
over memory: Q, K, V and O once for each (sequence, K/V head); the working set is one block of scores, so that memory
stays linear in the sequence length. Source: FlashAttention-2 (Dao 2023), Algorithm 1, walking the key blocks from the
right as the kernel does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hopper_attention.reference.mask import Lengths, Mask, block_range, visible

SCORES_PER_BLOCK = 1 << 17  # 0.5 MB of float32: fits in a core's cache
KEYS_PER_BLOCK = 512


@dataclass(frozen=True)
class Softmax:
    """How scores become probabilities: scale; softcap, 0 is off; sink, one logit for each query head of the group."""

    scale: float
    softcap: float = 0.0
    sink: np.ndarray | None = None


def capped(scores: np.ndarray, softcap: float) -> np.ndarray:
    """softcap * tanh(scores / softcap); the scores themselves if softcap is 0."""
    return softcap * np.tanh(scores / softcap) if softcap else scores


def attend_rows(q, k, v, begin, end, softmax: Softmax):
    """Rows of one tile: online softmax over key blocks, the newest keys first.

    q (G, M, D): the G query heads of one K/V head; k (N, D), v (N, Dv); begin, end (M,): the keys that a row sees.
    Returns out (G, M, Dv) and LSE (G, M), natural log. A row that sees no key gives 0 and -inf, with a sink 0 and the
    sink.
    """
    heads, rows, _ = q.shape
    q = q.reshape(heads * rows, -1) * q.dtype.type(softmax.scale)
    accumulator = np.zeros((heads, rows, v.shape[-1]), q.dtype)
    row_max = np.full((heads, rows, 1), -np.inf, q.dtype)
    row_sum = np.zeros((heads, rows, 1), q.dtype)
    for first in range((len(k) - 1) // KEYS_PER_BLOCK * KEYS_PER_BLOCK, -1, -KEYS_PER_BLOCK):
        block = slice(first, first + KEYS_PER_BLOCK)
        scores = capped((q @ k[block].T).reshape(heads, rows, -1), softmax.softcap)
        key = np.arange(first, first + scores.shape[-1])
        seen = (key >= begin[:, None]) & (key < end[:, None])
        if not seen.all():
            scores = np.where(seen, scores, q.dtype.type(-np.inf))
        new_max = np.maximum(row_max, scores.max(axis=-1, keepdims=True))
        safe_max = np.where(np.isneginf(new_max), q.dtype.type(0), new_max)
        p = np.exp(scores - safe_max)
        rescale = np.exp(row_max - safe_max)
        row_sum = row_sum * rescale + p.sum(axis=-1, keepdims=True)
        product = p.reshape(heads * rows, -1) @ v[block]
        accumulator = accumulator * rescale + product.reshape(accumulator.shape)
        row_max = new_max
    return finalize(accumulator, row_max, row_sum, softmax.sink)


def finalize(accumulator, row_max, row_sum, sink=None):
    """O = accumulator / sum and LSE = max + ln(sum), the sink counted in the sum. Shapes (G, M, Dv), (G, M, 1), (G,
    M, 1).
    """
    if sink is not None:
        logit = sink.astype(row_max.dtype).reshape(-1, 1, 1)
        new_max = np.maximum(row_max, logit)
        safe_max = np.where(np.isneginf(new_max), row_max.dtype.type(0), new_max)
        rescale = np.exp(row_max - safe_max)
        accumulator = accumulator * rescale
        row_sum = row_sum * rescale + np.exp(logit - safe_max)
        row_max = new_max
    empty = row_sum == 0
    divisor = np.where(empty, row_sum.dtype.type(1), row_sum)
    lse = np.where(empty, row_sum.dtype.type(-np.inf), row_max + np.log(divisor))
    return accumulator / divisor, lse[..., 0]


def attend_sequence(q, k, v, mask: Mask, length: Lengths, first_key: int, softmax: Softmax):
    """All queries of one sequence with one K/V head, tile by tile.

    q (G, len_q, D); k (N, D), v (N, Dv): the keys first_key .. first_key + N of the sequence, which must hold all
    that any row sees. Yields (slice of rows, out (G, M, Dv), LSE (G, M)).
    """
    rows_per_tile = max(1, SCORES_PER_BLOCK // (KEYS_PER_BLOCK * len(q)))
    if not np.isfinite(v).all():
        rows_per_tile = 1  # the tile's keys are then exactly the row's: no 0 * NaN from keys that only a neighbour sees
    for first_row in range(0, length.q, rows_per_tile):
        rows = np.arange(first_row, min(first_row + rows_per_tile, length.q))
        begin, end = (limit - first_key for limit in visible(mask, rows, length))
        low, high = begin[0], end[-1]
        with np.errstate(invalid="ignore", over="ignore"):  # infinite scores give NaN, as softmax does
            out, lse = attend_rows(q[:, rows], k[low:high], v[low:high], begin - low, end - low, softmax)
        yield slice(first_row, first_row + len(rows)), out, lse


def keys_seen(mask: Mask, length: Lengths) -> tuple[int, int]:
    """The union [begin, end) of what all queries of a sequence see; (0, 0) if nothing."""
    return block_range(mask, 0, length.q - 1, length, 1).keys if length.q and length.k else (0, 0)
