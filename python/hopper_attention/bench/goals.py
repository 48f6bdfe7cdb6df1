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
    """What was found, beside its bound: at least that (ratios of speed) or at most (times). Without a figure the goal is
    missed if ours was to be timed and was not (wrong, failed or skipped), and not judged if what it compares was not
    measured.
    """

    what: str
    found: float | None
    bound: float
    at_least: bool = True
    judged: bool = True

    @property
    def reached(self) -> bool:
        if self.found is None:
            return False
        return self.found >= self.bound if self.at_least else self.found <= self.bound

    @property
    def missed(self) -> bool:
        return self.judged and not self.reached

    def __str__(self) -> str:
        bound = format(self.bound, ".4g")
        found = "without a figure" if self.found is None else format(self.found, ".4g")
        if self.missed and found == bound:
            found = format(self.found, ".7g")
        return f"{self.what} {found}" + (
            f" ({'at least' if self.at_least else 'at most'} {bound})" if self.bound else ""
        )


def verdict(what: str, found: float | None, bound: float, at_least: bool, ours_failed: bool) -> Verdict:
    """ours_failed: what it means that there is no figure."""
    return Verdict(what, found, bound, at_least, found is not None or ours_failed)


@dataclass(frozen=True)
class Mean:
    """A geometric mean of our speed over the best known. It has a figure if all of its `count` cases have one; a bound of
    0 is no goal.
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


def is_absent(entry: dict[str, Any]) -> bool:
    """Whether the report does not have the case, see `with_todays`."""
    return entry["status"] == "absent"


def ours_failed(entry: dict[str, Any]) -> bool:
    """Whether the report has the case without a time of ours: it was wrong, failed or skipped."""
    return record.time_us(entry) is None and not is_absent(entry)


def of_case(report: dict[str, Any], entry: dict[str, Any]) -> list[Verdict]:
    """Those of one case."""
    name = entry["case"]["name"]
    candidates = [
        ("goal", "x fa3", record.speedup(entry, "fa3"), True),
        ("goal_best", "x best known", record.over_best(entry), True),
        ("goal_read", "of the read rate", record.fraction(report, entry), True),
        ("goal_us", "us", record.time_us(entry), False),
        ("goal_over_us", "us over the floor", record.over_floor(report, entry), False),
    ]
    found = [
        verdict(f"{name}: {label}", value, record.goal(entry, field), at_least, ours_failed(entry))
        for field, label, value, at_least in candidates
        if record.goal(entry, field)
    ]
    return found + [of_pair(entry, within) for within in entry["case"].get("within", ())]


def of_pair(entry: dict[str, Any], within: dict[str, Any]) -> Verdict:
    """That on the times of two of our implementations. A report in which one of them was not tried does not judge it."""
    names = within["name"], within["of"]
    ours, other = (record.time_us(entry, name) for name in names)
    tried = all(name in entry["results"] or name in entry["left_out"] for name in names)
    ratio = ours / other if ours and other else None
    bound = within["factor"] + (within["us"] / other if other else 0.0)
    what = f"{entry['case']['name']}: time of {names[0]} over {names[1]}"
    return verdict(what, ratio, bound, False, ours_failed(entry) or tried)


def of_scaling(entries: list[dict[str, Any]]) -> list[Verdict]:
    """Time for each visible pair, relative to 16k."""

    def per_pair(entry: dict[str, Any] | None) -> float | None:
        us = record.time_us(entry) if entry else None
        return us / entry["flops"] if entry and us else None

    base = next((e for e in entries if e["case"]["seqlen_q"] == 16384), None)
    found = []
    for entry in entries:
        bound = SCALING_GOALS.get(entry["case"]["seqlen_q"])
        if bound:
            pair, of = per_pair(entry), per_pair(base)
            failed = ours_failed(entry) or (base is not None and ours_failed(base))
            what = f"{entry['case']['name']}: time for each visible pair, over 16k"
            found.append(verdict(what, pair / of if pair and of else None, bound, False, failed))
    return found


def of_mean(mean: Mean, entries: list[dict[str, Any]]) -> Verdict:
    known = [ratio for ratio in mean.ratios(entries).values() if ratio is not None]
    found = geometric_mean(known) if len(known) == mean.count else None
    failed = any(mean.has(entry) and ours_failed(entry) for entry in entries)
    return verdict(f"{mean.label}: geometric mean", found, mean.bound, True, failed)


def of_suite(report: dict[str, Any], suite: str, entries: list[dict[str, Any]]) -> list[Verdict]:
    """All of a suite: of its cases, then of what they have in common."""
    entries = entries + [entry for entry in report.get("absent", []) if entry["case"]["suite"] == suite]
    found = [one for entry in entries for one in of_case(report, entry)]
    found += [of_mean(mean, entries) for mean in MEANS if mean.bound and mean.suite == suite]
    return found + (of_scaling(entries) if suite == "scaling" else [])


def number(value: Any) -> float | None:
    """A field of a row; without a figure it holds "-"."""
    return value if isinstance(value, float) else None


def of_kernels(rows: list[dict[str, Any]]) -> list[Verdict]:
    """Of the small kernels. A row without a time and a goal stands for kernels that were wrong, raised or were refused."""
    pairs = (("us", "goal us", False), ("of copy", "goal of copy", True))
    nowhere = [
        row for row in rows if not any(isinstance(row.get(name), float) for name in ("us", "goal us", "goal of copy"))
    ]
    return [Verdict(f"{row['case']}: us", None, 0.0, False) for row in nowhere] + [
        verdict(f"{row['case']}: {found}", number(row.get(found)), row[goal], at_least, number(row.get("us")) is None)
        for row in rows
        for found, goal, at_least in pairs
        if isinstance(row.get(goal), float)
    ]


def of_host(rows: list[dict[str, Any]]) -> list[Verdict]:
    """Of host times: limits are in times of torch.add."""
    return [
        verdict(f"host, {row['case']}: x torch.add", number(row["x torch.add"]), row["limit"], False, True)
        for row in rows
        if row["implementation"] == OURS and isinstance(row["limit"], float)
    ]


def with_todays(report: dict[str, Any]) -> dict[str, Any]:
    """The report with the goals that the suites have now, where it is older than they are. "absent" has entries without
    results for the cases that its suites have now and that it does not have.
    """
    names = ("goal", "goal_best", "goal_read", "goal_us", "goal_over_us", "within")
    now = {(case.suite, case.name): case.as_dict() for case in suites.select("all", None)}
    entries = []
    for entry in report["cases"]:
        case = entry["case"]
        known = now.get((case["suite"], case["name"]), case)
        todays = {name: known[name] for name in names if name in known}
        entries.append({**entry, "case": {**case, **todays}})
    there = {(entry["case"]["suite"], entry["case"]["name"]) for entry in entries}
    of_suites = {suite for suite, _ in there}
    absent = [
        {"case": case, "flops": 0, "kv_bytes": 0, "status": "absent", "reason": "", "results": {}, "left_out": {}}
        for key, case in now.items()
        if key[0] in of_suites and key not in there
    ]
    return {**report, "cases": entries, "absent": absent}


def of_report(report: dict[str, Any]) -> list[Verdict]:
    """All of a report."""
    found = [v for suite, entries in record.by_suite(report).items() for v in of_suite(report, suite, entries)]
    return found + of_kernels(report.get("kernels", [])) + of_host(report.get("host", []))


def count(verdicts: list[Verdict]) -> str:
    """How many of those that can be judged are reached, and how many cannot."""
    judged = [one for one in verdicts if one.judged]
    rest = len(verdicts) - len(judged)
    return f"{sum(one.reached for one in judged)} of {len(judged)}" + (f", {rest} not judged" if rest else "")


def not_judged(verdicts: list[Verdict]) -> str:
    """Their names."""
    return "; ".join(one.what for one in verdicts if not one.judged)


def lines(verdicts: list[Verdict]) -> list[str]:
    """How many are reached, those that are not, and those that the report cannot judge."""
    if not verdicts:
        return []
    missed = [f"not reached: {one}" for one in verdicts if one.missed]
    rest = not_judged(verdicts)
    return [f"goals reached: {count(verdicts)}", *missed, *([f"not judged: {rest}"] if rest else [])]
