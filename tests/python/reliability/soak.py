"""Minutes of calls of changing shapes on four streams, eager and in graphs, under a watchdog.

Each round has other shapes of all functions. The first result of a shape is checked against float64, all others are
compared with it bitwise, so that every call is checked and 1 % of them by arithmetic. In every GRAPH_EVERY-th round an
engine's graph is replayed on one stream while the eager calls use the others; nothing is waited for until the round ends.

After ROUNDS rounds the shapes come again, a pass, and must give the bits of the first pass. torch and cuBLAS keep
something for every shape that they have seen, so only with known shapes must memory stand still: at the end of every
SAMPLE_EVERY-th round, where no tensor and no graph of a round is alive and torch has given back what it does not use, a
straight line through the samples after the first pass must not rise. Memory of the GPU that torch does not know of is the
driver's, of graphs, and of the library; it is judged if no other section runs on the GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import math
import os
import random
import statistics
import threading
import time
from typing import Any

import torch

import hopper_attention
from gpu import support
from gpu.test_random import random_case
from gpu.test_random_batches import random_batch
from reliability._engine import Engine, Replayed, random_model, state_differs
from reliability._subjects import Subject, differences, poison, small, subject
from reliability.harness import Budget, Failures, result

TITLE = "Soak: changing shapes, graphs and eager on 4 streams, 1 % against float64, no growth of memory"
NEEDS = "gpu"
COUNT = 0
SECONDS = 480
PARTS = 1
SILENCE = 90

STREAMS = 4
CALLS = 90  # of a shape: with the replays, one call in a hundred is checked against float64
SHAPES = 4  # of a round
ROUNDS = 240  # of a pass; a multiple of GRAPH_EVERY and SAMPLE_EVERY
GRAPH_EVERY = 5  # rounds between those that capture, which is slow
SAMPLE_EVERY = 20
REPLAYS = 40  # of a graph, fewer than CALLS
HANG_SECONDS = 60
MOST_SCORES = 1 << 21  # of a shape: the float64 check takes most of the time
GROWTH = 4.0  # MiB a minute that is noise of allocators
STEP = 65_521  # a prime: elements that far apart weigh alike in a fingerprint

Prints = dict[tuple[int, int], list[int]]  # (round, place of the shape) -> fingerprint of its first result


def run(budget: Budget) -> dict[str, Any]:
    failures = Failures()
    counts = {"checked": 0, "compared_with_the_first_pass": 0, "graphs": 0, "replays": 0, "merges": 0}
    calls = done = 0
    prints: Prints = {}
    watch = Watch(alone=bool(budget.options.get("alone")))
    pulse = Pulse()
    streams = [torch.cuda.Stream() for _ in range(STREAMS)] if support.DEVICE == "cuda" else [None]
    watch.sample()
    while budget.left() > 0:
        number = budget.seed + 1 + done % ROUNDS
        if done == ROUNDS:
            watch.shapes_known()
        done += 1
        budget.alive(calls, 0, f"{done} rounds")
        pulse.beat()
        try:
            made, problem = one_round(number, streams, counts, prints)
            calls += made
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if problem:
            failures.add(f"round {number}: {problem}")
            if failures.count >= 5 or "CUDA error" in problem:
                break
        if done % SAMPLE_EVERY == 0:
            watch.sample()
    pulse.stop()
    for text in watch.problems():
        failures.add(text)
    percent = round(100 * counts["checked"] / max(1, calls), 2)
    return result(
        calls, failures, shapes=min(done, ROUNDS) * SHAPES, passes=f"{done / ROUNDS:.1f}", **counts,
        percent_against_float64=percent, **watch.figures(),
    )  # fmt: skip


def one_round(number: int, streams: list, counts: dict[str, int], prints: Prints) -> tuple[int, str]:
    """SHAPES subjects, each called CALLS times on all streams in turn but the graph's -> (calls, what is wrong)."""
    r = random.Random(number)
    chosen = [new_subject(r.randrange(1 << 30)) for _ in range(SHAPES)]
    firsts = [x.expected() for x in chosen]
    for place, (x, first) in enumerate(zip(chosen, firsts, strict=True)):
        counts["checked"] += 1
        judged = x.judge(first)
        if not judged:
            return 0, f"{judged.message}\n{x.line}"
        found = fingerprint(first)
        counts["compared_with_the_first_pass"] += (number, place) in prints
        if prints.setdefault((number, place), found) != found:
            return 0, f"other bits than in the first pass\n{x.line}"
    graph = None
    eager = streams
    if number % GRAPH_EVERY == 0:
        at = number // GRAPH_EVERY % len(streams)
        graph = GraphOfEngine(number, streams[at])
        eager = [*streams[:at], *streams[at + 1 :]] or streams
    results = [[x.new_results() for x in chosen] for _ in eager]
    wrong = [torch.zeros(len(chosen), dtype=torch.int64, device=support.DEVICE) for _ in eager]
    wait_for_all()
    calls, replays = (CALLS, REPLAYS) if support.DEVICE == "cuda" else (3, 2)
    for call in range(1, calls):
        if graph is not None and call <= replays:
            graph.step(1000 * number + call)
        for place, x in enumerate(chosen):
            turn = (call + place) % len(eager)
            with on(eager[turn]):
                mine = results[turn][place]
                poison(mine)
                x.call(mine)
                wrong[turn][place] += differences(mine, firsts[place])
    counts["merges"] += merge_with_itself(firsts[0])
    wait_for_all()
    made = calls * len(chosen)
    found = torch.stack(wrong).sum(0).tolist()
    problems = [f"{n} elements differ\n{x.line}" for x, n in zip(chosen, found, strict=True) if n]
    if graph is not None:
        counts["graphs"] += 1
        counts["replays"] += replays
        made += 2 * replays * graph.engine.model.layers
        problems += graph.problems()
    return made, "\n".join(problems)


