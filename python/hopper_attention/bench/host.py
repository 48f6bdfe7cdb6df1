"""Host time of a call: how long Python is busy until the work is queued. One query on 128 keys, eager."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from hopper_attention.bench.peers import Implementation
from hopper_attention.bench.suites import Case

CASES = [
    Case("host", "dense", 1, 1, 128, 32, 8, 128, causal=False),
    Case("host", "varlen", 1, 1, 128, 32, 8, 128, causal=False, call="varlen"),
    Case("host", "cache, page 16", 1, 1, 128, 32, 8, 128, call="cache", page_size=16),
]
CALLS = 100  # between synchronisations: few enough that the queue to the GPU never fills
BATCHES = 60


def measure(implementations: list[Implementation], quick: bool = False) -> list[dict[str, Any]]:
    """Rows {"case", "implementation", "us", "remark"}; torch.add, the floor of a torch call, comes first."""
    import torch

    from hopper_attention.bench import inputs

    batches = BATCHES // 4 if quick else BATCHES
    rows = []
    with torch.inference_mode():
        x = torch.randn(1024, device="cuda")
        rows.append(row("any", "torch.add", time_calls([lambda: torch.add(x, x)], batches), ""))
        for case in CASES:
            sets = inputs.make(case, "cuda")[:1]
            for implementation in implementations:
                if implementation.refusal(case):
                    continue
                try:
                    calls = implementation.prepare(case, sets).calls
                    rows.append(row(case.name, implementation.name, time_calls(calls, batches), ""))
                except (NotImplementedError, RuntimeError) as error:
                    rows.append(row(case.name, implementation.name, None, str(error).splitlines()[0]))
    return rows


def row(case: str, implementation: str, us: float | None, remark: str) -> dict[str, Any]:
    return {"case": case, "implementation": implementation, "us": "-" if us is None else us, "remark": remark}


def time_calls(calls: list[Callable[[], Any]], batches: int, synchronize: Callable[[], None] | None = None) -> float:
    """Median over batches of the host's us for each call."""
    if synchronize is None:
        import torch

        synchronize = torch.cuda.synchronize
    found = []
    for _ in range(batches + 1):
        synchronize()
        start = time.perf_counter()
        for index in range(CALLS):
            calls[index % len(calls)]()
        found.append((time.perf_counter() - start) * 1e6 / CALLS)
    synchronize()
    return statistics.median(found[1:])
