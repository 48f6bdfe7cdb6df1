"""Which sequences of a batch-invariant call are cut: asked of the plan, so that a test of cuts cannot lose them when the
size of a split changes. Needs no GPU.
"""

from __future__ import annotations

import re

import hopper_attention
from gpu.batches import Batch
from hopper_attention.testing import gates

MOST_ROWS = 64  # of the tile for few queries, those of all heads that share it; longer sequences are never cut


def plan_of(batch: Batch, **changes) -> hopper_attention.Plan:
    """The plan of the batch's call with bounds that fit; it says nothing of ranks of context parallelism."""
    packed = batch.keys == "packed" and not batch.extra_k
    arguments = {
        "dtype": batch.dtype,
        "head_dim": batch.head_dim,
        "head_dim_v": batch.dims[1],
        "page_size": batch.page_size if batch.keys == "paged" else None,
        "causal": batch.causal,
        "window_size": batch.window,
        "softcap": batch.softcap,
        "sinks": bool(batch.sinks),
        "device": "H200",
        "batch": batch.size,
        "max_seqlen_q": max([0, *(n + batch.extra_q for n in batch.q_lengths)]),
        "max_seqlen_k": max([0, batch.room_k, *(n + batch.extra_k for n in batch.k_lengths)]),
        "heads_q": batch.heads_q,
        "heads_kv": batch.heads_k,
        "num_splits": batch.num_splits,
        "attention_chunk": batch.chunk,
        "batch_invariant": batch.batch_invariant,
        "lengths_on_device": not packed,
        "total_q": None if batch.dense_q else sum(batch.q_lengths) + batch.extra_q * batch.size + batch.tail_q,
        "total_k": sum(batch.k_lengths) + 5 if packed else None,
    }
    return hopper_attention.plan(**{**arguments, **changes})


def cut_sequences(batch: Batch) -> list[int]:
    """Sequences whose keys are cut in parts that follow from them alone; none on several ranks, where parts are counted by rank."""
    plan = plan_of(batch)
    said = re.search(r"^splits: those of few queries with more than (\d+) keys", "\n".join(plan.reasons), re.MULTILINE)
    if said is None or batch.cp_world > 1:
        return []
    most_queries = MOST_ROWS // plan.packed_heads
    return [
        b
        for b, (queries, keys) in enumerate(zip(batch.q_lengths, batch.k_lengths, strict=True))
        if 0 < queries <= most_queries and keys_seen(batch, queries, keys) > int(said[1])
    ]


def keys_seen(batch: Batch, queries: int, keys: int) -> int:
    """From the first key of the first query to the last key of the last one."""
    options = {"causal": batch.causal, "window_size": batch.window, "attention_chunk": batch.chunk}
    begin, end = gates.visible_intervals(queries, keys, **options)
    return int(end[-1]) - int(begin[0])
