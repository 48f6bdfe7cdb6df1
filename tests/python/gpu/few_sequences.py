"""Calls of few sequences, whose tiles need no schedule: in which layouts, whether a captured call serves others,
and whether runs agree.
"""

from __future__ import annotations

import itertools

import torch

from gpu import batches
from gpu.batches import Batch, attend, int32, judged_results, make, new_results, require_same

LAYOUTS = [{"keys": "packed"}, {"call": "cache", "keys": "dense", "leftpad": 70}] + [
    {"keys": "paged", "page_size": n} for n in (1, 16, 64)
]


def require_graph_serves(case: Batch, lengths: list[tuple[tuple[int, int], ...]]) -> None:
    """A graph of `case`, replayed with other (queries, keys) of its sequences, equals the eager call bit by bit."""
    made = make(case)
    results = new_results(made)
    attend(made, results)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend(made, results)
    for of_sequences in lengths:
        starts = itertools.accumulate((queries for queries, _ in of_sequences), initial=0)
        made.lengths["cu_seqlens_q"].copy_(int32(list(starts)))
        made.lengths["seqused_k"].copy_(int32([keys for _, keys in of_sequences]))
        found = []
        for run in (graph.replay, lambda: attend(made, results)):
            for x in results:
                x.fill_(7.0)
            run()
            found.append(tuple(x.clone() for x in results))
        require_same(case, f"queries and keys {of_sequences}", *found)


def require_same_again(case: Batch) -> None:
    """The same bits from run to run, with metadata and without, which calls leave as they were."""
    made = make(case)
    expected = judged_results(made)
    for _ in range(20):
        require_same(case, "again", attend(made), expected)
    metadata = batches.schedule(made)
    before = metadata.clone()
    for _ in range(3):
        require_same(case, "with metadata", attend(made, scheduler_metadata=metadata), expected)
    assert torch.equal(metadata, before)