def fingerprint(results: tuple[torch.Tensor, torch.Tensor]) -> list[int]:
    """Of out and LSE: the sum of their bits and the sum weighed by place, modulo 2^64."""
    found = []
    for x in results:
        bits = support.bits(x).flatten().long()
        place = torch.arange(len(bits), device=bits.device) % STEP + 1
        found += [bits.sum(), (bits * place).sum()]
    return torch.stack(found).tolist()


class GraphOfEngine:
    """An engine's step captured; each step on its stream has other lengths and is compared with an eager one."""

    def __init__(self, number: int, stream: Any) -> None:
        self.engine = Engine(random_model(number, 0 if support.DEVICE == "cuda" else 30), number)
        self.engine.set(number)
        self.engine.take_workspace()
        wait_for_all()
        self.graph = Replayed(self.engine.step)
        self.stream = stream
        self.wrong = torch.zeros((), dtype=torch.int64, device=support.DEVICE)

    def step(self, seed: int) -> None:
        """On one stream, since the replayed and the eager step share the engine's buffers."""
        with on(self.stream):
            self.engine.set(seed)
            self.graph.replay()
            replayed = self.engine.state()
            self.engine.clear()
            self.engine.step()
            self.wrong += state_differs(replayed, self.engine.state()) + self.engine.unwritten()

    def problems(self) -> list[str]:
        """After the stream has been waited for."""
        count = int(self.wrong)
        return [f"{count} elements of graphs differ: {self.engine.model}"] if count else []


