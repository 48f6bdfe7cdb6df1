"""The same call a thousand times: the same bits, beside a stream that fills the memory's bandwidth and one that computes.

Results and workspace hold poison, the data of the call before, or 0xFF before each run. Both streams always have work
ahead: a rerun is beside them if what was queued before it is not done when the call has ended.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from gpu import batches, support
from gpu.batches import Batch
from gpu.support import Case
from reliability._memory import synchronize, watched
from reliability._subjects import Subject, differences, poison, small, subject
from reliability.harness import Budget, Failures, result

TITLE = "Reruns under a memory hog and a busy stream: the same bits"
NEEDS = "gpu"
COUNT = 20000  # of 20 shapes
SECONDS = 200
PARTS = 1  # two hogs would take turns

HOG_BYTES = 1 << 29
HOG_ROWS = 4096  # of square matrices: 0.2 ms for a product
COPIES, PRODUCTS = 16, 24  # of a batch of work, about 4 ms
AHEAD = 2  # batches
LEAST_BESIDE = 90  # percent of the reruns
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


@dataclass
class Lane:
    """A stream and a batch of work for it, of which AHEAD are queued."""

    stream: Any
    work: Callable[[], None]
    queued: deque = field(default_factory=deque)  # events, one behind each batch

    def fill(self) -> None:
        while self.queued and self.queued[0].query():
            self.queued.popleft()
        while len(self.queued) < AHEAD:
            with torch.cuda.stream(self.stream):
                self.work()
                self.queued.append(self.stream.record_event())


class Hog:
    """Keeps the GPU busy beside calls on `stream`, which come first where both could go on; nothing on the CPU."""

    def __init__(self) -> None:
        self.lanes: list[Lane] = []
        self.stream = None
        self.waited = self.beside = 0  # calls; of those, beside both lanes
        if support.DEVICE != "cuda":
            return
        source, target = (torch.empty(HOG_BYTES, dtype=torch.uint8, device=support.DEVICE) for _ in range(2))
        matrix = torch.randn(HOG_ROWS, HOG_ROWS, device=support.DEVICE).to(torch.bfloat16)
        product = torch.empty_like(matrix)

        def copy() -> None:
            for _ in range(COPIES):
                target.copy_(source)

        def multiply() -> None:
            for _ in range(PRODUCTS):
                torch.mm(matrix, matrix, out=product)

        self.lanes = [Lane(torch.cuda.Stream(), work) for work in (copy, multiply)]
        self.stream = torch.cuda.Stream(priority=-1)
        synchronize()

    def fill(self) -> list[Any]:
        """Queues work -> an event behind all that is queued on each lane."""
        for lane in self.lanes:
            lane.fill()
        return [lane.queued[-1] for lane in self.lanes]

    def end(self) -> Any:
        """An event behind the call that was just made."""
        return self.stream.record_event() if self.lanes else None

    def wait(self, end: Any, before: list[Any]) -> None:
        """Until a call has ended. before: what `fill` gave before it."""
        if end is None:
            return
        while not end.query():
            self.fill()
        self.waited += 1
        self.beside += not any(event.query() for event in before)

    def percent(self) -> float:
        return round(100 * self.beside / max(1, self.waited), 1)

    def problem(self) -> str:
        if not self.lanes or self.percent() >= LEAST_BESIDE:
            return ""
        return f"{self.percent()} % of the reruns were beside both busy streams, at least {LEAST_BESIDE} % have to be"


def run(budget: Budget) -> dict[str, Any]:
    """Part p of n takes every n-th shape; budget.count counts the reruns of all shapes."""
    failures, unfinished, cases, hog = Failures(), [], 0, Hog()
    mine = SHAPES[budget.part :: budget.parts]
    each = -(-budget.count // len(SHAPES))
    least = each
    for place, shape in enumerate(mine):
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
        least = min(least, done)
        if wrong:
            failures.add(f"{wrong} elements differed in {done} reruns\n{chosen.line}")
        if done < each:
            unfinished.append(f"{done} of {each} reruns of {shape.why}")
    figures = {"shapes": len(mine), "least_reruns_of_a_shape": least}
    if hog.lanes:
        figures["least_percent_beside_both_busy_streams"] = hog.percent()
    if hog.problem():
        failures.add(hog.problem())
    return {**result(cases, failures, **figures), "unfinished": unfinished}


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
    synchronize()
    last: tuple[Any, list[Any]] = None, []
    done = 0
    with torch.cuda.stream(hog.stream) if hog.lanes else contextlib.nullcontext():
        while done < count and budget.left() > until:
            queued = hog.fill()
            poison(results)
            if done % 3 == 1:
                workspace.fill_(0xFF)
            given = {"workspace": workspace} if done % 3 and batches.has_schedules() else {}
            chosen.call(results, **given)
            end = hog.end()
            wrong += differences(results, expected)
            hog.wait(*last)  # for the call before, so that there is always one on the GPU
            last = end, queued
            done += 1
            if done % 100 == 0:
                budget.alive(before + done, budget.count // budget.parts)
        hog.wait(*last)
    synchronize()
    return done, int(wrong)
