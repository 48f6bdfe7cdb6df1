"""A full check of the contents of metadata, for debugging: what the kernels clamp silently is named here."""

from __future__ import annotations

import sys
from typing import Any

from hopper_attention.arguments import integer, is_torch, lengths, needed


def check_metadata(
    q,
    k,
    *,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    seqused_q=None,
    seqused_k=None,
    cache_seqlens=None,
    page_table=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    cu_seqlens_k_new=None,
    seqlen_k_new=0,
    rotary_seqlens=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    cp_world_size=1,
    cp_rank=0,
    cp_tot_seqused_k=None,
) -> None:
    """Raises ValueError if lengths, offsets or page ids point outside the tensors of a call: says which and where.

    q and k (k_cache for a cache) are those of `flash_attn_varlen_func` or `flash_attn_with_kvcache`; only their shapes
    are read. The other tensors are int32, with their meaning there; cache_seqlens and seqused_k are the same.
    cu_seqlens_k_new (B + 1,) or seqlen_k_new: keys that the call appends. Checks that offsets start at 0, never decrease
    and end inside the tensor; lengths are not negative and fit; pages that hold a sequence's keys exist; rows of the cache
    exist; padding is not longer than the sequence; bounds given as max_seqlen_* hold; this rank's keys are no more than
    cp_tot_seqused_k leaves it.

    The kernels never need it: they clamp all of this and touch nothing outside their buffers. Tensors may be on the GPU
    (torch) or the CPU (torch, numpy). Copies them to the host, which synchronises: ValueError while a graph is
    captured. TypeError for other dtypes than int32.
    """
    refuse_capture(q)
    shape_q, shape_k = shape_of("q", q), shape_of("k", k)
    starts_q = values("cu_seqlens_q", cu_seqlens_q, 1)
    starts_k = values("cu_seqlens_k", cu_seqlens_k, 1)
    table = values("page_table", page_table, 2)
    if starts_q is not None:
        check_offsets("cu_seqlens_q", starts_q, shape_q[0], "rows of q")
        batch = len(starts_q) - 1
        queries = starts_q[1:] - starts_q[:-1]
    else:
        batch = shape_q[0]
        queries = same(shape_q[1], batch)
    if (used := counts("seqused_q", seqused_q, batch)) is not None:
        check_upper("seqused_q", used, queries, "the queries of the sequence")
        queries = used
    check_bound("max_seqlen_q", max_seqlen_q, queries, "queries")

    if table is not None:
        if len(table) != batch:
            raise ValueError(f"page_table: must have a row for each of {batch} sequences, found {len(table)}")
        capacity = same(table.shape[1] * shape_k[1], batch)
    elif starts_k is not None:
        if len(starts_k) != batch + 1:
            raise ValueError(f"cu_seqlens_k: must have {batch + 1} elements, found {len(starts_k)}")
        check_offsets("cu_seqlens_k", starts_k, shape_k[0], "rows of k")
        capacity = shape_k[0] - starts_k[:-1] if seqused_k is not None else starts_k[1:] - starts_k[:-1]
    else:
        capacity = same(shape_k[1], batch)
    keys, name = capacity, "k"
    if seqused_k is not None or cache_seqlens is not None:
        name = "cache_seqlens" if seqused_k is None else "seqused_k"
        tensor, for_all = lengths(name, cache_seqlens if seqused_k is None else seqused_k)
        keys = same(for_all, batch) if tensor is None else counts(name, tensor, batch)
        check_upper(name, keys, capacity, "the keys that the sequence has room for")
    elif table is not None:
        needed("seqused_k", None, "with page_table")
    keys = keys + new_keys(cu_seqlens_k_new, seqlen_k_new, batch)
    check_upper(name, keys, capacity, "the keys that the sequence has room for", " with the new keys")
    if table is not None:
        check_pages(table, keys, shape_k[1], shape_k[0])
    if (rows := counts("cache_batch_idx", cache_batch_idx, batch)) is not None:
        check_upper("cache_batch_idx", rows, same(shape_k[0] - 1, batch), "the last row of the cache")
    if (pad := counts("cache_leftpad", cache_leftpad, batch)) is not None:
        check_upper("cache_leftpad", pad, keys, "the keys of the sequence")
        keys = keys - pad
    counts("rotary_seqlens", rotary_seqlens, batch)
    check_bound("max_seqlen_k", max_seqlen_k, keys, "keys")
    world = integer("cp_world_size", cp_world_size)
    if world > 1:
        total = counts(
            "cp_tot_seqused_k", needed("cp_tot_seqused_k", cp_tot_seqused_k, f"with cp_world_size {world}"), batch
        )
        here = (total - integer("cp_rank", cp_rank) + world - 1) // world
        check_upper(name, keys, here, f"the keys of cp_tot_seqused_k on rank {cp_rank} of {world}")


