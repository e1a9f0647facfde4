"""Faults of the sandbox layer: our own failures, never the sandboxed code's.

    SandboxError
    ├── ConfigError        a value that the caller gave is wrong; nothing has been started
    ├── CapabilityError    this host cannot isolate (or enforce what a spec insists on)
    ├── StartError         a jail did not come up
    ├── ExhaustedError     the host has no descriptors, disk space, memory … left
    ├── PoolFullError      too many wait for a sandbox already
    ├── AcquireTimeoutError no sandbox was free before the deadline
    ├── SandboxDiedError   a sandbox, or the warden that holds it, ended under a caller
    ├── SandboxFrozenError a sandbox was asked for something while it stands still
    ├── LayerError         a workspace cannot be sealed, or a layer cannot be read, kept or used
    ├── TransferError      a file could not be moved in or out (not a regular file, over its cap, …)
    └── ProtocolError      a frame that breaks the wire format

What the sandboxed code did (exit codes, limits hit) is an `Outcome`, a value, and never raised.
"""

from __future__ import annotations


class SandboxError(Exception):
    """Base of every fault raised by `sandbox`."""


class ConfigError(SandboxError):
    """A value given by the caller cannot be used; raised before anything starts.

    Args:
        field: the name of the offending field, dotted (`limits.memory_bytes`).
        value: the value that was given.
        remedy: what to write instead, or what to install.
    """

    def __init__(self, field: str, value: object, remedy: str) -> None:
        super().__init__(f"{field} = {value!r}: {remedy}")
        self.field = field
        self.value = value
        self.remedy = remedy


class CapabilityError(SandboxError):
    """The host lacks something that isolation, or a limit a spec insists on, depends on.

    Args:
        missing: what is missing, in a few words.
        remedy: how to turn it on.
    """

    def __init__(self, missing: str, remedy: str) -> None:
        super().__init__(f"{missing}; {remedy}")
        self.missing = missing
        self.remedy = remedy


class StartError(SandboxError):
    """A jail could not be built; the message carries the jail tool's own words."""


class ExhaustedError(SandboxError):
    """The host has run out of something.

    Args:
        doing: what could not be done.
        resource: what it has run out of: `descriptors`, `disk space`, `memory`, `processes` …
        remedy: how to have more of it.
    """

    def __init__(self, doing: str, resource: str, remedy: str) -> None:
        super().__init__(f"{doing}: the host has no {resource} left; {remedy}")
        self.resource = resource
        self.remedy = remedy


class PoolFullError(SandboxError):
    """As many acquires wait as the pool lets wait.

    Args:
        field: the setting that says how many (`pool.max_waiting`).
        value: how many that are.
        remedy: what to do.
    """

    def __init__(self, field: str, value: int, remedy: str) -> None:
        super().__init__(f"{field} = {value}: {remedy}")
        self.field = field
        self.value = value
        self.remedy = remedy


class AcquireTimeoutError(SandboxError):
    """A sandbox was not there before the caller's deadline.

    Args:
        waited_s: how long was waited.
        why: what was waited for.
        remedy: what to do.
    """

    field = "deadline_s"

    def __init__(self, waited_s: float, why: str, remedy: str) -> None:
        super().__init__(f"no sandbox before {self.field}, after {waited_s:.3f} s ({why}): {remedy}")
        self.waited_s = waited_s
        self.why = why
        self.remedy = remedy


class SandboxDiedError(SandboxError):
    """The sandbox or its warden ended while, or before, it was used."""


class SandboxFrozenError(SandboxError):
    """The sandbox is frozen, so that nothing in it can answer; `thaw` it first."""


class LayerError(SandboxError):
    """A workspace cannot be sealed, or a layer cannot be read, carried away, brought in or used; says why."""


class TransferError(SandboxError):
    """A file transfer was refused or failed; names the path and the reason.

    Args:
        error: the errno inside the sandbox (ENOENT, ENOSPC, ELOOP …), 0 where the refusal was ours.
    """

    def __init__(self, path: str, reason: str, error: int = 0) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.error = error


class ProtocolError(SandboxError):
    """A peer sent a frame that breaks the wire format."""
