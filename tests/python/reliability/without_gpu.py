"""The package where there is no GPU: it imports, calls on CPU tensors run the reference, others say what they need.

Runs the tests of that in a process that sees no GPU, wherever it is; a case is a test.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

from reliability.harness import Budget, result
from reliability.scorecard import ROOT

TITLE = "Import and calls without a GPU"
NEEDS = "nothing"
COUNT = 1
SECONDS = 120
PARTS = 1

FILES = ("test_import.py", "test_cpu_dispatch.py", "test_info_demo.py")
CHOSEN = "not time and not quick"  # times are for machines at rest
COUNTS = re.compile(r"(\d+) (passed|failed|error)")


def run(budget: Budget) -> dict:
    files = [f"tests/python/{name}" for name in FILES]
    command = [sys.executable, "-m", "pytest", "-q", "--tb=line", "-p", "no:cacheprovider", "-k", CHOSEN, *files]
    process = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, text=True, timeout=budget.seconds,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    counts = {what: int(count) for count, what in COUNTS.findall(process.stdout.strip().rpartition("\n")[2])}
    failures = [] if process.returncode == 0 else [f"pytest ended with {process.returncode}: {process.stdout[-3000:]}"]
    return result(sum(counts.values()), failures, files=", ".join(FILES))
