"""Writes what the gpu tests found as lines of JSON to the file HOPPER_ATTENTION_GPU_LOG names, for tools/gpu_report.

Line by line, so that what was found survives a hang or a lost context.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(params=[False, True], ids=["", "one tile"])
def either_tile(request) -> Iterator[None]:
    """The plan's own choice, and without several tiles of 32 rows, which it takes for short sequences alone: kernels for
    many queries are to see these, too.
    """
    from hopper_attention.testing import force_plan

    with force_plan(one_tile=True) if request.param else contextlib.nullcontext():
        yield


def write(entry: dict) -> None:
    path = os.environ.get("HOPPER_ATTENTION_GPU_LOG")
    if path:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def shortened(text: str, limit: int = 4000) -> str:
    return text if len(text) <= limit else text[: limit // 2] + "\n...\n" + text[-limit // 2 :]


def pytest_runtest_logstart(nodeid, location):
    write({"start": nodeid})


def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        text = "" if report.outcome == "passed" else shortened(str(report.longrepr))
        write({"test": report.nodeid, "when": report.when, "outcome": report.outcome, "text": text})
    if report.when == "teardown":
        support = sys.modules.get("gpu.support")
        seconds = {"end": report.nodeid}
        if support is not None:
            worst = support.WORST
            seconds["worst"] = {
                "values": worst.values,
                "cases": worst.cases,
                "judged": worst.judged,
                "random": worst.random,
            }
        write(seconds)
