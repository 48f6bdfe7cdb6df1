"""Fault injection: the list of tests/python/wrong_calls.py on a GPU, in processes that must survive it.

After each wrong call results and inputs are looked at, and the right call must give the bits it gave before.
"""

from __future__ import annotations

import wrong_calls
from gpu import support
from reliability.harness import Budget, Failures, result

TITLE = "Wrong calls of all public functions"
NEEDS = "gpu"
COUNT = len(wrong_calls.every())
SECONDS = 90
PARTS = 4
SILENCE = 60


def run(budget: Budget) -> dict:
    world, failures, cases = wrong_calls.TorchWorld(support.DEVICE), Failures(), 0
    calls = [wrong for wrong in wrong_calls.every() if world.can(wrong)]
    count = min(budget.count, len(calls))
    for number in budget.numbers(count):
        wrong = calls[number]
        cases += 1
        try:
            problem = wrong_calls.problem_of(world, wrong)
        except Exception as error:
            problem = f"{wrong.function}, {wrong.why}: afterwards {type(error).__name__}: {error}"
        if problem:
            failures.add(problem)
            if "CUDA error" in problem:
                break
    functions = {function.__name__ for function in wrong_calls.FUNCTIONS.values()}
    mine = range(budget.part, count, budget.parts)
    fp8 = sum("fp8" in calls[number].why for number in mine)
    return {**result(cases, failures, of=f"{len(functions)} functions", with_fp8=fp8), "count": len(mine)}
