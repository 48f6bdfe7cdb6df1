"""Python in fresh processes that run at once: most of their time is the import of torch."""

from __future__ import annotations

import os
import subprocess
import sys
import time


def run_together(commands: dict[str, list[str]], seconds: float = 180.0) -> dict[str, tuple[int | None, str]]:
    """Arguments of the interpreter -> exit status (None: stopped after so many seconds) and all that was printed."""
    started = time.monotonic()
    running = {
        name: subprocess.Popen(
            [sys.executable, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=dict(os.environ),
        )
        for name, arguments in commands.items()
    }
    found: dict[str, tuple[int | None, str]] = {}
    try:
        for name, process in running.items():
            try:
                text, _ = process.communicate(timeout=max(1.0, seconds - (time.monotonic() - started)))
                found[name] = process.returncode, text
            except subprocess.TimeoutExpired:
                process.kill()
                text, _ = process.communicate()
                found[name] = None, text
    finally:
        for process in running.values():
            if process.poll() is None:
                process.kill()
                process.communicate()
    return found
