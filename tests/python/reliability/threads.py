"""Eight threads, each with calls of its own on a stream of its own, and producers that are late on side streams.

No call is waited for: every result is compared bitwise on the device. A case is one call of a thread; the calls behind
late producers come first and beside them.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from gpu import batches, support
from gpu.batches import Batch
from gpu.support import Case
from reliability._subjects import Results, differences, poison, small, subject
from reliability.harness import Budget, Failures, result

TITLE = "Eight threads on streams of their own; producers that are late"
NEEDS = "gpu"
COUNT = 80_000
SECONDS = 150
PARTS = 1

THREADS = 8
LATE = 32  # calls behind a late producer
SLEEP_CYCLES = 200_000_000  # 100 ms: longer than a busy host takes for the call
QUEUED = 200  # calls of a thread between two waits, so that the budget holds


def shapes(i: int) -> list[Case | Batch]:
    """What thread i calls in turn."""
    mixed = {"q_lengths": (1, 90 + i, 1, 0, 5), "k_lengths": (900, 90 + i, 64 + i, 70, 300), "heads_q": 8, "seed": i}
    decode = {"q_lengths": (1,) * 5, "k_lengths": (1 + i, 700, 64, 2300, 129), "heads_q": 8, "seed": i}
    return [
        Case(f"thread {i}, dense", 100 + 37 * i, 200 + i, causal=bool(i % 2), heads_q=4 * (1 + i % 3), seed=i),
        Batch(f"thread {i}, mixed", **mixed, keys="paged", page_size=(16, 1, 64)[i % 3], causal=True),
        Batch(f"thread {i}, decode", **decode, keys="paged", call="cache", dense_q=True, causal=True, num_splits=0),
        Batch(f"thread {i}, invariant", **mixed, causal=True, batch_invariant=True, num_splits=0),
    ]


def run(budget: Budget) -> dict[str, Any]:
    failures = Failures()
    late = late_producers(failures, LATE if support.DEVICE == "cuda" else 2)
    each = -(-budget.count // THREADS)
    workers = [Worker(i, each, budget) for i in range(THREADS)]
    for worker in workers:
        worker.start()
    while any(worker.is_alive() for worker in workers):
        budget.alive(sum(worker.done for worker in workers), budget.count + 1)
        for worker in workers:
            worker.join(0.2 / THREADS)
    for worker in workers:
        for problem in worker.problems:
            failures.add(problem)
    calls = sum(worker.done for worker in workers)
    return result(calls, failures, threads=THREADS, late_producers=late)


class Worker(threading.Thread):
    def __init__(self, i: int, count: int, budget: Budget) -> None:
        super().__init__(name=f"worker {i}", daemon=True)
        self.count, self.budget, self.done, self.problems = count, budget, 0, []
        # Each has metadata of its own: calls on two streams at a time must not share any.
        self.subjects = [subject(shape, metadata=place == 2) for place, shape in enumerate(self.sized(shapes(i)))]
        self.expected = [x.expected() for x in self.subjects]
        for x, expected in zip(self.subjects, self.expected, strict=True):
            judged = x.judge(expected)
            if not judged:
                self.problems.append(f"{judged.message}\n{x.line}")

    @staticmethod
    def sized(found: list[Case | Batch]) -> list[Case | Batch]:
        return found if support.DEVICE == "cuda" else [small(shape) for shape in found]

    def run(self) -> None:
        try:
            if support.DEVICE != "cuda":
                self.calls()
                return
            torch.cuda.set_device(0)
            stream = torch.cuda.Stream()
            with torch.inference_mode(), torch.cuda.stream(stream):
                self.calls()
            stream.synchronize()
        except Exception as error:
            self.problems.append(f"{self.name}: {type(error).__name__}: {error}")

    def calls(self) -> None:
        results = [x.new_results() for x in self.subjects]
        wrong = [torch.zeros((), dtype=torch.int64, device=support.DEVICE) for _ in self.subjects]
        for number in range(self.count):
            place = number % len(self.subjects)
            poison(results[place])
            self.subjects[place].call(results[place])
            wrong[place] += differences(results[place], self.expected[place])
            self.done += 1
            if number % QUEUED == QUEUED - 1:
                if support.DEVICE == "cuda":
                    torch.cuda.current_stream().synchronize()
                if self.budget.left() <= 0:
                    break
        for x, count in zip(self.subjects, wrong, strict=True):
            if int(count):
                self.problems.append(f"{self.name}: {int(count)} elements differed in {self.done} calls\n{x.line}")


def late_producers(failures: Failures, count: int) -> int:
    """Lengths, pages, q, k and v arrive on a side stream long after the call was made there."""
    found = [shape for i in range(-(-count // 4)) for shape in Worker.sized(shapes(i))][:count]
    for place, shape in enumerate(found):
        late = LateDense(support.main_dims(shape)) if isinstance(shape, Case) else LateBatch(batches.main_dims(shape))
        waited = False
        if support.DEVICE == "cuda":
            side = torch.cuda.Stream()
            torch.cuda.synchronize()
            with torch.cuda.stream(side):
                torch.cuda._sleep(SLEEP_CYCLES)
                late.produce()
                results = late.call()
            waited = side.query()
            side.synchronize()
        else:
            late.produce()
            results = late.call()
        differing = int(differences(results, late.expected))
        if waited or differing:
            text = "the call waited for its inputs" if waited else f"{differing} elements differ"
            failures.add(f"late producer {place}: {text}\n{late.line}")
    return len(found)


class LateDense:
    """A call of flash_attn_func whose q, k and v are NaN until produce()."""

    def __init__(self, case: Case) -> None:
        self.case, self.line = case, case.line()
        self.values = support.make_inputs(case)
        self.expected = support.attend(case, self.values)
        self.late = {**self.values, **{name: torch.full_like(self.values[name], float("nan")) for name in "qkv"}}

    def produce(self) -> None:
        for name in "qkv":
            self.late[name].copy_(self.values[name])

    def call(self) -> Results:
        return support.attend(self.case, self.late)


class LateBatch:
    """A batch whose q, k and v are NaN and whose lengths and pages are zeros until produce()."""

    def __init__(self, batch: Batch) -> None:
        self.line = batch.line()
        made = self.made = batches.make(batch)
        self.expected = batches.attend(made)
        self.lengths = {name: x for name, x in made.lengths.items() if isinstance(x, torch.Tensor)}
        self.values = made.q, made.k, made.v
        made.lengths.update({name: torch.zeros_like(x) for name, x in self.lengths.items()})
        made.q, made.k, made.v = (torch.full_like(x, float("nan")) for x in self.values)
        self.results = batches.new_results(made)

    def produce(self) -> None:
        for name, x in self.lengths.items():
            self.made.lengths[name].copy_(x)
        for x, value in zip((self.made.q, self.made.k, self.made.v), self.values, strict=True):
            x.copy_(value)

    def call(self) -> Results:
        return batches.attend(self.made, self.results)
