"""A full check of the contents of metadata, for debugging: what the kernels clamp silently is named here."""

from __future__ import annotations

import sys
from typing import Any

from hopper_attention.arguments import integer, is_torch, needed, window
from hopper_attention.check_schedule import check_schedule, first_pair

MOST_RANKS = 1 << 16  # as src/host/problem.cpp


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
    k_new=None,
    causal=False,
    window_size=(-1, -1),
    attention_chunk=0,
    scheduler_metadata=None,
) -> None:
    """Raises ValueError if lengths, offsets or page ids point outside the tensors of a call: says which and where.

    q and k (k_cache for a cache) are those of `flash_attn_varlen_func` or `flash_attn_with_kvcache`, k_new is the k that
    the latter appends; only their shapes are read. The other tensors are int32, with their meaning there; cache_seqlens
    and seqused_k are the same, but cache_seqlens may be an int. Without k_new, seqlen_k_new says how many keys every
    sequence gets, and cu_seqlens_k_new (B + 1,) has no effect, as in the call.

    Checks that offsets start at 0, never decrease and end inside the tensor (those of new keys inside k_new); lengths are
    not negative and fit; rows of the cache exist; padding is not longer than the sequence; bounds given as max_seqlen_*
    hold; this rank's keys are no more than cp_tot_seqused_k leaves it; arguments that the call refuses together are not
    given together. Pages must exist where a query sees a key in them or the call appends: others may have been freed.
    Which those are follows from causal, window_size and attention_chunk, so give those of the call; by default every
    query sees all keys behind cache_leftpad. No row of the cache and no slot of a page is appended to twice: sequences
    that only fill up the batch of a CUDA graph and append to one dummy page are named, too; leave them out here, or give
    each a page. scheduler_metadata must have room for the sequences, name each once, have tiles for those with queries
    alone, as many as their numbers of queries can have, running sums that never decrease and counters at 0; that of CPU
    tensors is all zeros. Metadata made for other lengths of keys only share the work out less evenly: nothing is said.

    The kernels never need it: they clamp all of this and touch nothing outside their buffers. Tensors may be on the GPU
    (torch) or the CPU (torch, numpy). Copies them to the host, which synchronises: ValueError while a graph is
    captured. TypeError for other dtypes than int32.
    """
    refuse_capture(q)
    mask = mask_of(causal, window_size, attention_chunk, cp_world_size, cp_rank)
    refuse_both("seqused_k", seqused_k, "cache_seqlens", cache_seqlens)
    refuse_both("cu_seqlens_k", cu_seqlens_k, "page_table", page_table)
    refuse_both("cache_batch_idx", cache_batch_idx, "page_table", page_table)
    refuse_both("cache_batch_idx", cache_batch_idx, "cu_seqlens_k", cu_seqlens_k)
    shape_q = shape_of("q", q, "cu_seqlens_q", cu_seqlens_q)
    shape_k = shape_of("k", k, "cu_seqlens_k", cu_seqlens_k)
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
    rows_q = queries
    if (used_q := counts("seqused_q", seqused_q, batch)) is not None:
        check_upper("seqused_q", used_q, queries, "the queries of the sequence")
        queries = used_q
    check_bound("max_seqlen_q", max_seqlen_q, queries, "queries")

    if table is not None:
        if len(table) != batch:
            raise ValueError(f"page_table: must have a row for each of {batch} sequences, found {len(table)}")
        if shape_k[1] < 1:
            raise ValueError(f"k: dim 1 (page_size) must be at least 1, found {shape_k[1]}")
        capacity = same(table.shape[1] * shape_k[1], batch)
    elif starts_k is not None:
        if len(starts_k) != batch + 1:
            raise ValueError(f"cu_seqlens_k: must have {batch + 1} elements, found {len(starts_k)}")
        check_offsets("cu_seqlens_k", starts_k, shape_k[0], "rows of k")
        capacity = shape_k[0] - starts_k[:-1] if seqused_k is not None else starts_k[1:] - starts_k[:-1]
    else:
        if cache_batch_idx is None and shape_k[0] != batch:
            raise ValueError(f"k: dim 0 (batch) must be {batch} without cache_batch_idx, found shape {shape_k}")
        capacity = same(shape_k[1], batch)
    new = new_keys(k_new, cu_seqlens_k_new, seqlen_k_new, batch)
    used, name = capacity, "k"
    if seqused_k is not None or cache_seqlens is not None:
        name = "cache_seqlens" if seqused_k is None else "seqused_k"
        if isinstance(seqused_k, int):
            raise TypeError("seqused_k: a tensor of lengths is needed, found int; only cache_seqlens may be one length")
        tensor = cache_seqlens if seqused_k is None else seqused_k
        if seqused_k is None and len(getattr(tensor, "shape", ())) == 0:  # one length for all
            if (for_all := integer(name, tensor)) < 0:
                raise ValueError(f"{name}: is {for_all}, must not be negative")
            used = same(for_all, batch)
        else:
            used = counts(name, tensor, batch)
        check_upper(name, used, capacity, "the keys that the sequence has room for")
    elif table is not None:
        needed("seqused_k", None, "with page_table")
    elif new.any():
        needed("cache_seqlens", None, "with new keys, which are appended behind so many keys")
    keys = used + new
    check_upper(name, keys, capacity, "the keys that the sequence has room for", " with the new keys")
    rows = counts("cache_batch_idx", cache_batch_idx, batch)
    if rows is not None:
        check_upper("cache_batch_idx", rows, same(shape_k[0] - 1, batch), "the last row of the cache")
        check_written_rows(rows, new)
    pad = counts("cache_leftpad", cache_leftpad, batch)
    if pad is None:
        pad = same(0, batch)
    check_upper("cache_leftpad", pad, keys, "the keys of the sequence")
    counts("rotary_seqlens", rotary_seqlens, batch)
    check_bound("max_seqlen_k", max_seqlen_k, keys - pad, "keys")
    total, world = counts("cp_tot_seqused_k", cp_tot_seqused_k, batch), mask.cp_world_size
    if world > 1:
        needed("cp_tot_seqused_k", total, f"with cp_world_size {world}")
        here = (total - mask.cp_rank + world - 1) // world
        check_upper(name, keys - pad, here, f"the keys of cp_tot_seqused_k on rank {mask.cp_rank} of {world}")
    if table is not None:
        begin, end = seen_keys(mask, queries, keys - pad, total if world > 1 else keys - pad)
        check_pages(table, pad + begin, pad + end, shape_k[1], shape_k[0], "queries see")
        check_pages(table, used, keys, shape_k[1], shape_k[0], "the call appends")
        check_written_slots(table, used, new, shape_k[1])
    schedule = values("scheduler_metadata", scheduler_metadata, 1)
    if schedule is not None:
        check_schedule(schedule, bool(getattr(scheduler_metadata, "is_cuda", False)), rows_q, queries)


