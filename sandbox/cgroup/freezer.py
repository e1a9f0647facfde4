"""Stops a sandbox where it stands, and lets it go on.

Owns: the `cgroup.freeze` of one sandbox's v2 directory while the sandbox lives. Invariant: `frozen` is true from
before the first process may stop until after the kernel was told to let go, so whoever finds it false can rely on
an agent that answers; after `end` nothing is written, for the directory is another's.
"""

from __future__ import annotations

import time
from contextlib import suppress

import anyio

from sandbox.cgroup import files
from sandbox.errors import CapabilityError, SandboxDiedError, SandboxError

_STILL_TIMEOUT_S = 5.0
_FIRST_PAUSE_S = 0.0005
_LONGEST_PAUSE_S = 0.02


class Freezer:
    """Args: the v2 directory that holds the whole sandbox, None where the host has none."""

    def __init__(self, directory: str | None) -> None:
        self._directory = directory
        self._turn = anyio.Lock()
        self._ended = False
        self.frozen = False

    async def freeze(self) -> None:
        """Returns when every process stands still; cancelled, or failed, all of them go on.

        Raises:
            CapabilityError: there is no v2 directory.
            SandboxDiedError: the directory has vanished, or the sandbox has ended.
            SandboxError: a process did not stop in time.
        """
        if self._directory is None:
            raise CapabilityError(
                "without control groups of version 2 a sandbox cannot be frozen",
                "run as root, or in a delegated cgroup v2 (`rollout doctor` names what is missing)",
            )
        async with self._turn:
            self._require_tenancy()
            if self.frozen:
                return
            self.frozen = True
            try:
                self._write("1")
                await self._wait_until_still()
            except BaseException:
                with suppress(SandboxError):  # where nothing can be told, what is under way says more
                    self.let_go()
                raise

    async def thaw(self) -> None:
        """Lets everything go on. Does nothing when it was not frozen."""
        async with self._turn:
            self.let_go()

    def let_go(self) -> None:
        """The same at once."""
        if not self.frozen:
            return
        try:
            self._write("0")
        except SandboxDiedError:
            self.frozen = False  # nobody is left who could stand still
            raise
        self.frozen = False

    def end(self) -> None:
        """Lets go of a directory that the next sandbox gets: who waits to freeze, or is at it, fails."""
        self._ended = True
        self.let_go()

    def _require_tenancy(self) -> None:
        if self._ended:
            raise SandboxDiedError("the sandbox has ended")

    def disown(self) -> None:
        """See `sandbox.protocol.forks`: in a child it must not let the parent's processes go on."""
        self.frozen = False

    def _write(self, value: str) -> None:
        with files.vanishing():
            files.write(f"{self._directory}/cgroup.freeze", value)

    async def _wait_until_still(self) -> None:
        deadline = time.monotonic() + _STILL_TIMEOUT_S
        pause_s = _FIRST_PAUSE_S
        while not self._is_still():
            if time.monotonic() > deadline:
                raise SandboxError(f"a process of the sandbox did not stop within {_STILL_TIMEOUT_S} s")
            await anyio.sleep(pause_s)
            self._require_tenancy()
            pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)

    def _is_still(self) -> bool:
        with files.vanishing():
            return files.keyed(f"{self._directory}/cgroup.events", "frozen") == 1
