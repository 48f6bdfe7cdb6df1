"""What the arguments of the public functions say about each sequence: where its keys live, how many there are, what an
append adds. Metadata is clamped, never trusted.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hopper_attention.reference.arrays import View
from hopper_attention.reference.call import packed_queries
from hopper_attention.reference.checks import (
    are_same_pages,
    check_written,
    floats,
    integer,
    integers,
    optional_integers,
    require,
    shape_is,
)
from hopper_attention.reference.keys import DenseKeys, PackedKeys, PagedKeys


def clamp(value: int, low: int, high: int) -> int:
    """`value`, at least `low` and at most `high`, as a Python int."""
    return int(min(max(value, low), high))


def packed_keys(starts: np.ndarray, used: np.ndarray | None, total: int) -> tuple[list[PackedKeys], list[int]]:
    """Offsets from cu_seqlens_k, lengths from seqused_k if given; both inside the `total` rows there are."""
    keys, lengths_k = [], []
    for b in range(len(starts) - 1):
        offset = clamp(starts[b], 0, total)
        length = starts[b + 1] - offset if used is None else used[b]
        lengths_k.append(clamp(length, 0, total - offset))
        keys.append(PackedKeys(offset, lengths_k[-1]))
    return keys, lengths_k


def cache_keys(cache: Any, batch: int, page_table: Any, cache_batch_idx: Any) -> list[DenseKeys] | list[PagedKeys]:
    """Where each sequence's keys live in the cache."""
    if page_table is not None:
        require(
            cache_batch_idx is None, "cache_batch_idx is given with page_table; a page table already picks the pages"
        )
        table = integers("page_table", page_table, (batch, None))
        return [PagedKeys(table[b], cache.shape[0], cache.shape[1]) for b in range(batch)]
    rows = optional_integers("cache_batch_idx", cache_batch_idx, (batch,))
    if rows is None:
        require(
            cache.shape[0] == batch,
            "k_cache has batch ",
            cache.shape[0],
            " and q ",
            batch,
            "; without cache_batch_idx they must be equal",
        )
        rows = np.arange(batch)
    inside = (rows >= 0) & (rows < cache.shape[0])
    return [DenseKeys(int(row), cache.shape[1] if ok else 0) for row, ok in zip(rows, inside, strict=True)]


def cache_lengths(cache_seqlens: Any, keys: list, paged: bool) -> list[int]:
    """Keys in the cache before an append: an int for all, (B,) int32, or None for full caches without pages."""
    if cache_seqlens is None:
        require(
            not paged,
            "cache_seqlens: is needed with page_table, since pages do not say how many keys count",
        )
        return [entry.capacity for entry in keys]
    if hasattr(cache_seqlens, "shape") and len(cache_seqlens.shape) > 0:
        given = integers("cache_seqlens", cache_seqlens, (len(keys),))
    else:
        given = [integer("cache_seqlens", cache_seqlens)] * len(keys)
    return [clamp(length, 0, entry.capacity) for length, entry in zip(given, keys, strict=True)]


def new_keys(k: Any, v: Any, starts: Any, cache_k: Any, cache_v: Any, batch: int):
    """Views of the keys and values to append and the index of each sequence's; (None, None, None) if there are none."""
    require((k is None) == (v is None), "k and v must be given together")
    if k is None:
        return None, None, None
    rank = 4 if starts is None else 3
    k, v = floats("k", k, rank, (cache_k.dtype,)), floats("v", v, rank, (cache_v.dtype,))
    shape_is("k", k, (*k.shape[:-2], *cache_k.shape[-2:]))
    shape_is("v", v, (*k.shape[:-2], *cache_v.shape[-2:]))
    if starts is None:
        require(k.shape[0] == batch, "k has batch ", k.shape[0], " and q ", batch, "; they must be equal")
        return k, v, list(range(batch))
    return k, v, packed_queries(integers("cu_seqlens_k_new", starts, (batch + 1,)), None, k.shape[0])


def rotary_tables(cos: Any, sin: Any, new_k: Any, head_dim: int):
    """Views of cos and sin (positions, rotary_dim / 2), or (None, None)."""
    require((cos is None) == (sin is None), "rotary_cos and rotary_sin must be given together")
    if cos is None:
        return None, None
    require(new_k is not None, "rotary_cos is given without k; rotary embedding needs k and v")
    cos, sin = floats("rotary_cos", cos, 2), floats("rotary_sin", sin, 2)
    shape_is("rotary_sin", sin, cos.shape)
    require(cos.shape[0] > 0, "rotary_cos has no positions; 1 or more are needed")
    require(
        2 * cos.shape[1] <= head_dim, "rotary_cos covers ", 2 * cos.shape[1], " columns; the head dim is ", head_dim
    )
    return cos, sin


def check_append(cache_k: View, cache_v: View, paged: bool, **others: View | None) -> None:
    """ValueError if the caches share an element, unless they are the same pages counted from another one on, or if any of
    `others`, which are read while or after the caches are written, shares one with them.
    """
    if paged and are_same_pages(cache_k.memory, cache_v.memory):
        check_written({"k_cache": cache_k}, others)
        check_written({"v_cache": cache_v}, others)
    else:
        check_written({"k_cache": cache_k, "v_cache": cache_v}, others)


def cp_totals(world: Any, totals: Any, batch: int) -> list[int] | None:
    """Keys of each sequence over all context-parallel ranks; None if there is one rank."""
    totals = optional_integers("cp_tot_seqused_k", totals, (batch,))
    if integer("cp_world_size", world) == 1:
        return None
    require(totals is not None, "cp_tot_seqused_k is missing; it is needed with cp_world_size ", world)
    return [max(0, int(total)) for total in totals]