def mask_of(causal: Any, window_size: Any, attention_chunk: Any, cp_world_size: Any, cp_rank: Any) -> Any:
    """The Mask of the reference."""
    from hopper_attention.reference import checks

    left, right = window(window_size)
    if left < -1 or right < -1:
        raise ValueError(f"window_size: must be -1 (unlimited) or at least 0 on both sides, found {(left, right)}")
    chunk = 0 if attention_chunk is None else integer("attention_chunk", attention_chunk)
    if chunk < 0:
        raise ValueError(f"attention_chunk: must be at least 0 (0 is off), found {chunk}")
    world, rank = integer("cp_world_size", cp_world_size), integer("cp_rank", cp_rank)
    if not 1 <= world <= MOST_RANKS:
        raise ValueError(f"cp_world_size: must be 1 to {MOST_RANKS}, found {world}")
    if not 0 <= rank < world:
        raise ValueError(f"cp_rank: must be 0 to {world - 1} (cp_world_size - 1), found {rank}")
    return checks.mask_of(causal, (left, right), chunk, world, rank)


def refuse_both(name: str, x: Any, other_name: str, other: Any) -> None:
    """ValueError if both are given."""
    if x is not None and other is not None:
        raise ValueError(f"{name}: must not be given together with {other_name}; pass one of them")


def refuse_capture(q: Any) -> None:
    """ValueError while a CUDA graph is captured."""
    torch = sys.modules.get("torch")
    if is_torch(q) and q.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ValueError("check_metadata: copies to the host, which a graph cannot capture; call it before")


