"""Two reports side by side: how our speed changed, relative to FA3 where both have it."""

from __future__ import annotations

from typing import Any

from hopper_attention.bench import record
from hopper_attention.bench.record import geometric_mean
from hopper_attention.bench.table import Table, number


def change(old: dict[str, Any], new: dict[str, Any]) -> tuple[float | None, str]:
    """New speed over old, and what it is relative to: "fa3", or "" where one of the two has no FA3 time."""
    before, after = record.speedup(old, "fa3"), record.speedup(new, "fa3")
    if before and after:
        return after / before, "fa3"
    old_us, new_us = record.time_us(old), record.time_us(new)
    return (old_us / new_us, "") if old_us and new_us else (None, "")


def key(entry: dict[str, Any]) -> tuple[str, str]:
    return entry["case"]["suite"], entry["case"]["name"]


def compare(old: dict[str, Any], new: dict[str, Any]) -> Table:
    """The cases that both have. Times of two runs move with the card; ratios to FA3 do so less."""
    before = {key(entry): entry for entry in old["cases"]}
    columns = ["case", "old us", "new us", "old x fa3", "new x fa3", "speed", "relative to"]
    rows, relative, raw = [], [], []
    for entry in new["cases"]:
        other = before.get(key(entry))
        if other is None:
            continue
        ratio, base = change(other, entry)
        if ratio is not None:
            (relative if base else raw).append(ratio)
        times = [number(record.time_us(e), ".1f") for e in (other, entry)]
        speeds = [number(record.speedup(e, "fa3")) for e in (other, entry)]
        percent = "-" if ratio is None else f"{100 * (ratio - 1):+.1f} %"
        rows.append([" / ".join(key(entry)), *times, *speeds, percent, base or "-"])
    notes = []
    for label, ratios in (("relative to FA3", relative), ("by time alone", raw)):
        mean = geometric_mean(ratios)
        if mean is not None:
            notes.append(f"{label}: geometric mean {100 * (mean - 1):+.1f} % over {len(ratios)} cases")
    if not rows:
        notes.append("the two reports have no case in common")
    return Table(f"against the report of {old['date']}", columns, rows, notes)
