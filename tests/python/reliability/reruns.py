"""The same call a thousand times: the same bits, beside a stream that fills the memory's bandwidth and one that computes.

Results and workspace hold poison, the data of the call before, or 0xFF before each run.
"""

from __future__ import annotations

from typing import Any

import torch

from gpu import batches, support
from gpu.batches import Batch
from gpu.support import Case
from reliability._memory import watched
from reliability._subjects import Subject, differences, poison, small, subject
from reliability.harness import Budget, Failures, result

TITLE = "Reruns under a memory hog and a busy stream: the same bits"
NEEDS = "gpu"
COUNT = 20000  # of 20 shapes
SECONDS = 150
PARTS = 2

HOG_BYTES = 1 << 27
MIXED = {"q_lengths": (1, 200, 1, 0, 5, 33, 1, 64), "k_lengths": (900, 200, 0, 70, 2000, 300, 6000, 64), "heads_q": 8}
DECODE = {"q_lengths": (1,) * 9, "k_lengths": (1, 70, 128, 129, 500, 0, 9000, 3000, 64), "heads_q": 8}
SPECULATE = {"q_lengths": (4,) * 5, "k_lengths": (4, 700, 64, 2300, 5000), "heads_q": 8}
LONG = {"q_lengths": (1, 1), "k_lengths": (70000, 3), "heads_q": 8, "heads_k": 1}
CACHE = {"keys": "paged", "call": "cache", "dense_q": True, "causal": True}
SHAPES: list[Case | Batch] = [
    Case("dense causal, several tiles for each block", 1500, 1500, batch=4, heads_q=16, heads_k=16, causal=True),
    Case("dense full, ragged, d 64", 1001, 2003, heads_q=16, heads_k=4, head_dim=64),
    Case("dense, everything", 700, 900, causal=True, window=(300, 0), chunk=512, softcap=9.0, sinks="fp32", heads_q=16),
    Case("dense, packed heads", 5, 3000, batch=8, heads_q=16, heads_k=2, causal=True),
    Case("dense, fp16 window", 2000, 2000, dtype="fp16", window=(128, 0), heads_q=8, heads_k=8),
    Case("dense, d 256", 600, 900, head_dim=256, causal=True, heads_q=8),
    Case("dense (192, 128)", 600, 900, head_dim=192, head_dim_v=128, causal=True, heads_q=8, heads_k=8),
    Case("dense, one row", 1, 1, batch=1, heads_q=1, heads_k=1),
    Batch("varlen, packed", **MIXED, causal=True),
    Batch("mixed, pages of 16", **MIXED, keys="paged", causal=True, num_splits=0),
    Batch("mixed, pages of 1", **MIXED, keys="paged", page_size=1, causal=True, num_splits=0),
    Batch("mixed, pages of 64, window, sinks", **MIXED, keys="paged", page_size=64, window=(300, 0), sinks="fp32"),
    Batch("mixed, batch_invariant", **MIXED, keys="paged", causal=True, num_splits=0, batch_invariant=True),
    Batch("decode with splits", **DECODE, **CACHE, num_splits=0),
    Batch("decode, pages of 4, 7 splits", **DECODE, **CACHE, page_size=4, num_splits=7),
    Batch(
        "decode, dense cache, left padding",
        **DECODE,
        keys="dense",
        call="cache",
        dense_q=True,
        leftpad=40,
        batch_idx=True,
        num_splits=0,
    ),  # fmt: skip
    Batch("decode of one long sequence", **LONG, **CACHE, page_size=128, num_splits=0),
    Batch("4 queries, softcap", **SPECULATE, **CACHE, softcap=20.0, num_splits=0),
    Batch("(192, 128) with splits", **MIXED, head_dim=192, head_dim_v=128, keys="paged", num_splits=3),
    Batch("fp16, d 256, decode", **DECODE, **CACHE, head_dim=256, dtype="fp16", num_splits=0),
]


class Hog:
    """Streams that keep the GPU busy beside the calls; nothing on the CPU."""

    def __init__(self) -> None:
        self.on = support.DEVICE == "cuda"
        if self.on:
            self.copies, self.products = torch.cuda.Stream(), torch.cuda.Stream()
            self.bytes = torch.empty(HOG_BYTES, dtype=torch.uint8, device=support.DEVICE)
            self.matrix = torch.randn(1024, 1024, device=support.DEVICE).to(torch.bfloat16)

    def work(self) -> None:
        if not self.on:
            return
        with torch.cuda.stream(self.copies):
            self.bytes[: HOG_BYTES // 2].copy_(self.bytes[HOG_BYTES // 2 :])
        with torch.cuda.stream(self.products):
            torch.mm(self.matrix, self.matrix)


def run(budget: Budget) -> dict[str, Any]:
    """Part p of n takes every n-th shape; budget.count counts the reruns of all shapes."""
    failures, cases, hog = Failures(), 0, Hog()
    mine = SHAPES[budget.part :: budget.parts]
    each = -(-budget.count // len(SHAPES))
    shapes = 0
    for place, shape in enumerate(mine):
        if budget.left() <= 0:
            break
        shapes += 1
        until = budget.left() * (1 - 1 / (len(mine) - place))  # what is left of the time after this shape's share
        if support.DEVICE != "cuda":
            shape = small(shape)
        for_step = isinstance(shape, Batch) and place % 2 == 1
        chosen = subject(shape, metadata=for_step)
        expected = chosen.expected()
        judged = chosen.judge(expected)
        if not judged:
            failures.add(f"{judged.message}\n{chosen.line}")
        done, wrong = rerun(chosen, expected, each, until, hog, budget, cases)
        cases += done
        if wrong:
            failures.add(f"{wrong} elements differed in {done} reruns\n{chosen.line}")
    return result(cases, failures, shapes=shapes, reruns_of_each_shape=str(each))


def rerun(
    chosen: Subject, expected: Any, count: int, until: float, hog: Hog, budget: Budget, before: int
) -> tuple[int, int]:
    """(reruns, elements that differed): with workspaces of the call's own, of the last call's data, of 0xFF in turn."""
    with watched() as allocations:
        chosen.call(chosen.new_results())
    size = max(allocations.workspace_bytes, 16)
    workspace = torch.full((size,), 0xFF, dtype=torch.uint8, device=support.DEVICE)
    results = chosen.new_results()
    wrong = torch.zeros((), dtype=torch.int64, device=support.DEVICE)
    done = 0
    while done < count and budget.left() > until:
        hog.work()
        poison(results)
        if done % 3 == 1:
            workspace.fill_(0xFF)
        given = {"workspace": workspace} if done % 3 and batches.has_schedules() else {}
        chosen.call(results, **given)
        wrong += differences(results, expected)
        done += 1
        if done % 100 == 0:
            if done % 500 == 0:
                wrong.item()  # bounds what is queued, so that the budget holds
            budget.alive(before + done, budget.count // budget.parts)
    return done, int(wrong)