def shape_of(name: str, x: Any, starts_name: str, starts: Any) -> tuple[int, ...]:
    """The shape: of 3 dims where offsets say where sequences start, else of 4."""
    shape = tuple(getattr(x, "shape", ()))
    rank, when = (4, "without") if starts is None else (3, "with")
    if len(shape) != rank:
        raise ValueError(f"{name}: must have {rank} dims {when} {starts_name}, found shape {shape}")
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
    """From 0 on, never decreasing, inside the tensor of `rows`."""
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


def new_keys(k_new: Any, starts: Any, for_all: Any, batch: int) -> Any:
    """Keys that every sequence gets. Without k_new, offsets of new keys are not read."""
    count = integer("seqlen_k_new", for_all)
    if count < 0:
        raise ValueError(f"seqlen_k_new: must be at least 0, found {count}")
    if k_new is None:
        return same(count, batch)
    shape = shape_of("k_new", k_new, "cu_seqlens_k_new", starts)
    found = values("cu_seqlens_k_new", starts, 1)
    if found is not None:
        if count != 0:
            raise ValueError(f"cu_seqlens_k_new: must not be given together with seqlen_k_new, {count}")
        if len(found) != batch + 1:
            raise ValueError(f"cu_seqlens_k_new: must have {batch + 1} elements, found {len(found)}")
        check_offsets("cu_seqlens_k_new", found, shape[0], "rows of k_new")
        return found[1:] - found[:-1]
    if shape[0] != batch:
        raise ValueError(f"k_new: dim 0 (batch) must be {batch}, found shape {shape}")
    if count not in (0, shape[1]):
        raise ValueError(f"seqlen_k_new: must be {shape[1]}, as in k_new, or left out, found {count}")
    return same(shape[1], batch)


def seen_keys(mask: Any, queries: Any, keys: Any, total: Any) -> tuple[Any, Any]:
    """The keys [begin, end) that any query of a sequence sees; equal where there is none. total: keys on all ranks."""
    import numpy as np

    from hopper_attention.reference.mask import Lengths, visible

    length = Lengths(queries, keys, total)
    begin, _ = visible(mask, np.zeros_like(queries), length)
    _, end = visible(mask, queries - 1, length)
    end = np.where(queries > 0, end, 0)
    return np.minimum(begin, end), end


def check_pages(table: Any, begin: Any, end: Any, page_size: int, pages: int, what: str) -> None:
    """Every slot of the table that holds one of the keys [begin, end) names a page that exists."""
    import numpy as np

    slots = np.arange(table.shape[1])
    used = (slots >= begin[:, None] // page_size) & (slots * page_size < end[:, None]) & (begin < end)[:, None]
    wrong = used & ((table < 0) | (table >= pages))
    if wrong.any():
        b, slot = (int(i[0]) for i in np.nonzero(wrong))
        raise ValueError(
            f"page_table: slot {slot} of sequence {b} is page {table[b, slot]}, but there are {pages} pages "
            f"({what} keys {begin[b]} to {end[b] - 1} of it, {page_size} are in a page)"
        )


def check_written_rows(rows: Any, new: Any) -> None:
    """No row of the cache gets new keys from two sequences."""
    import numpy as np

    writers = np.flatnonzero(new)
    if (pair := first_pair(rows[writers])) is not None:
        a, b = (writers[i] for i in pair)
        raise ValueError(f"cache_batch_idx: of sequence {b} is {rows[b]}, the row to which sequence {a} appends, too")


def check_written_slots(table: Any, used: Any, new: Any, page_size: int) -> None:
    """No slot of a page gets two new keys."""
    import numpy as np

    sequence = np.repeat(np.arange(len(new)), new)
    key = used[sequence] + np.arange(len(sequence)) - (np.cumsum(new) - new)[sequence]
    page = table[sequence, key // page_size]
    if (pair := first_pair(page * page_size + key % page_size)) is not None:
        a, b = pair
        raise ValueError(
            f"page_table: key {key[b]} of sequence {sequence[b]} is appended to slot {key[b] % page_size} of page "
            f"{page[b]}, as is key {key[a]} of sequence {sequence[a]}"
        )
