"""Gives weights their version and hands them to the policy server.

Owns the version counter. Invariant: a version is written to the run directory before it is announced,
so that no restart, from however old a checkpoint, ever uses a version twice.
"""

from __future__ import annotations

import os
import socket
import time
from functools import partial
from pathlib import Path

from torch import nn

from learner.errors import CheckpointError
from learner.flat import flat_nbytes, write_flat
from rollout.lane.errors import PeerGone, WeightsFault
from rollout.lane.weights import WeightPublisher

_FILE = "weight_version"


class Publisher:
    """Publishes a model's weights under ever new versions.

    Args:
        sock: to the policy server; None counts versions without sending anything anywhere.
        model: whose weights are published.
        run_dir: keeps the counter.
        newest_version: the newest version that a checkpoint knows of.
        timeout_s: for the server to use new weights.
    """

    def __init__(
        self, sock: socket.socket | None, model: nn.Module, run_dir: Path, *, newest_version: int, timeout_s: float
    ) -> None:
        self._model = model
        self._path = run_dir / _FILE
        self._timeout_s = timeout_s
        self._publisher = WeightPublisher(sock, flat_nbytes(model)) if sock is not None else None
        self.version = max(newest_version, self._recorded())

    def publish(self) -> float:
        """Publishes the present weights as the next version; returns the seconds it took.

        Raises:
            CheckpointError: the version cannot be recorded.
            WeightsFault: the policy server is gone, refused them, or took too long.
        """
        began = time.monotonic()
        self.version += 1
        self._record()
        if self._publisher is not None:
            try:
                self._publisher.publish(self.version, partial(write_flat, self._model), self._timeout_s)
            except PeerGone as error:
                raise WeightsFault(f"version {self.version}: the policy server is gone") from error
        return time.monotonic() - began

    def close(self) -> None:
        """Closes the way to the server."""
        if self._publisher is not None:
            self._publisher.close()

    def _recorded(self) -> int:
        try:
            return int(self._path.read_text())
        except FileNotFoundError:
            return 0
        except ValueError as error:
            raise CheckpointError(f"{self._path} holds no version: {error}") from error

    def _record(self) -> None:
        temporary = self._path.with_suffix(".tmp")
        try:
            temporary.write_text(f"{self.version}\n")
            os.replace(temporary, self._path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise CheckpointError(f"{self._path} cannot be written: {error.strerror or error}") from error