def new_subject(seed: int) -> Subject:
    """A random call that both reference and kernel do quickly."""
    on_gpu = support.DEVICE == "cuda"
    if seed % 3 == 0 and support.MAIN:
        case = random_case(seed)
        rows = max(1, MOST_SCORES // (case.batch * case.heads_q * case.seqlen_k))
        case = dataclasses.replace(case, seqlen_q=min(case.seqlen_q, rows)).with_enough_rows()
        return subject(case if on_gpu else small(case))
    # metadata=False: calls on several streams must not share a schedule
    batch = random_batch(seed, MOST_SCORES, 1 << 21) if on_gpu else random_batch(seed, 1 << 12, 1 << 12)
    return subject(dataclasses.replace(batch, metadata=False))


def merge_with_itself(first: tuple[torch.Tensor, torch.Tensor]) -> int:
    """merge_states of a result with itself: the same out, and ln 2 more."""
    out, lse = first
    if out.dim() == 3 or out.shape[-1] % 8:
        return 0
    found, total = hopper_attention.merge_states(out, lse, out, lse)
    expected = torch.where(lse == -torch.inf, lse, lse + 0.6931472)
    if not torch.allclose(total, expected, atol=1e-4, rtol=1e-6) or not torch.allclose(
        found.float(), out.float(), atol=1e-2, rtol=1e-2
    ):
        raise AssertionError("merge_states of a result with itself differs from it")
    return 1


def on(stream: Any) -> Any:
    return torch.cuda.stream(stream)  # None: the current one, also without a GPU


def wait_for_all() -> None:
    if support.DEVICE == "cuda":
        torch.cuda.synchronize()


def give_back() -> None:
    """Free memory of the C heap goes to the system, so that what is left is in use."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


class Watch:
    """Memory of this process and of the GPU over time, in MiB. alone: no other process uses the GPU meanwhile."""

    COLUMNS = ("host", "torch allocated", "torch reserved", "GPU beside torch")

    def __init__(self, alone: bool) -> None:
        self.began = time.monotonic()
        self.alone = alone
        self.samples: list[tuple[float, ...]] = []  # minutes, then COLUMNS
        self.known = math.inf  # minutes until every shape had been seen

    def shapes_known(self) -> None:
        self.known = self.minutes()

    def minutes(self) -> float:
        return (time.monotonic() - self.began) / 60

    def sample(self) -> None:
        gc.collect()
        give_back()
        with open("/proc/self/statm", encoding="ascii") as file:
            host = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        allocated = reserved = used = 0
        if support.DEVICE == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            free, total = torch.cuda.mem_get_info()
            allocated, reserved, used = torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), total - free
        values = (host, allocated, reserved, used - reserved)
        self.samples.append((self.minutes(), *(x / 2**20 for x in values)))

    def later(self) -> list[tuple[float, ...]]:
        """Without the first pass over the shapes, in which caches fill."""
        return [x for x in self.samples if x[0] >= self.known]

    def slope(self, name: str) -> float:
        """MiB a minute of a straight line through the samples; 0.0 if there are too few."""
        later, column = self.later(), 1 + self.COLUMNS.index(name)
        if len(later) < 10:
            return 0.0
        return statistics.linear_regression([x[0] for x in later], [x[column] for x in later]).slope

    def at_quarters(self, name: str) -> list[float]:
        """At the start and after each quarter of the time."""
        end, column = self.samples[-1][0], 1 + self.COLUMNS.index(name)
        return [next(x[column] for x in self.samples if x[0] >= end * n / 4) for n in range(5)]

    def judged(self) -> list[str]:
        return [name for name in self.COLUMNS if self.alone or name != "GPU beside torch"]

    def figures(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "samples_of_memory": len(self.samples),
            "minutes_until_all_shapes_were_seen": round(self.known, 2) if self.known < math.inf else "never",
        }
        for name in self.COLUMNS:
            said = "" if name in self.judged() else " (not judged, others use the GPU)"
            found[f"{name} MiB per minute{said}"] = round(self.slope(name), 3)
            found[f"{name} MiB at the quarters"] = " ".join(f"{x:.0f}" for x in self.at_quarters(name))
        return found

    def problems(self) -> list[str]:
        found = []
        long_enough = bool(self.samples) and self.samples[-1][0] >= 2
        if long_enough and self.samples[-1][0] < 2 * self.known:
            found.append(f"the {ROUNDS} rounds of shapes did not come twice, so that growth of memory is not known")
        for name in self.judged():
            if long_enough and self.slope(name) > GROWTH:
                found.append(f"memory of {name} grows by {self.slope(name):.2f} MiB a minute, allowed {GROWTH}")
        return found


class Pulse:
    """Ends the process when no round ends for HANG_SECONDS: a GPU that hangs answers nothing, not even an exception."""

    def __init__(self) -> None:
        self.last, self.over = time.monotonic(), threading.Event()
        threading.Thread(target=self.watch, daemon=True).start()

    def beat(self) -> None:
        self.last = time.monotonic()

    def stop(self) -> None:
        self.over.set()

    def watch(self) -> None:
        while not self.over.wait(1.0):
            if time.monotonic() - self.last > HANG_SECONDS:
                os.write(2, f"no round ended for {HANG_SECONDS} s: hung\n".encode())
                os._exit(70)
