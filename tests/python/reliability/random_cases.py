"""Random calls of every function with every feature against float64: 5,000 that nobody thought of, worst values shown."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import torch

from gpu import appended, batches, support, test_combine
from gpu.test_random import random_case
from gpu.test_random_batches import random_batch
from hopper_attention import flash_attn_combine, merge_states
from hopper_attention.testing import gates
from reliability.harness import Budget, Failures, result

TITLE = "Random calls of all functions with all features against float64"
NEEDS = "gpu"
COUNT = 5000
SECONDS = 400
PARTS = 4

# Of ten calls: dense, varlen or paged or cache, a cache that is appended to, results that are merged.
KINDS = ("dense",) * 4 + ("lengths",) * 4 + ("append", "combine")
PARTIALS = (1, 2, 2, 3, 4, 5, 8, 9, 17, 61, 132, 256)
COLUMNS = (8, 32, 40, 64, 72, 96, 128, 192, 256, 512)
SEEDS = 1_000_003  # away from those of the tests, which begin at 0
BOUNDS = {"elementwise": gates.ELEMENTWISE_BOUND, "rms": gates.RMS_BOUND, "lse": 1.0}


@dataclasses.dataclass
class Found:
    """Of one call: the values of the gates and of the merge, what is wrong, "" if nothing is, what the call was given."""

    gates: dict[str, float]
    merge: float = 0.0
    problem: str = ""
    sm_margin: int = 0
    with_lse: bool = True


def seed_of(number: int, seed: int) -> int:
    return SEEDS * (seed + 1) + number


def small() -> bool:
    """Whether calls are small ones, since the reference computes them."""
    return support.DEVICE == "cpu"


def dense_case(seed: int) -> support.Case:
    case = random_case(seed)
    if small():
        lengths = {"seqlen_q": min(case.seqlen_q, 70), "seqlen_k": min(case.seqlen_k, 90), "batch": 1}
        case = dataclasses.replace(case, **lengths, heads_q=case.heads_k * min(2, case.heads_q // case.heads_k))
    return case


def batch_of(seed: int, call: str = "") -> batches.Batch:
    """A random batch; with `call` the next one of that call that is not too large to append to."""
    budgets = (1 << 14, 1 << 14) if small() else ()
    while True:
        batch = random_batch(seed, *budgets)
        if not call or (batch.call == call and 0 < batch.size <= appended.MOST_SEQUENCES):
            return batch
        seed += 7 * 5000


def values_of(found: gates.GateResult) -> dict[str, float]:
    return {"elementwise": found.elementwise, "rms": found.rms_ratio, "lse": found.lse_ratio or 0.0}


def drawn(seed: int) -> dict[str, Any]:
    """What the random cases leave out: SMs that stay free, and calls that return no LSE."""
    r = random.Random(-1 - seed)
    return {"sm_margin": r.choice((0, 0, 0, 1, 40, 1000)), "with_lse": r.random() < 0.8}


def judge_dense(seed: int, pool: batches.Pool) -> Found:
    case, extra = dense_case(seed), drawn(seed)
    tensors = support.make_inputs(case)
    results = support.attend(case, tensors, sm_margin=extra["sm_margin"], return_attn_probs=extra["with_lse"])
    out, lse = results if extra["with_lse"] else (results, None)
    found = support.verdict(case, tensors, out, lse)
    return Found(values_of(found), problem="" if found or small_rows(found, case) else found.message, **extra)


def small_rows(found: gates.GateResult, case: support.Case) -> bool:
    """Whether only the RMS gate fails, and that of the few rows of a case made small."""
    return small() and found.elementwise <= gates.ELEMENTWISE_BOUND and (found.lse_ratio or 0.0) <= 1.0


def judge_lengths(seed: int, pool: batches.Pool) -> Found:
    batch, extra = batch_of(seed), drawn(seed)
    if batch.metadata:
        extra["sm_margin"] = 0  # schedules are made without
    made = batches.make(batch)
    out, lse = batches.attend(made, with_lse=extra["with_lse"], sm_margin=extra["sm_margin"])
    if not extra["with_lse"]:
        if bool((lse != batches.LSE_POISON).any()):
            return Found({}, problem=f"an LSE was written that the call was not given\n{batch.line()}", **extra)
        lse = batches.attend(made)[1]  # the gates want one
    found = of_judged(batches.verdict(made, out, lse), pool)
    return dataclasses.replace(found, **extra)


def judge_append(seed: int, pool: batches.Pool) -> Found:
    r = random.Random(seed)
    call = appended.append(batch_of(seed, "cache"), seed, r.choice(("", "interleaved", "halves")), r.random() < 0.5)
    judged, problem = appended.judge(call)
    found = of_judged(judged, pool)
    return dataclasses.replace(found, problem=problem or found.problem)


def of_judged(judged: batches.Judged, pool: batches.Pool) -> Found:
    pool.add(judged)
    values = values_of(judged.result)
    if judged.rows < support.ROWS_FOR_RMS:
        del values["rms"]  # of few rows it says nothing
    return Found(values, problem="" if judged.result else judged.result.message)


def judge_combine(seed: int, pool: batches.Pool) -> Found:
    """flash_attn_combine of float32 parts or merge_states of two, by the bounds of test_combine.py."""
    r = random.Random(seed)
    merges = r.random() < 0.4
    parts = 2 if merges else r.choice(PARTIALS)
    case = test_combine.Case(
        f"random {seed}", parts, batch=r.randint(1, 4), queries=r.choice((1, 1, 2, r.randint(1, 300))),
        heads=r.randint(1, 16), columns=r.choice(COLUMNS), level=r.choice((0.0, 0.0, r.uniform(-3000, 3000))),
        spread=r.choice((0.1, 3.0, 3.0, 40.0)), keys=r.choice(("all", "all", "some", "some", "first", "last", "none")),
    )  # fmt: skip
    dtype = support.DTYPES[r.choice(("bf16", "fp16", "fp32"))]
    if merges:
        tensors = test_combine.halves(case, dtype, seed)
        out, lse = merge_states(*tensors)
        lse = lse.transpose(-1, -2)
        partial, logs = torch.stack(tensors[::2]), torch.stack(tensors[1::2]).transpose(-1, -2)
    else:
        partial, logs = test_combine.make_parts(case, seed=seed)
        out, lse = flash_attn_combine(partial, logs, out_dtype=dtype)
    want, want_lse, size = test_combine.expected(partial, logs)
    allowed = test_combine.ROUNDING[out.dtype] * 1.01 * want.abs() + test_combine.SUMS * size + 1e-7
    seen = want_lse > -math.inf
    error = (lse.double() - want_lse)[seen].abs() / (2e-6 + 3e-7 * want_lse[seen].abs())
    worst = torch.cat([((out.double() - want).abs() / allowed).flatten(), error]).nan_to_num(nan=math.inf)
    value = float(worst.max()) if len(worst) else 0.0
    right = value <= 1.0 and torch.equal(lse == -math.inf, ~seen)
    return Found({}, value, "" if right else f"{case}, {dtype}: {value:.3g} of its bound, or another pattern of -inf")


JUDGES = {"dense": judge_dense, "lengths": judge_lengths, "append": judge_append, "combine": judge_combine}


def judge(number: int, seed: int, pool: batches.Pool) -> Found:
    """The call of a number."""
    return JUDGES[KINDS[number % len(KINDS)]](seed_of(number, seed), pool)


def again(number: int, seed: int = 0, device: str = "cuda") -> Found:
    """One call once more, as the texts of failures say."""
    support.DEVICE = device
    return judge(number, seed, batches.Pool())


def line(number: int, seed: int) -> str:
    code = f"from reliability.random_cases import again; print(again({number}, {seed}, {support.DEVICE!r}))"
    return f'PYTHONPATH="tests/python:$PYTHONPATH" python -c "{code}"'


def run(budget: Budget) -> dict:
    failures, cases, pool = Failures(), 0, batches.Pool()
    worst = {**{f"worst {gate} (bound {bound:g})": 0.0 for gate, bound in BOUNDS.items()},
             "worst merge (bound 1)": 0.0}  # fmt: skip
    kinds = dict.fromkeys(JUDGES, 0)
    without_lse = with_margin = 0
    for number in budget.numbers():
        cases += 1
        kinds[KINDS[number % len(KINDS)]] += 1
        try:
            found = judge(number, budget.seed, pool)
        except Exception as error:
            failures.add(f"{line(number, budget.seed)}\n{type(error).__name__}: {error}")
            if "CUDA error" in str(error) or "illegal" in str(error):
                break  # nothing else will run in this process
            continue
        without_lse += not found.with_lse
        with_margin += found.sm_margin > 0
        values = [found.gates.get(gate, 0.0) for gate in BOUNDS] + [found.merge]
        for name, value in zip(worst, values, strict=True):
            worst[name] = max(worst[name], value)
        if found.problem:
            failures.add(f"{line(number, budget.seed)}\n{found.problem}")
    if pool.problem() and not small():
        failures.add(pool.problem())
    counts = {f"{kind} calls": count for kind, count in kinds.items()}
    return result(
        cases, failures, **worst, **counts, calls_without_an_LSE=without_lse, calls_with_an_sm_margin=with_margin
    )
