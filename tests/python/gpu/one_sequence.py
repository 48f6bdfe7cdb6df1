"""Calls of one sequence, whose tiles follow from their index: in which layouts, and whether a captured call serves others."""

from __future__ import annotations

import torch

from gpu.batches import Batch, attend, int32, make, new_results, require_same

LAYOUTS = [{"keys": "packed"}, {"call": "cache", "keys": "dense", "leftpad": 70}] + [
    {"keys": "paged", "page_size": n} for n in (1, 16, 64)
]


def require_graph_serves(case: Batch, lengths: list[tuple[int, int]]) -> None:
    """A graph of `case`, replayed with other (queries, keys), equals the eager call bit by bit."""
    made = make(case)
    results = new_results(made)
    attend(made, results)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend(made, results)
    for queries, keys in lengths:
        made.lengths["cu_seqlens_q"].copy_(int32([0, queries]))
        made.lengths["seqused_k"].copy_(int32([keys]))
        found = []
        for run in (graph.replay, lambda: attend(made, results)):
            for x in results:
                x.fill_(7.0)
            run()
            found.append(tuple(x.clone() for x in results))
        require_same(case, f"{queries} queries on {keys} keys", *found)
