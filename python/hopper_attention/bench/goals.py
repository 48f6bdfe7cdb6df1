"""Whether a report reaches its goals: those of single cases, of means over cases, of small kernels and of host times."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from hopper_attention.bench import record, suites
from hopper_attention.bench.record import OURS, geometric_mean

SHORT = (512, 1024)
SCALING_GOALS = {4096: 1.12, 65536: 1.03, 262144: 1.03}  # time of a visible pair, over that of 16k


@dataclass(frozen=True)
class Verdict:
    """What was found, beside its bound: at least that (ratios of speed) or at most (times)."""

    what: str
    found: float
    bound: float
    at_least: bool = True

    @property
    def reached(self) -> bool:
        return self.found >= self.bound if self.at_least else self.found <= self.bound

    def __str__(self) -> str:
        return f"{self.what} {self.found:.4g} ({'at least' if self.at_least else 'at most'} {self.bound:.4g})"


@dataclass(frozen=True)
class Mean:
    """A geometric mean of our speed over the best known. It is judged if all of its `count` cases have a figure; a bound
    of 0 is no goal.
    """

    suite: str
    label: str
    count: int
    bound: float
    has: Callable[[dict[str, Any]], bool]

    def ratios(self, entries: Iterable[dict[str, Any]]) -> dict[str, float | None]:
        return {e["case"]["name"]: record.over_best(e) for e in entries if self.has(e)}


def is_short_decode(entry: dict[str, Any]) -> bool:
    """Whether a case is of the table of short contexts and few heads, which has a goal of its own over its mean."""
    return entry["case"]["suite"] == "decode" and record.goal(entry, "goal_best") == 1.0


MEANS = (
    Mean("prefill", "x best known", 36, 1.0, lambda entry: True),
    Mean("prefill", "x best known, 512 and 1k", 12, 1.05, lambda entry: entry["case"]["seqlen_q"] in SHORT),
    Mean("decode", "x best known", 0, 0.0, lambda entry: True),
    Mean("decode", "x best known, short contexts and few heads", 21, 1.15, is_short_decode),
)


def of_case(report: dict[str, Any], entry: dict[str, Any]) -> list[Verdict]:
    """Those of one case that can be judged: what they compare was measured."""
    name = entry["case"]["name"]
    us = record.time_us(entry)
    candidates = [
        ("goal", "x fa3", record.speedup(entry, "fa3"), True),
        ("goal_best", "x best known", record.over_best(entry), True),
        ("goal_read", "of the read rate", record.fraction(report, entry), True),
        ("goal_us", "us", us, False),
        ("goal_over_us", "us over the floor", record.over_floor(report, entry), False),
    ]
    found = [
        Verdict(f"{name}: {label}", value, record.goal(entry, field), at_least)
        for field, label, value, at_least in candidates
        if record.goal(entry, field) and value is not None
    ]
    for within in entry["case"].get("within", ()):
        ours, other = (record.time_us(entry, within[which]) for which in ("name", "of"))
        if ours and other:
            bound = within["factor"] + within["us"] / other
            found.append(Verdict(f"{name}: time of {within['name']} over {within['of']}", ours / other, bound, False))
    return found


def of_scaling(entries: list[dict[str, Any]]) -> list[Verdict]:
    """Time for each visible pair, relative to 16k."""

    def per_pair(entry: dict[str, Any]) -> float | None:
        us = record.time_us(entry)
        return us / entry["flops"] if us else None

    base = next((per_pair(e) for e in entries if e["case"]["seqlen_q"] == 16384), None)
    found = [(entry["case"], per_pair(entry)) for entry in entries]
    return [
        Verdict(f"{case['name']}: time for each visible pair, over 16k", pair / base, bound, False)
        for case, pair in found
        if base and pair and (bound := SCALING_GOALS.get(case["seqlen_q"]))
    ]


def of_suite(report: dict[str, Any], suite: str, entries: list[dict[str, Any]]) -> list[Verdict]:
    """All of a suite: of its cases, then of what they have in common."""
    found = [verdict for entry in entries for verdict in of_case(report, entry)]
    for mean in MEANS:
        known = [ratio for ratio in mean.ratios(entries).values() if ratio is not None] if mean.suite == suite else []
        if mean.bound and len(known) == mean.count:
            found.append(Verdict(f"{mean.label}: geometric mean", geometric_mean(known) or 0.0, mean.bound))
    return found + (of_scaling(entries) if suite == "scaling" else [])


def of_kernels(rows: list[dict[str, Any]]) -> list[Verdict]:
    """Of the small kernels; fields without a figure hold "-"."""
    pairs = (("us", "goal us", False), ("of copy", "goal of copy", True))
    return [
        Verdict(f"{row['case']}: {found}", row[found], row[goal], at_least)
        for row in rows
        for found, goal, at_least in pairs
        if isinstance(row.get(found), float) and isinstance(row.get(goal), float)
    ]


def of_host(rows: list[dict[str, Any]]) -> list[Verdict]:
    """Of host times: limits are in times of torch.add."""
    return [
        Verdict(f"host, {row['case']}: x torch.add", row["x torch.add"], row["limit"], False)
        for row in rows
        if row["implementation"] == OURS and isinstance(row["limit"], float) and isinstance(row["x torch.add"], float)
    ]


def with_todays(report: dict[str, Any]) -> dict[str, Any]:
    """The report with the goals that the suites have now, where it is older than they are."""
    names = ("goal", "goal_best", "goal_read", "goal_us", "goal_over_us", "within")
    now = {(case.suite, case.name): case.as_dict() for case in suites.select("all", None)}
    entries = []
    for entry in report["cases"]:
        case = entry["case"]
        known = now.get((case["suite"], case["name"]), case)
        todays = {name: known[name] for name in names if name in known}
        entries.append({**entry, "case": {**case, **todays}})
    return {**report, "cases": entries}


def of_report(report: dict[str, Any]) -> list[Verdict]:
    """All that a report says."""
    found = [v for suite, entries in record.by_suite(report).items() for v in of_suite(report, suite, entries)]
    return found + of_kernels(report.get("kernels", [])) + of_host(report.get("host", []))


def lines(verdicts: list[Verdict]) -> list[str]:
    """How many are reached, and those that are not."""
    if not verdicts:
        return []
    missed = [verdict for verdict in verdicts if not verdict.reached]
    count = f"goals reached: {len(verdicts) - len(missed)} of {len(verdicts)}"
    return [count, *(f"not reached: {verdict}" for verdict in missed)]
