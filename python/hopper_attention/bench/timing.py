"""GPU time by CUDA graph replays, the implementations in turn; the ceilings of the card. Needs torch and a GPU."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

SLICE_US = 2000.0  # one replay: long enough that launching the graph does not count
LONG_US = 100e3  # one pass: so long that what a first replay costs more does not count
FEWEST_ROUNDS, MOST_ROUNDS = 3, 40


@dataclass
class Measured:
    """samples: us per call in each round, for each name; failures: who could not be captured, and why; last: what the
    last call of the replays returned, as the last replay left it.
    """

    samples: dict[str, list[float]] = field(default_factory=dict)
    failures: dict[str, Exception] = field(default_factory=dict)
    last: dict[str, Any] = field(default_factory=dict)


class Replay:
    """A CUDA graph that makes each of `calls` `repeat` times, in order. last: what the last one returned."""

    def __init__(self, calls: list[Callable[[], Any]], repeat: int = 1) -> None:
        import torch

        self.count = len(calls) * repeat
        self.graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph):
            for _ in range(repeat):
                for call in calls:
                    self.last = call()

    def start(self) -> Callable[[], float]:
        """Queues one replay; the function that is returned gives us per call, after a synchronisation."""
        import torch

        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self.graph.replay()
        end.record()
        return lambda: begin.elapsed_time(end) * 1000 / self.count

    def time(self) -> float:
        import torch

        read = self.start()
        torch.cuda.synchronize()
        return read()


def repeats_for(us_per_pass: float, slice_us: float = SLICE_US) -> int:
    """How often a pass over all input sets is made in one replay."""
    return max(1, math.ceil(slice_us / max(us_per_pass, 1e-3)))


def rounds_for(us_per_round: float, seconds: float) -> int:
    """How many rounds fit into the GPU time of a case."""
    return max(FEWEST_ROUNDS, min(MOST_ROUNDS, int(seconds * 1e6 / max(us_per_round, 1e-3))))


def rotated(names: list[str], turn: int) -> list[str]:
    """The order of round `turn`: everyone starts once, and follows another neighbour in every second cycle."""
    order = names if turn // max(1, len(names)) % 2 == 0 else names[::-1]
    start = turn % max(1, len(names))
    return order[start:] + order[:start]


def fill_with_nan(returned: Any) -> None:
    """All tensors that a call returned, so that what a replay does not write is found."""
    import torch

    for x in returned if isinstance(returned, (tuple, list)) else (returned,):
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            x.fill_(torch.nan)


def measure(calls: Mapping[str, list[Callable[[], Any]]], seconds: float, fill: bool = False) -> Measured:
    """Everyone in turn. The calls have been made once before; the first round does not count. fill: slices of short
    calls grow until MOST_ROUNDS rounds take all of the time.
    """
    import torch

    slice_us = max(SLICE_US, seconds * 1e6 / (MOST_ROUNDS * max(1, len(calls)))) if fill else SLICE_US
    found = Measured()
    replays: dict[str, Replay] = {}
    round_us = 0.0
    for name, one_each in calls.items():
        try:
            replay = Replay(one_each)
            per_call = replay.time()
            if per_call * replay.count < LONG_US:
                per_call = replay.time()
            repeat = repeats_for(per_call * replay.count, slice_us)
            replays[name] = Replay(one_each, repeat) if repeat > 1 else replay
            fill_with_nan(replays[name].last)
        except Exception as error:  # a peer that cannot be captured must not end the run
            found.failures[name] = error
            continue
        round_us += per_call * replays[name].count
        found.samples[name] = []
    reads = []
    for turn in range(rounds_for(round_us, seconds) + 1 if replays else 0):
        started = {name: replays[name].start() for name in rotated(list(replays), turn)}
        reads += started.items() if turn else ()
    torch.cuda.synchronize()  # once: between rounds the GPU would wait for the next launch, on someone's time
    for name, read in reads:
        found.samples[name].append(read())
    found.last = {name: replay.last for name, replay in replays.items()}
    return found


def spread(samples: list[float]) -> float:
    """Distance of the quartiles, relative to the median."""
    if len(samples) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return (high - low) / middle


def ceilings(quick: bool = False) -> dict[str, float]:
    """What the card can do in this run: matmul_tflops (bf16, 8192^3), read_gbs (int64 sum of 4 GiB), copy_gbs (2 GiB
    read and written). Medians; random inputs.
    """
    import torch

    found = {"matmul_tflops": matmul_tflops(8192, quick), **memory_gbs(2**29, quick)}
    torch.cuda.empty_cache()
    return found


def matmul_tflops(n: int, quick: bool) -> float:
    """bf16, n x n x n."""
    import torch

    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(a)
    return 2 * n**3 / median_us(lambda: torch.matmul(a, b, out=product), 10, quick) / 1e6


def memory_gbs(elements: int, quick: bool) -> dict[str, float]:
    """read_gbs by the sum of so many int64, copy_gbs by a copy of half of them, both directions counted."""
    import torch

    source = torch.randint(-(2**62), 2**62, (elements,), device="cuda", dtype=torch.int64)
    half = source[: elements // 2]
    target = torch.empty_like(half)
    read = median_us(lambda: torch.sum(source), 3, quick)
    # Not copy_(): beyond 256 MiB cudaMemcpy reached 2.7 TB/s of the 4.2 that a kernel reaches on an H200.
    copy = median_us(lambda: torch.bitwise_not(half, out=target), 3, quick)
    return {"read_gbs": source.nbytes / read / 1e3, "copy_gbs": 2 * half.nbytes / copy / 1e3}


def median_us(call: Callable[[], Any], calls: int, quick: bool) -> float:
    """Median us of one call."""
    call()
    replay = Replay([call], calls)
    replay.time()
    return statistics.median(replay.time() for _ in range(5 if quick else 15))
