"""A report with made-up times, for the tests of what is printed and drawn."""

from __future__ import annotations

import json
from typing import Any

from hopper_attention.bench import record, suites

CHECK = {"passed": True, "elementwise": 1.0, "rms": 1.0, "lse": 0.1, "message": ""}


def result(us: float, **given: Any) -> dict[str, Any]:
    return {"us": us, "spread": 0.01, "samples": [us, us], "check": dict(CHECK), "note": "", **given}


def entry(case: suites.Case, **us: float) -> dict[str, Any]:
    """One case with the time of each implementation."""
    return {
        "case": case.as_dict(),
        "flops": case.flops(),
        "kv_bytes": case.kv_bytes(),
        "status": "ok",
        "reason": "",
        "results": {name: result(time) for name, time in us.items()},
        "left_out": {},
    }


def report(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """As it comes back from its file."""
    return json.loads(
        json.dumps(
            {
                "schema": record.SCHEMA,
                "date": "2026-01-02T03:04:05+00:00",
                "command": "python -m hopper_attention.bench --made-up",
                "machine": {"device": "NVIDIA H200", "driver": "580.1", "cuda": "13.0", "torch": "2.11"},
                "ceilings": {"matmul_tflops": 800.0, "read_gbs": 4400.0, "copy_gbs": 4200.0},
                "cases": entries,
                "host": [],
                "traffic": [],
            }
        )
    )


def full() -> dict[str, Any]:
    """Every suite; ours takes 100 us, FA3 120, cuDNN 150."""
    return report([entry(case, ours=100.0, fa3=120.0, cudnn=150.0) for case in suites.select("all", None)])
