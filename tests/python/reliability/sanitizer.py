"""compute-sanitizer over small calls of all functions, by tools/sanitize, which first lets each tool find a planted bug.
memcheck also gets calls whose lengths, offsets, pages or schedules lie.

HOPPER_ATTENTION_SANITIZER and HOPPER_ATTENTION_SANITIZER_DRIVER name the two programs; without them compute-sanitizer is
the one of the wheel nvidia-cuda-sanitizer-api or the one on PATH, the driver that of a build tree, build/*/tests.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from reliability.harness import Budget, result

TITLE = "compute-sanitizer: memcheck with TMA operations, racecheck, synccheck, initcheck; each finds its planted bug"
NEEDS = "gpu"
COUNT = 4 * 46 + 85  # cases of the driver under each of four tools, and malformed ones under memcheck
SECONDS = 480
PARTS = 1

ROOT = Path(__file__).resolve().parents[3]
LIBRARY = "libhopper_attention.so"


def run(budget: Budget) -> dict[str, Any]:
    sanitizer, driver = programs()
    if sanitizer is None or driver is None:
        missing = "compute-sanitizer" if sanitizer is None else "hopper_attention_sanitizer"
        return result(0, [f"{missing} was not found; {__doc__}"])
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "sanitize.json"
        command = [sys.executable, ROOT / "tools" / "sanitize", "--sanitizer", sanitizer, "--driver", driver]
        command += ["--out", out, "--timeout", str(max(30.0, budget.left() / 2))]
        libraries = [str(x) for x in library_folders()]
        environment = {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join([*libraries, *inherited()])}
        process = subprocess.Popen(list(map(str, command)), env=environment, stdout=subprocess.PIPE, text=True)
        done, lines = 0, []
        os.set_blocking(process.stdout.fileno(), False)
        while process.poll() is None:
            line = process.stdout.readline()
            if line:
                lines.append(line)
                done += " right " in line or " FAILED " in line
            else:
                time.sleep(0.2)
            budget.alive(done, 0, "runs")
        if not out.exists():
            return result(0, [f"tools/sanitize ended with {process.returncode}: {''.join(lines)[-3000:]}"])
        return json.loads(out.read_text(encoding="utf-8"))


def inherited() -> list[str]:
    return [x for x in [os.environ.get("LD_LIBRARY_PATH")] if x]


def programs() -> tuple[Path | None, Path | None]:
    """compute-sanitizer and the driver."""
    drivers = sorted(ROOT.glob("build/*/tests/hopper_attention_sanitizer"))
    system = shutil.which("compute-sanitizer")
    sanitizers = [Path(folder) / "nvidia/cu13/compute-sanitizer/compute-sanitizer" for folder in sys.path]
    sanitizers += [Path(system)] if system else []
    return (
        first_that_exists(os.environ.get("HOPPER_ATTENTION_SANITIZER"), sanitizers),
        first_that_exists(os.environ.get("HOPPER_ATTENTION_SANITIZER_DRIVER"), drivers),
    )


def first_that_exists(given: str | None, places: list[Path]) -> Path | None:
    return next((path for path in ([Path(given)] if given else places) if path.exists()), None)


def library_folders() -> list[Path]:
    """Where the library of the imported package lies, which is what all sections test."""
    import hopper_attention

    folder = Path(hopper_attention.__file__).parent
    return [folder] if (folder / LIBRARY).exists() else []
