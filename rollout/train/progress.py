"""Shows a run's progress to a person, on stderr.

Invariant: nothing here decides anything; a run with `Quiet` does exactly the same.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class RunProgress(Protocol):
    """What the training loop tells about itself."""

    def say(self, text: str) -> None:
        """One line that stays."""

    def phase(self, name: str, total: int) -> None:
        """A phase of `total` units begins; the phase before it is over."""

    def advance(self, done: int, values: Mapping[str, float]) -> None:
        """`done` units of the phase are complete; `values` are its newest figures."""

    def close(self) -> None:
        """The run is over, in whatever way."""


class Quiet:
    """Shows nothing."""

    def say(self, text: str) -> None:
        """Shows nothing."""

    def phase(self, name: str, total: int) -> None:
        """Shows nothing."""

    def advance(self, done: int, values: Mapping[str, float]) -> None:
        """Shows nothing."""

    def close(self) -> None:
        """Shows nothing."""


class Bars:
    """A live bar per phase on a terminal."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description:<14}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[values]}"),
            console=self._console,
        )
        self._task: TaskID | None = None
        self._progress.start()

    def say(self, text: str) -> None:
        """One line above the bars."""
        self._progress.print(text, highlight=False)

    def phase(self, name: str, total: int) -> None:
        """A new bar; the earlier one stays as it ended."""
        self._finish()
        self._task = self._progress.add_task(name, total=total, values="")

    def advance(self, done: int, values: Mapping[str, float]) -> None:
        """Moves the bar to `done`."""
        if self._task is not None:
            self._progress.update(self._task, completed=done, values=_figures(values))

    def close(self) -> None:
        """Leaves the bars on the screen as they are."""
        self._finish()
        self._progress.stop()

    def _finish(self) -> None:
        if self._task is not None:
            self._progress.stop_task(self._task)
            self._task = None


class Lines:
    """A line every few seconds, for logs and pipes."""

    def __init__(self, every_s: float = 5.0) -> None:
        self._every_s = every_s
        self._last = 0.0
        self._name = ""
        self._total = 0

    def say(self, text: str) -> None:
        """One line."""
        print(text, file=sys.stderr, flush=True)

    def phase(self, name: str, total: int) -> None:
        """Names the phase in the lines to come."""
        self._name, self._total, self._last = name, total, 0.0

    def advance(self, done: int, values: Mapping[str, float]) -> None:
        """A line, unless one was printed a moment ago and the phase isn't complete."""
        now = time.monotonic()
        if done >= self._total or now - self._last >= self._every_s:
            self._last = now
            self.say(f"{self._name:<14} {done}/{self._total}  {_figures(values)}")

    def close(self) -> None:
        """Nothing is held."""


def make_progress(quiet: bool) -> RunProgress:
    """Bars on a terminal, lines elsewhere, nothing when `quiet`."""
    if quiet:
        return Quiet()
    return Bars() if sys.stderr.isatty() else Lines()


def _figures(values: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.3f}" for name, value in values.items())
