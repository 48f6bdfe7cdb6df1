"""The gates bite: seeded defects must be rejected, and the same without a defect must pass.

Emulated on the CPU (tests/python/test_gates.py); on a GPU also those made from real kernels with one thing wrong
(tests/python/gpu/test_defects.py). A case is a defect; each is tried in every call that it changes.
"""

from __future__ import annotations

import torch

import test_gates
from gpu import support, test_defects
from hopper_attention.testing import gates
from reliability.harness import Budget, Failures, result

TITLE = "Seeded defects that the gates must reject"
NEEDS = "nothing"
EMULATED = tuple(test_gates.DEFECTS)
FROM_KERNELS = tuple(defect.__name__ for defect in test_defects.DEFECTS)
COUNT = len(EMULATED)
SECONDS = 120
PARTS = 2


def emulated(name: str) -> tuple[int, list[str]]:
    """(verdicts, what went wrong) of a defect of the emulated kernel."""
    defect, verdicts, problems = test_gates.DEFECTS[name], 0, []
    for case in test_gates.CASES:
        if not test_gates.applies(defect, case):
            continue
        q, k, v = test_gates.inputs(case)
        for seeded in (None, defect):
            found = gates.check(*test_gates.emulate(q, k, v, defect=seeded, **case.options), q, k, v, **case.options)
            verdicts += 1
            if bool(found) == bool(seeded):
                problems.append(f"{name}, {case.why}, {'with' if seeded else 'without'} the defect: {found.message}")
    return verdicts, problems if verdicts else [f"{name}: changes nothing in any call"]


def from_kernels(name: str) -> tuple[int, list[str]]:
    """The same for a defect made from results of the GPU."""
    defect, verdicts, problems = getattr(test_defects, name), 0, []
    for case in map(support.main_dims, test_defects.CASES):
        tensors = support.make_inputs(case)
        wrong = defect(case, tensors)
        if wrong is None:
            continue
        for results, seeded in ((support.attend(case, tensors), False), (wrong, True)):
            found = support.verdict(case, tensors, *results)
            verdicts += 1
            if bool(found) == seeded:
                problems.append(f"{name}, {case.why}, {'with' if seeded else 'without'} the defect: {found.message}")
    return verdicts, problems if verdicts else [f"{name}: changes nothing in any call"]


def run(budget: Budget) -> dict:
    failures, cases, verdicts = Failures(), 0, 0
    on_gpu = torch.cuda.is_available() and support.DEVICE == "cuda"
    names = [*EMULATED, *(FROM_KERNELS if on_gpu else ())]
    kinds = {"in an emulated kernel": 0, **({"in results of the GPU": 0} if on_gpu else {})}
    for number in budget.numbers(len(names)):
        cases += 1
        judge, kind = (emulated, 0) if number < len(EMULATED) else (from_kernels, 1)
        kinds[list(kinds)[kind]] += 1
        count, problems = judge(names[number])
        verdicts += count
        for text in problems:
            failures.add(text)
    mine = range(budget.part, len(names), budget.parts)
    return {**result(cases, failures, verdicts=verdicts, **kinds), "count": len(mine)}
