"""What the sections of `tools/reliability` share: the budget of a part, the shape of a result, how parts are merged.

A section is a module of this folder:

    TITLE = "Random cases against float64"  # what the scorecard calls it
    NEEDS = "gpu"        # "nothing", "gpu" or "2 gpus"
    COUNT = 5000         # cases at --scale 1; 0 if time is all there is
    SECONDS = 240        # after which no new case begins; --seconds replaces it
    PARTS = 4            # processes that share the cases
    SILENCE = 120        # optional: seconds without a sign of life after which a part counts as hung (default 120)
    def run(budget: Budget) -> dict
    def missing() -> str  # optional: what this machine lacks; "" if it can run the section

`run` returns {"cases": how many were run, "failures": texts, each with the way to see it again, "figures": {name: value}}.
"count", if it is there, replaces how many cases there should be; fewer cases than that are a failure, and so is each of
the texts in "unfinished", of what there was no time for: unless --seconds asks for less. Figures of several parts are
merged: whole numbers add up, fractions give the largest, texts the first; a name that starts with "least " gives the
smallest, one that starts with "worst " the largest. A module may define merge(results) -> result instead.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

PROGRESS_SECONDS = 1.0
MAX_FAILURES = 20  # texts kept of one part; more are only counted


@dataclass
class Budget:
    """What one part of a section may do. `options`: fa3, fa3_py (paths or None), alone: no other section runs."""

    count: int
    seconds: float
    seed: int = 0
    part: int = 0
    parts: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    loud: bool = False
    started: float = field(default_factory=time.monotonic)
    said: float = 0.0

    def left(self) -> float:
        """Seconds in which new cases may begin."""
        return self.seconds - (time.monotonic() - self.started)

    def numbers(self, count: int | None = None) -> Iterator[int]:
        """The cases of this part, counted over all parts, until the time is over."""
        total = range(self.part, self.count if count is None else count, self.parts)
        for done, number in enumerate(total):
            if self.left() <= 0:
                return
            self.alive(done, len(total))
            yield number
        self.alive(len(total), len(total))

    def alive(self, done: int, total: int = 0, text: str = "") -> None:
        """A sign of life, printed about once in a second."""
        now = time.monotonic()
        if self.loud and (now - self.said >= PROGRESS_SECONDS or done == total):
            self.said = now
            say({"done": done, "total": total, "text": text})


class Failures(list):
    """Texts, at most MAX_FAILURES; the last one says how many more there were."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def add(self, text: str) -> None:
        self.count += 1
        if len(self) < MAX_FAILURES:
            self.append(text[:4000])

    def texts(self) -> list[str]:
        more = self.count - len(self)
        return [*self, f"and {more} more"] if more else list(self)


def result(cases: int, failures: Failures | list[str] = (), **figures: Any) -> dict[str, Any]:
    """The dict that `run` returns; underscores in the names of figures become spaces."""
    texts = failures.texts() if isinstance(failures, Failures) else list(failures)
    return {"cases": cases, "failures": texts, "figures": {n.replace("_", " "): v for n, v in figures.items()}}


def merged(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The result of a section from those of its parts."""
    figures: dict[str, Any] = {}
    for part in results:
        for name, value in part["figures"].items():
            if name not in figures:
                figures[name] = value
            elif name.startswith("least "):
                figures[name] = min(figures[name], value)
            elif isinstance(value, float) or name.startswith("worst "):
                figures[name] = max(figures[name], value)
            elif isinstance(value, int):
                figures[name] += value
    counts = [part["count"] for part in results if "count" in part]
    return {
        **({"count": sum(counts)} if counts else {}),
        "cases": sum(part["cases"] for part in results),
        "failures": [text for part in results for text in part["failures"]],
        "unfinished": [text for part in results for text in part.get("unfinished", ())],
        "figures": figures,
    }


def section(name: str) -> Any:
    return importlib.import_module(f"reliability.{name}")


def say(message: dict[str, Any]) -> None:
    sys.__stdout__.write("@@" + json.dumps(message) + "\n")
    sys.__stdout__.flush()


def main() -> int:
    """One part in this process: what it says is for tools/reliability."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("given", type=json.loads)
    options = parser.parse_args()
    given = options.given
    say({"done": 0, "total": 0, "text": "starts"})
    try:
        module = section(options.name)
        device = given.pop("device")
        if device != "cuda" and module.NEEDS != "nothing":
            from gpu import support

            support.DEVICE = device
        found = module.run(Budget(**given, loud=True))
        json.dumps(found)
    except BaseException as error:  # pytest.fail is no Exception
        found = result(0, [f"{type(error).__name__}: {error}\n{traceback.format_exc()[-3000:]}"])
    say({"result": found})
    return int(bool(found["failures"]))


if __name__ == "__main__":
    raise SystemExit(main())
