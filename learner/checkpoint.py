"""Checkpoints: whole, durable, and never half there.

Owns the folder `checkpoints/`. Invariant: a file under its final name was written completely and synced
before it got that name; loading checks every byte's checksum and falls back to an older file; at least
one valid file remains at any time once there has been one.
"""

from __future__ import annotations

import io
import os
import re
import sys
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from learner.errors import CheckpointError

_FORMAT = 1
_NAME = re.compile(r"(sft|step)-(\d{6,})\.pt")


@dataclass(slots=True)
class Progress:
    """Where training stands."""

    sft_steps: int = 0
    """SFT steps done."""
    step: int = 0
    """RL steps done."""
    weight_version: int = 0
    """Newest version published."""
    next_delivery_seq: int = 0
    """First delivery that has not been trained on."""


def save(folder: Path, progress: Progress, state: dict[str, Any], *, keep: int) -> Path:
    """Writes one checkpoint and removes all but the newest `keep`.

    Args:
        folder: made where it is missing.
        progress: names the file: `sft-000200.pt` in supervised training, `step-000010.pt` in RL.
        state: tensors and plain data only.
        keep: at least 1.

    Raises:
        CheckpointError: the disk refused it; older checkpoints are untouched.
    """
    name = f"step-{progress.step:06d}.pt" if progress.step else f"sft-{progress.sft_steps:06d}.pt"
    path, temporary = folder / name, folder / f".{name}.{os.getpid()}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(folder)
        try:
            _write(temporary, {"format": _FORMAT, "progress": asdict(progress), **state})
            os.rename(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        _sync_folder(folder)
        for old in _newest_first(folder)[keep:]:
            old.unlink()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror or error}") from error
    return path


def _write(path: Path, content: dict[str, Any]) -> None:
    """Writes and syncs; OSError when the disk refuses, whatever torch makes of that."""
    with _Recording(path) as file:
        try:
            torch.save(content, file)
        except RuntimeError:
            # torch's archive writer reports a failed write by a position that it did not expect.
            if file.refusal is not None:
                raise file.refusal from None
            raise
        os.fsync(file.fileno())


class _Recording(io.FileIO):
    """An unbuffered file for writing that remembers the first refusal of the disk."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "wb")
        self.refusal: OSError | None = None

    def write(self, data: Any) -> int:
        """All of `data`."""
        view = memoryview(data).cast("B")
        total = len(view)
        try:
            while view:
                view = view[super().write(view) or 0 :]
        except OSError as error:
            self.refusal = self.refusal or error
            raise
        return total


def load_newest(folder: Path) -> tuple[Progress, dict[str, Any]] | None:
    """The newest valid checkpoint, or None where there is none at all.

    Raises:
        CheckpointError: there are files, but every one is damaged.
    """
    paths = _newest_first(folder)
    for path in paths:
        try:
            return load(path)
        except CheckpointError as error:
            print(f"skipped: {error}", file=sys.stderr)
    if paths:
        raise CheckpointError(f"{folder}: none of {len(paths)} checkpoints is whole")
    return None


def load(path: Path) -> tuple[Progress, dict[str, Any]]:
    """Reads one checkpoint onto the CPU; nothing in it is executed.

    Raises:
        CheckpointError: it is torn, damaged or of another format.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise CheckpointError(f"{path} is damaged at {damaged}")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, zipfile.BadZipFile, RuntimeError, EOFError) as error:
        raise CheckpointError(f"{path} is torn or unreadable: {error}") from error
    if state.get("format") != _FORMAT:
        raise CheckpointError(f"{path} has format {state.get('format')}, not {_FORMAT}")
    return Progress(**state["progress"]), state


def _newest_first(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    found = [(match, path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for match, path in sorted(found, key=lambda one: (one[0][1] == "step", int(one[0][2])), reverse=True)]


def _remove_leftovers(folder: Path) -> None:
    """Temporary files of learners that were killed while saving."""
    for path in folder.glob(".*.tmp"):
        path.unlink()


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
