"""What the queries of a sequence see, counted without a GPU: the work of a case."""

from __future__ import annotations

from functools import lru_cache


def limits(window: tuple[int, int], causal: bool) -> tuple[int, int]:
    """(left, right) as the functions read them: causal sets right to 0."""
    return window[0], 0 if causal else window[1]


@lru_cache(maxsize=256)
def pairs(seqlen_q: int, seqlen_k: int, causal: bool, window: tuple[int, int]) -> int:
    """Visible pairs of one sequence and head."""
    import numpy as np

    left, right = limits(window, causal)
    diagonal = np.arange(seqlen_q, dtype=np.int64) + (seqlen_k - seqlen_q)
    begin = np.zeros_like(diagonal) if left < 0 else np.maximum(diagonal - left, 0)
    end = np.full_like(diagonal, seqlen_k) if right < 0 else np.clip(diagonal + right + 1, 0, seqlen_k)
    return int(np.maximum(end - begin, 0).sum())


def seen_keys(seqlen_q: int, seqlen_k: int, causal: bool, window: tuple[int, int]) -> int:
    """Keys that at least one query of a sequence sees: from the first query's begin to the last query's end."""
    left, right = limits(window, causal)
    if seqlen_q == 0:
        return 0
    begin = 0 if left < 0 else max(0, seqlen_k - seqlen_q - left)
    end = seqlen_k if right < 0 else min(seqlen_k, seqlen_k + right)
    return max(0, end - begin)
