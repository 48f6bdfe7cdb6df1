"""Every pair of values of all features in some call, many times over with other lengths and other values within them."""

from __future__ import annotations

from gpu import batches, support, test_pairs
from hopper_attention.features import NOT_TOGETHER, all_pairs, covering_rows, pairs_of
from reliability.harness import Budget, Failures, merged, result

TITLE = "Every pair of values of all features against float64"
NEEDS = "gpu"
COUNT = 800
SECONDS = 150
PARTS = 2

ROUNDS = 20  # of covering rows, each another set
MOST_NAMED = 5  # of the pairs that are missing


def rows_of(seed: int) -> list[dict[str, str]]:
    return [row for i in range(ROUNDS) for row in covering_rows(ROUNDS * seed + i)]


def run(budget: Budget) -> dict:
    failures, pool, cases = Failures(), batches.Pool(), 0
    support.WORST = support.Worst()
    rows = rows_of(budget.seed)
    index = {pair: i for i, pair in enumerate(all_pairs())}
    seen: set[int] = set()
    for number in budget.numbers(min(budget.count, len(rows))):
        row, seed = rows[number], 7919 * (budget.seed + 1) + number
        if not test_pairs.can_run(test_pairs.call_of(row, seed).batch):
            continue  # not in this build
        problem = test_pairs.problem_of(number, row, seed, pool)
        if problem:
            failures.add(problem)
            if "CUDA error" in problem:
                break
        else:
            seen |= {index[pair] for pair in pairs_of(row)}
        cases += 1
    if pool.problem() and support.DEVICE == "cuda":
        failures.add(pool.problem())
    found = result(cases, failures, **{f"worst {gate}": value for gate, value in support.WORST.values.items()})
    asked = {index[pair] for row in rows[: budget.count] for pair in pairs_of(row)}
    return {**found, "seen": sorted(seen), "asked": sorted(asked)}


def merge(results: list[dict]) -> dict:
    """With the pairs of all parts; those that no part saw are unfinished."""
    seen, asked = (set().union(*(part.get(name, ()) for part in results)) for name in ("seen", "asked"))
    found = merged(results)
    pairs = all_pairs()
    found["unfinished"] += [f"no right call with {dict(pairs[i])}" for i in sorted(asked - seen)[:MOST_NAMED]]
    found["figures"] = {
        "pairs that work": f"{len(seen):,} of {len(pairs) - len(NOT_TOGETHER):,}",
        "pairs that contradict each other": len(NOT_TOGETHER),
        **found["figures"],
    }
    return found
