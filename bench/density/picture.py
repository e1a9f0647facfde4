"""A picture of the courses: host memory and creation rate against the number of sandboxes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.density.course import Course

FILE = "density.png"
_COLOURS = ("tab:blue", "tab:orange")


def draw(courses: Sequence[Course], folder: Path) -> Path | None:
    """Writes the picture into the folder and returns its path; None where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (memory, rate) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 7), layout="constrained")
    for course, colour in zip(courses, _COLOURS, strict=False):
        counts = [point.count for point in course.points]
        label = f"{course.name} ({course.count:,})"
        memory.plot(counts, [point.used_bytes / 2**20 for point in course.points], "o-", color=colour, label=label)
        rate.plot(counts, [point.per_second for point in course.points], "o-", color=colour, label=label)
    memory.set_ylabel("host memory, MiB (MemAvailable)")
    rate.set_ylabel("created per second")
    rate.set_xlabel("sandboxes alive")
    for axes in (memory, rate):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    path = folder / FILE
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path
