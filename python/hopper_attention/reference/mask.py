"""The one mask: a query sees an interval of keys. The same functions as src/kernels/interval_mask.h and block_range.h.

Formulas, with diagonal d = row + len_k - len_q (the last query sees the last key):
    begin = max(0, d - left, chunk * floor(d / chunk))
    end   = min(len_k, d + right + 1, chunk * floor(d / chunk) + chunk)
where a limit that is off is left out. Both ends never decrease with the row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

UNLIMITED = -1


@dataclass(frozen=True)
class Mask:
    """left, right: keys on both sides of the diagonal, inclusive, -1 unlimited; causal is right = 0. chunk: queries
    and keys of one chunk of this length see each other, 0 is off. With context parallelism this rank holds the keys
    whose position is cp_rank modulo cp_world_size.
    """

    left: int = UNLIMITED
    right: int = UNLIMITED
    chunk: int = 0
    cp_world_size: int = 1
    cp_rank: int = 0


class Lengths(NamedTuple):
    """Queries and keys of one sequence; `k_total`: keys on all context-parallel ranks (`k` when there is one)."""

    q: int
    k: int
    k_total: int


def lengths(q: int, k: int, k_total: int | None = None) -> Lengths:
    """Lengths with `k_total` defaulting to `k`."""
    return Lengths(q, k, k if k_total is None else k_total)


def visible(mask: Mask, row: Any, length: Lengths) -> tuple[Any, Any]:
    """Keys [begin, end) that query `row` (an integer or an array of them) may see; begin == end if there is none."""
    row = np.asarray(row, dtype=np.int64)
    diagonal = row + length.k_total - length.q
    begin = np.zeros_like(row) if mask.left == UNLIMITED else diagonal - mask.left
    end = np.full_like(row, length.k_total) if mask.right == UNLIMITED else diagonal + mask.right + 1
    if mask.chunk:
        first = diagonal // mask.chunk * mask.chunk
        begin = np.maximum(begin, first)
        end = np.minimum(end, first + mask.chunk)
    if mask.cp_world_size > 1:  # position p = key * world + rank: key >= begin is key >= ceil((begin - rank) / world)
        begin = -((mask.cp_rank - begin) // mask.cp_world_size)
        end = -((mask.cp_rank - end) // mask.cp_world_size)
    end = np.clip(end, 0, length.k)
    return np.clip(begin, 0, end), end


class BlockRange(NamedTuple):
    """Block n holds keys [origin + n * block, origin + (n + 1) * block). A tile visits [begin, end) from the right;
    every row sees all keys of the blocks [full_begin, full_end). `keys` is the union of the rows' intervals.
    """

    origin: int
    begin: int
    full_begin: int
    full_end: int
    end: int
    keys: tuple[int, int]


def block_range(mask: Mask, first_row: int, last_row: int, length: Lengths, block: int) -> BlockRange:
    """The range of the rows [first_row, last_row], both existing queries."""
    first = visible(mask, first_row, length)
    last = visible(mask, last_row, length)
    seen = int(first[0]), int(last[1])
    if seen[0] >= seen[1]:
        return BlockRange(0, 0, 0, 0, 0, (0, 0))
    origin = seen[0]
    end = -(-(seen[1] - origin) // block)
    full_begin = min(-(-(int(last[0]) - origin) // block), end)
    full_end = max(full_begin, (int(first[1]) - origin) // block)
    return BlockRange(origin, 0, full_begin, full_end, end, seen)


def dense_mask(mask: Mask, length: Lengths) -> np.ndarray:
    """(len_q, len_k) bool, True where the query sees the key: the mask as textbooks draw it."""
    begin, end = visible(mask, np.arange(length.q), length)
    key = np.arange(length.k)
    return (key >= begin[:, None]) & (key < end[:, None])
