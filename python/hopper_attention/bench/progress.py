"""How far the run is, on stderr: a bar with rich on a terminal, a line for each case otherwise."""

from __future__ import annotations

import sys
from types import TracebackType


class Progress:
    """Context manager; `step` after each case."""

    def __init__(self, total: int) -> None:
        self.total, self.done = total, 0
        self.bar = None
        if sys.stderr.isatty():
            try:
                from rich.console import Console
                from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
                from rich.progress import Progress as RichProgress
            except ImportError:
                return
            columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
            self.bar = RichProgress(*columns, console=Console(stderr=True))
            self.task = self.bar.add_task("", total=total)

    def __enter__(self) -> Progress:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()

    def say(self, text: str) -> None:
        """A line between cases."""
        if self.bar is not None:
            self.bar.console.print(text, markup=False, highlight=False)
        else:
            sys.stderr.write(text + "\n")
            sys.stderr.flush()

    def step(self, text: str) -> None:
        """One case is done."""
        self.done += 1
        if self.bar is not None:
            self.bar.update(self.task, advance=1)
        self.say(f"[{self.done}/{self.total}] {text}")
