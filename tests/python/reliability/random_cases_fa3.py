"""The library of FlashAttention-3 on those of the random calls that it can run, beside ours: counts and worst values.

What fails there is no failure of ours; only `random_cases` judges us. Needs --fa3 and --fa3-py.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from gpu import batches, support
from gpu.batches import Batch, Made
from gpu.support import Case
from hopper_attention.testing import gates
from reliability.harness import Budget, result
from reliability.random_cases import BOUNDS, KINDS, batch_of, dense_case, seed_of, values_of

TITLE = "FlashAttention-3 on those of the random calls that it can run"
NEEDS = "gpu"
COUNT = 5000
SECONDS = 150
PARTS = 2


def load(library: str, module: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("fa3", module)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    found.load(library)
    return found


def can_run(given: Case | Batch) -> bool:
    """No chunks, no context parallelism, no padding on the left, no rows of a cache by index; sinks in bf16.

    Head dims are all tried: those that its build lacks it refuses itself, which is counted.
    """
    if given.chunk or given.sinks not in ("", "bf16"):
        return False
    if isinstance(given, Case):
        return True
    fits = given.call == "varlen" and given.cp_world == 1 and not given.extra_q and not given.extra_k
    return fits and max(given.q_lengths, default=0) > 0


def window_of(given: Case | Batch) -> dict[str, Any]:
    """Causal with a left window is a window that ends at the diagonal."""
    left, right = given.window
    if given.causal and left < 0:
        return {"causal": True}
    return {"causal": False, "window": (left, 0 if given.causal else right)}


def options_of(given: Case | Batch, sinks: torch.Tensor | None) -> dict[str, Any]:
    scale = given.head_dim**-0.5 if given.scale is None else given.scale
    return {"softmax_scale": scale, "softcap": given.softcap, "sinks": sinks, "num_splits": 0, **window_of(given)}


def dense(fa3: ModuleType, case: Case, tensors: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) as flash_attn_func returns them."""
    q, k, v = (tensors[name] for name in "qkv")
    starts = [
        torch.arange(case.batch + 1, device=q.device, dtype=torch.int32) * n for n in (case.seqlen_q, case.seqlen_k)
    ]
    out, lse = fa3.forward(
        q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), cu_seqlens_q=starts[0], cu_seqlens_k=starts[1],
        max_seqlen_q=case.seqlen_q, max_seqlen_k=case.seqlen_k, **options_of(case, tensors["s_aux"]),
    )  # fmt: skip
    return out.unflatten(0, q.shape[:2]), lse.unflatten(1, q.shape[:2]).transpose(0, 1)


def packed(fa3: ModuleType, made: Made) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) as flash_attn_varlen_func returns them; rows of no sequence are not looked at."""
    given = made.lengths
    starts_k = given.get("cu_seqlens_k")
    out, lse = fa3.forward(
        made.q, made.k, made.v, cu_seqlens_q=given["cu_seqlens_q"], cu_seqlens_k=starts_k,
        seqused_k=given.get("seqused_k"), page_table=given.get("page_table"), max_seqlen_q=max(made.batch.q_lengths),
        max_seqlen_k=max(1, *made.batch.k_lengths), **options_of(made.batch, made.s_aux),
    )  # fmt: skip
    clean_out, clean_lse = batches.new_results(made)
    rows = batches.rows_that_count(made)
    clean_out[rows], clean_lse[:, rows] = out[rows], lse[:, rows]
    return clean_out, clean_lse


class Tally:
    """How many of one library's results pass, and the worst values of those that do."""

    def __init__(self) -> None:
        self.failed = 0
        self.worst = dict.fromkeys(BOUNDS, 0.0)

    def add(self, found: gates.GateResult, judges_rms: bool) -> None:
        if not found:
            self.failed += 1
            return
        for gate, value in values_of(found).items():
            if gate != "rms" or judges_rms:
                self.worst[gate] = max(self.worst[gate], value)


def calls_of(number: int, seed: int, fa3: ModuleType) -> tuple[Callable, Callable, Callable] | None:
    """Ours, theirs, and what judges a result as (gates, whether there are enough rows for the RMS gate)."""
    kind, seed = KINDS[number % len(KINDS)], seed_of(number, seed)
    if kind == "dense":
        case = dense_case(seed)
        if not can_run(case):
            return None
        tensors = support.make_inputs(case)
        return (lambda: support.attend(case, tensors), lambda: dense(fa3, case, tensors),
                lambda results: (support.verdict(case, tensors, *results), True))  # fmt: skip
    if kind == "lengths":
        batch = batch_of(seed)
        if not can_run(batch):
            return None
        made = batches.make(batch)

        def judge(results: tuple[torch.Tensor, torch.Tensor]) -> tuple[gates.GateResult, bool]:
            judged = batches.verdict(made, *results)
            return judged.result, judged.rows >= support.ROWS_FOR_RMS

        return lambda: batches.attend(made), lambda: packed(fa3, made), judge
    return None


def run(budget: Budget) -> dict:
    if budget.options.get("fa3") is None:
        raise RuntimeError("random_cases_fa3: needs --fa3 and --fa3-py")
    fa3 = load(budget.options["fa3"], budget.options["fa3_py"])
    tallies, cases, left_out, refused, lost = {"ours": Tally(), "FA3": Tally()}, 0, 0, 0, ""
    for number in budget.numbers():
        calls = calls_of(number, budget.seed, fa3)
        if calls is None:
            left_out += 1
            continue
        mine, theirs, judge = calls
        try:
            results = theirs()
            judged = judge(results)  # waits for the GPU
        except Exception as error:
            refused += 1
            if "CUDA error" in str(error):
                lost = f"FA3 lost the CUDA context at call {number}: {str(error).splitlines()[0]}"
                break
            continue
        cases += 1
        tallies["FA3"].add(*judged)
        tallies["ours"].add(*judge(mine()))
    figures: dict[str, Any] = {}
    for name, tally in tallies.items():
        figures[f"{name}: calls that fail"] = tally.failed
        figures.update({f"worst {gate} of {name}": value for gate, value in tally.worst.items() if value < math.inf})
    figures["FA3: calls that it refuses"] = refused
    figures["calls of what it does not have"] = left_out
    if lost:
        figures["note"] = lost
    return {**result(cases, [], **figures), "count": cases}
