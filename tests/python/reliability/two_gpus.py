"""Tensors on cuda:1 while cuda:0 is current: the bits of cuda:0, on the right stream, and cuda:0 is current afterwards."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from gpu import batches, support
from gpu.batches import Batch, Made
from gpu.support import Case
from gpu.test_random_batches import random_batch
from reliability._subjects import differences
from reliability.harness import Budget, Failures, result

TITLE = "Tensors on device 1 with current device 0; the current device stays"
NEEDS = "2 gpus"
COUNT = 200
SECONDS = 60
PARTS = 1

SLEEP_CYCLES = 10_000_000  # 5 ms
SMALL = 1 << 14


def run(budget: Budget) -> dict[str, Any]:
    failures, cases = Failures(), 0
    other = "cuda:1" if support.DEVICE == "cuda" else support.DEVICE
    for number in budget.numbers():
        cases += 1
        seed = budget.seed + number
        line = ""
        try:
            if number % 5 == 4 and support.MAIN:
                case = support.main_dims(Case("device 1", 100 + seed, 150, causal=bool(seed % 2), seed=seed))
                line = case.line()
                problem = case_problem(case, other)
            else:
                batch = random_batch(seed) if other == "cuda:1" else random_batch(seed, SMALL, SMALL)
                line = batch.line()
                problem = batch_problem(batch, other, number % 2 == 1)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if other == "cuda:1" and torch.cuda.current_device() != 0:
            problem += f" the current device became {torch.cuda.current_device()}"
            torch.cuda.set_device(0)
        if problem:
            failures.add(f"case {number}: {problem}\n{line}")
    problem = mixed_devices(other) if other == "cuda:1" else ""
    if problem:
        failures.add(problem)
    return result(cases, failures)


def moved(made: Made, device: str) -> Made:
    """All tensors of a batch on another device."""
    values = {f.name: getattr(made, f.name) for f in dataclasses.fields(made)}
    there = {name: x.to(device, copy=True) for name, x in values.items() if isinstance(x, torch.Tensor)}
    lengths = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in made.lengths.items()}
    return dataclasses.replace(made, **there, lengths=lengths)


def batch_problem(batch: Batch, device: str, late: bool) -> str:
    """late: q arrives on a side stream of the other device after the call was made there."""
    made = batches.make(batch)
    expected = batches.attend(made)
    far = moved(made, device)
    results = batches.new_results(far)
    if not late or device != "cuda:1":
        batches.attend(far, results)
    else:
        q = far.q
        far.q = torch.full_like(q, float("nan"))
        torch.cuda.synchronize(device)
        with torch.cuda.stream(torch.cuda.Stream(device)):
            torch.cuda._sleep(SLEEP_CYCLES)  # of the side stream, whose device is current here
            far.q.copy_(q)
            with torch.cuda.device(0):  # the current stream of device 1 remains the side stream
                batches.attend(far, results)
        torch.cuda.synchronize(device)
    differing = int(differences(tuple(x.to(made.q.device) for x in results), expected))
    return f"{differing} elements differ from device 0" if differing else ""


def case_problem(case: Case, device: str) -> str:
    tensors = support.make_inputs(case)
    expected = support.attend(case, tensors)
    found = support.attend(case, {name: None if x is None else x.to(device) for name, x in tensors.items()})
    differing = int(differences(tuple(x.to(expected[0].device) for x in found), expected))
    return f"{differing} elements differ from device 0" if differing else ""


def mixed_devices(device: str) -> str:
    """k on another device than q is refused by name."""
    case = support.main_dims(Case("two devices in a call", 100, 100))
    tensors = support.make_inputs(case)
    try:
        support.attend(case, {**tensors, "k": tensors["k"].to(device)})
    except ValueError as error:
        return "" if str(error).startswith("k: ") else f"k on {device}: {error}"
    return f"k on {device}, q on cuda:0: no ValueError"
