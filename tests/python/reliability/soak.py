"""Minutes of calls of changing shapes on four streams, eager and in graphs, under a watchdog.

Each round has other shapes of all functions. The first result of a shape is checked against float64, all others are
compared with it bitwise, so that every call is checked and 1 % of them by arithmetic. After ROUNDS rounds the shapes come
again: torch and cuBLAS keep something for every shape that they have seen, so only with known shapes must memory stand
still. Meanwhile the memory of the process and what torch holds on the GPU are watched: a straight line through the
samples after the first pass over all shapes must not rise.
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
ROUNDS = 240  # then the same shapes come again; a multiple of GRAPH_EVERY
GRAPH_EVERY = 5  # rounds between those that capture, which is slow
REPLAYS = 40
HANG_SECONDS = 60
MOST_SCORES = 1 << 21  # of a shape: the float64 check takes most of the time
HOST_GROWTH = 4.0  # MiB a minute that is noise of allocators
DEVICE_GROWTH = 4.0


def run(budget: Budget) -> dict[str, Any]:
    failures, counts = Failures(), {"calls": 0, "checked": 0, "shapes": 0, "replays": 0, "merges": 0}
    watch = Watch(budget.seconds)
    pulse = Pulse()
    streams = [torch.cuda.Stream() for _ in range(STREAMS)] if support.DEVICE == "cuda" else [None]
    done = 0
    while budget.left() > 0:
        number = budget.seed + 1 + done % ROUNDS
        if done == ROUNDS:
            watch.shapes_known()
        done += 1
        budget.alive(counts["calls"], 0, f"{counts['shapes']} shapes")
        pulse.beat()
        try:
            problem = one_round(number, streams, counts)
            if not problem and number % GRAPH_EVERY == 0:
                problem = graph_round(number, streams, counts)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if problem:
            failures.add(f"round {number}: {problem}")
            if failures.count >= 5 or "CUDA error" in problem:
                break
        watch.sample()
    pulse.stop()
    for text in watch.problems():
        failures.add(text)
    percent = round(100 * counts["checked"] / max(1, counts["calls"]), 2)
    return result(counts["calls"], failures, **counts, percent_against_float64=percent, **watch.figures())


def one_round(number: int, streams: list, counts: dict[str, int]) -> str:
    """SHAPES new subjects, each called CALLS times on all streams in turn."""
    r = random.Random(number)
    chosen = [new_subject(r.randrange(1 << 30)) for _ in range(SHAPES)]
    firsts = [x.expected() for x in chosen]
    for x, first in zip(chosen, firsts, strict=True):
        counts["shapes"] += 1
        counts["checked"] += 1
        judged = x.judge(first)
        if not judged:
            return f"{judged.message}\n{x.line}"
    results = [[x.new_results() for x in chosen] for _ in streams]
    wrong = [torch.zeros(len(chosen), dtype=torch.int64, device=support.DEVICE) for _ in streams]
    wait_for_all()
    calls = CALLS if support.DEVICE == "cuda" else 3
    for call in range(1, calls):
        for place, x in enumerate(chosen):
            turn = (call + place) % len(streams)
            with on(streams[turn]):
                mine = results[turn][place]
                poison(mine)
                x.call(mine)
                wrong[turn][place] += differences(mine, firsts[place])
    counts["calls"] += calls * len(chosen)
    counts["merges"] += merge_with_itself(firsts[0])
    wait_for_all()
    found = torch.stack(wrong).sum(0).tolist()
    return "\n".join(f"{n} elements differ\n{x.line}" for x, n in zip(chosen, found, strict=True) if n)


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


def graph_round(number: int, streams: list, counts: dict[str, int]) -> str:
    """An engine's step captured, replayed on the streams in turn with changing lengths, compared with eager steps."""
    model = random_model(number, 0 if support.DEVICE == "cuda" else 30)
    engine = Engine(model, number)
    engine.set(number)
    engine.take_workspace()
    wait_for_all()
    graph = Replayed(engine.step)
    wrong = torch.zeros((), dtype=torch.int64, device=support.DEVICE)
    replays = REPLAYS if support.DEVICE == "cuda" else 2
    for step in range(replays):
        with on(streams[step % len(streams)]):
            engine.set(1000 * number + step)
            graph.replay()
            replayed = engine.state()
            engine.clear()
            engine.step()
            wrong += state_differs(replayed, engine.state()) + engine.unwritten()
        wait_for_all()
    counts["replays"] += replays
    counts["calls"] += 2 * replays * model.layers
    return f"{int(wrong)} elements of graphs differ: {model}" if int(wrong) else ""


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
    """Memory of this process and of torch on the GPU over time."""

    def __init__(self, seconds: float) -> None:
        self.began, self.last, self.every = time.monotonic(), 0.0, min(1.0, seconds / 60)
        self.samples: list[tuple[float, float, float, float]] = []  # minutes, host, torch, GPU used by all
        self.known = math.inf  # minutes until every shape had been seen

    def shapes_known(self) -> None:
        self.known = (time.monotonic() - self.began) / 60

    def sample(self) -> None:
        now = time.monotonic()
        if now - self.last < self.every:
            return
        self.last = now
        gc.collect()
        give_back()
        with open("/proc/self/statm", encoding="ascii") as file:
            host = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
        held = used = 0.0
        if support.DEVICE == "cuda":
            free, total = torch.cuda.mem_get_info()
            held, used = torch.cuda.memory_allocated() / 2**20, (total - free) / 2**20
        self.samples.append(((now - self.began) / 60, host, held, used))

    def later(self) -> list[tuple[float, float, float, float]]:
        """Without the first pass over the shapes, in which caches fill."""
        return [x for x in self.samples if x[0] >= self.known]

    def slope(self, column: int) -> float:
        """MiB a minute of a straight line through the samples; 0.0 if there are too few."""
        later = self.later()
        if len(later) < 10:
            return 0.0
        return statistics.linear_regression([x[0] for x in later], [x[column] for x in later]).slope

    def at_quarters(self, column: int) -> list[float]:
        """At the start and after each quarter of the time."""
        end = self.samples[-1][0] if self.samples else 0.0
        return [next(x[column] for x in self.samples if x[0] >= end * n / 4) for n in range(5) if self.samples]

    def figures(self) -> dict[str, Any]:
        """GPU memory of all processes is no verdict: other sections may run beside this one."""
        return {
            "samples_of_memory": len(self.samples),
            "minutes_until_all_shapes_were_seen": round(self.known, 2) if self.known < math.inf else "never",
            "host_MiB_per_minute": round(self.slope(1), 3),
            "torch_MiB_per_minute": round(self.slope(2), 3),
            "GPU_MiB_per_minute_of_all_processes": round(self.slope(3), 3),
            "host_MiB_at_the_quarters": " ".join(f"{x:.0f}" for x in self.at_quarters(1)),
        }

    def problems(self) -> list[str]:
        found = []
        long_enough = bool(self.samples) and self.samples[-1][0] >= 2
        if long_enough and self.samples[-1][0] < 2 * self.known:
            found.append(f"the {ROUNDS} rounds of shapes did not come twice, so that growth of memory is not known")
        for name, column, most in (("the host", 1, HOST_GROWTH), ("torch on the GPU", 2, DEVICE_GROWTH)):
            if long_enough and self.slope(column) > most:
                found.append(f"memory of {name} grows by {self.slope(column):.2f} MiB a minute, allowed {most}")
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
