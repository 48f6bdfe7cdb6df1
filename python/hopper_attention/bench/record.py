"""A report: the dict that the JSON file holds. What its entries say, and what follows from them.

{"schema", "date", "command", "machine": {...}, "ceilings": {...}, "cases": [entry], "host": [...], "traffic": [...],
 "kernels": [...]}
entry: {"case": fields of suites.Case, "flops", "kv_bytes", "status": "ok" | "skipped" | "wrong" | "failed", "reason",
        "results": {name: {"us": median, "spread", "samples": us of each round, "check": {...}, "note"}},
        "left_out": {name: reason}}
"""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

SCHEMA = 1
OURS = "ours"
BEST_DATA = pathlib.Path(__file__).parent / "data" / "prefill_best.json"
DECODE_BEST_DATA = BEST_DATA.with_name("decode_best.json")


def load(path: str) -> dict[str, Any]:
    """A report from a file. Raises ValueError if it is none."""
    try:
        report = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(report, dict) or report.get("schema") != SCHEMA or "cases" not in report:
        raise ValueError(f"{path}: is no report of this benchmark (schema {SCHEMA})")
    return report


def time_us(entry: dict[str, Any], name: str = OURS) -> float | None:
    """Median us of an implementation; None if it was not timed or its answer was wrong."""
    result = entry["results"].get(name)
    if result is None or not result["check"]["passed"]:
        return None
    return result.get("us")


def is_decode(entry: dict[str, Any]) -> bool:
    return entry["case"]["call"] == "cache"


def rate(entry: dict[str, Any], name: str = OURS) -> float | None:
    """TFLOP/s over visible pairs; for decode GB/s of K and V."""
    us = time_us(entry, name)
    if us is None:
        return None
    return entry["kv_bytes"] / us / 1e3 if is_decode(entry) else entry["flops"] / us / 1e6


def fraction(report: dict[str, Any], entry: dict[str, Any], name: str = OURS) -> float | None:
    """Rate over the measured ceiling: matmul, for decode reads."""
    ceiling = report["ceilings"].get("read_gbs" if is_decode(entry) else "matmul_tflops")
    found = rate(entry, name)
    return found / ceiling if ceiling and found is not None else None


def over_floor(report: dict[str, Any], entry: dict[str, Any]) -> float | None:
    """us beyond what K and V take at the measured read rate."""
    us, read = time_us(entry), report["ceilings"].get("read_gbs")
    return us - entry["kv_bytes"] / read / 1e3 if us is not None and read else None


def speedup(entry: dict[str, Any], peer: str) -> float | None:
    """Our speed over a peer's."""
    ours, theirs = time_us(entry), time_us(entry, peer)
    return theirs / ours if ours and theirs else None


@lru_cache(maxsize=1)
def best_table() -> dict[tuple[int, int, int, bool], dict[str, Any]]:
    """(seqlen, heads, head_dim, causal) -> best speed seen, relative to the FA3 library in the same run, and whose."""
    rows = json.loads(BEST_DATA.read_text(encoding="utf-8"))
    return {(row["seqlen"], row["heads"], row["head_dim"], row["causal"]): row for row in rows}


@lru_cache(maxsize=1)
def decode_best_table() -> dict[str, dict[str, Any]]:
    """Name of a decode case -> time of FA3 and of the best (FA3, FlashInfer or its XQA) in one run on an H200."""
    return {row["name"]: row for row in json.loads(DECODE_BEST_DATA.read_text(encoding="utf-8"))}


def best_known_us(entry: dict[str, Any]) -> float | None:
    """FA3's time in this run over the best speed relative to it; where cuDNN is the best, its time in this run if that
    is less. For decode the best of its table, scaled by FA3's time. None outside the two tables or without FA3.
    """
    case = entry["case"]
    if case["suite"] == "decode":
        decode_row, fa3 = decode_best_table().get(case["name"]), time_us(entry, "fa3")
        return fa3 * decode_row["best_us"] / decode_row["fa3_us"] if decode_row and fa3 else None
    if case["suite"] != "prefill":
        return None
    row = best_table().get((case["seqlen_q"], case["heads_q"], case["head_dim"], case["causal"]))
    fa3 = time_us(entry, "fa3")
    if row is None or fa3 is None:
        return None
    best = fa3 / row["best_over_fa3_varlen"]
    cudnn = time_us(entry, "cudnn")
    return min(best, cudnn) if row["best"] == "cuDNN" and cudnn is not None else best


def over_best(entry: dict[str, Any]) -> float | None:
    """Our speed over the best known."""
    ours, best = time_us(entry), best_known_us(entry)
    return best / ours if ours and best else None


def goal(entry: dict[str, Any], name: str = "goal") -> float:
    """A goal of a case; 0 if nothing is said, or the report is older than the goal."""
    return entry["case"].get(name, 0.0)


def geometric_mean(values: Iterable[float]) -> float | None:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else None


def peers_of(entries: list[dict[str, Any]]) -> list[str]:
    """Names other than ours with at least one usable time, in order of appearance."""
    names = [name for entry in entries for name in entry["results"] if name != OURS]
    return [name for name in dict.fromkeys(names) if any(time_us(entry, name) for entry in entries)]


def by_suite(report: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for entry in report["cases"]:
        found.setdefault(entry["case"]["suite"], []).append(entry)
    return found
