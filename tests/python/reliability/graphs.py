"""CUDA graphs captured once and replayed with other lengths, pages and padding: bitwise what the eager calls give.

Before its capture each step is called behind a kernel that takes long: it must come back before that kernel is done,
with torch's own detection of synchronisations on, and torch must have allocated nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from gpu import support
from reliability._engine import Engine, Replayed, random_model, state_differs
from reliability._memory import synchronize
from reliability.harness import Budget, Failures, result

TITLE = "CUDA graphs replayed with other lengths, pages and padding: bits of eager calls, no sync, no allocation"
NEEDS = "gpu"
COUNT = 50
SECONDS = 150
PARTS = 2

REPLAYS = 100
SLEEP_CYCLES = 40_000_000  # 20 ms


def run(budget: Budget) -> dict[str, Any]:
    failures, unfinished, cases = Failures(), [], 0
    counts = {"replays": 0, "graphs_without_allocations": 0, "of_these_with_rotary": 0}
    for number in budget.numbers():
        cases += 1
        seed = budget.seed + number
        model = random_model(seed, 0 if support.DEVICE == "cuda" else 40)
        done = 0
        try:
            engine = Engine(model, seed)
            problems = quiet_problems(engine, seed)
            counts["graphs_without_allocations"] += not problems
            counts["of_these_with_rotary"] += model.rotary and not problems
            done, problem = replay(engine, seed, budget, cases)
            counts["replays"] += done
            problems += [problem] if problem else []
        except Exception as error:
            problems = [f"{type(error).__name__}: {error}"]
        for problem in problems:
            failures.add(f"graph {number}: {problem}\n{model}")
        if done < replays():
            unfinished.append(f"graph {number}: {done} of {replays()} replays")
    return {**result(cases, failures, **counts), "unfinished": unfinished}


def replays() -> int:
    return REPLAYS if support.DEVICE == "cuda" else 3


def quiet_problems(engine: Engine, seed: int) -> list[str]:
    """Synchronisations and allocations of a step."""
    engine.set(seed)
    engine.take_workspace()
    engine.clear()
    if support.DEVICE != "cuda":
        return []
    synchronize()
    problems = []
    mode = torch.cuda.get_sync_debug_mode()
    done = torch.cuda.Event()
    allocated = allocations()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(SLEEP_CYCLES)
        engine.step()
        done.record()
        waited = done.query()
    except RuntimeError as error:
        waited = False
        problems.append(f"the call synchronises: {error}")
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    made = allocations() - allocated
    synchronize()
    if waited:
        problems.append("the call came back only after the kernel before it")
    if made:
        problems.append(f"torch allocated {made} times, though everything was given")
    return problems


def allocations() -> int:
    return torch.cuda.memory_stats().get("allocation.all.allocated", 0)


def replay(engine: Engine, seed: int, budget: Budget, graphs: int) -> tuple[int, str]:
    """(replays, what was found), each replay with a step of its own."""
    wrong = torch.zeros(2, dtype=torch.int64, device=support.DEVICE)
    graph = Replayed(engine.step)
    done = 0
    while done < replays() and budget.left() > 0:
        step_seed = 1000 * seed + done
        engine.set(step_seed)
        graph.replay()
        replayed = engine.state()
        wrong[1] += engine.unwritten()
        engine.clear()
        engine.step()
        wrong[0] += state_differs(replayed, engine.state())
        done += 1
        budget.alive(graphs, budget.count, f"replay {done}")
    differing, unwritten = wrong.tolist()
    problems = [f"{differing} elements differ from eager calls"] if differing else []
    problems += [f"{unwritten} elements not written, or in rows of no sequence"] if unwritten else []
    return done, ", ".join(problems) + (f" in {done} replays" if problems else "")