def refuse_capture(q: Any) -> None:
    """ValueError while a CUDA graph is captured."""
    torch = sys.modules.get("torch")
    if is_torch(q) and q.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ValueError("check_metadata: copies to the host, which a graph cannot capture; call it before")


def shape_of(name: str, x: Any) -> tuple[int, ...]:
    """The shape, of 3 or 4 dims."""
    shape = tuple(getattr(x, "shape", ()))
    if len(shape) not in (3, 4):
        raise ValueError(f"{name}: must have 3 or 4 dims, found shape {shape}")
    return shape


def values(name: str, x: Any, rank: int) -> Any:
    """A copy on the host as int64 numpy array; None for None."""
    if x is None:
        return None
    import numpy as np

    found = x.detach().cpu().numpy() if is_torch(x) else np.asarray(x)
    if found.dtype != np.int32:
        raise TypeError(f"{name}: dtype must be int32, found {found.dtype}")
    if found.ndim != rank or (rank == 1 and name.startswith("cu_") and len(found) == 0):
        raise ValueError(f"{name}: must have {rank} dim{'s' * (rank > 1)} and not be empty, found shape {found.shape}")
    return found.astype(np.int64)


def counts(name: str, x: Any, batch: int) -> Any:
    """A number of each sequence, none negative; None for None."""
    found = values(name, x, 1)
    if found is None:
        return None
    if len(found) != batch:
        raise ValueError(f"{name}: must have an element for each of {batch} sequences, found {len(found)}")
    report(name, found < 0, lambda b: f"is {found[b]}, must not be negative")
    return found


def same(value: int, batch: int) -> Any:
    """`value` for all sequences."""
    import numpy as np

    return np.full(batch, value, np.int64)


def report(name: str, wrong: Any, text: Any) -> None:
    """ValueError for the first sequence where `wrong`."""
    if wrong.any():
        first = int(wrong.argmax())
        others = int(wrong.sum()) - 1
        more = f" (and {others} more)" if others else ""
        raise ValueError(f"{name}: of sequence {first} {text(first)}{more}")


def check_offsets(name: str, starts: Any, rows: int, what: str) -> None:
    """From 0 on, never decreasing, inside the tensor."""
    if starts[0] != 0:
        raise ValueError(f"{name}: must start with 0, found {starts[0]}")
    report(name, starts[1:] < starts[:-1], lambda b: f"decreases from {starts[b]} to {starts[b + 1]}")
    if starts[-1] > rows:
        raise ValueError(f"{name}: ends at {starts[-1]}, past the {rows} {what}")


def check_upper(name: str, found: Any, most: Any, what: str, note: str = "") -> None:
    """None above its bound."""
    report(name, found > most, lambda b: f"is {found[b]}{note}, more than {most[b]}, {what}")


def check_bound(name: str, bound: Any, found: Any, what: str) -> None:
    """max_seqlen_* holds for all sequences."""
    if bound is not None:
        most = integer(name, int(bound) if is_torch(bound) else bound)
        report(name, found > most, lambda b: f"is {most}, but there are {found[b]} {what}")


def new_keys(starts: Any, for_all: Any, batch: int) -> Any:
    """Keys that every sequence gets."""
    found = values("cu_seqlens_k_new", starts, 1)
    if found is None:
        return same(integer("seqlen_k_new", for_all), batch)
    if len(found) != batch + 1:
        raise ValueError(f"cu_seqlens_k_new: must have {batch + 1} elements, found {len(found)}")
    check_offsets("cu_seqlens_k_new", found, int(found.max()), "new keys")
    return found[1:] - found[:-1]


def check_pages(table: Any, keys: Any, page_size: int, pages: int) -> None:
    """Every slot that a sequence's keys need names a page that exists. Other slots hold anything."""
    import numpy as np

    used = np.arange(table.shape[1]) < -(-keys[:, None] // page_size)
    wrong = used & ((table < 0) | (table >= pages))
    if wrong.any():
        b, slot = (int(i[0]) for i in np.nonzero(wrong))
        raise ValueError(
            f"page_table: slot {slot} of sequence {b} is page {table[b, slot]}, but there are {pages} pages "
            f"({keys[b]} keys of {page_size} each use {-(-int(keys[b]) // page_size)} slots)"
        )
