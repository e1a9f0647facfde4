"""The values that cross the sandbox's boundary: what is asked for, and what came of it.

Invariant: everything here is immutable plain data; requests (`Limits`) and measurements (`Usage`)
are different types, and an `Outcome` is complete when it is handed out.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Literal, get_args

import msgspec

from sandbox.checking import check_count, check_fields, check_text, check_variables
from sandbox.errors import ConfigError

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

MAX_USER = 65_533
"""The two numbers above it mean nobody."""

JailName = Literal["bubblewrap", "nsjail"]
JAIL_NAMES: tuple[JailName, ...] = get_args(JailName)


IMAGE_ISOLATION = "image_isolation"
"""Name, beside the limits', of what `insist` and `unenforced` say about the image: siblings share its bytes alone, and
neither its locks nor its file watches."""


def check_jail(field: str, name: str) -> JailName:
    """The jail of that name.

    Raises:
        ConfigError: there is none; names `field` and the jails that there are.
    """
    for known in JAIL_NAMES:
        if name == known:
            return known
    raise ConfigError(field, name, f"must be one of {', '.join(JAIL_NAMES)}")


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Quotas of one sandbox; each is enforced or reported in `Outcome.unenforced`."""

    memory_bytes: int = 512 * MIB
    """Memory of every process together, swap included. The writable mounts live in memory too and are charged to the
    same account, so the kernel enforces `memory_bytes + disk_bytes`: a full disk then never starves the processes, and
    processes alone may reach the sum."""
    cpus: float = 1.0
    """CPU time per wall second, in cores."""
    pids: int = 64
    """Processes and threads alive at once."""
    disk_bytes: int = 64 * MIB
    """All writable mounts together (workspace, /tmp, /dev/shm)."""
    inodes: int = 16_384
    """Files, directories and links in all writable mounts together."""
    open_files: int = 256
    """Descriptors of one process."""
    file_size_bytes: int = 64 * MIB
    """Largest single file that a process may write."""

    def __post_init__(self) -> None:
        check_fields(self, "limits")
        for field, low, high in (
            ("memory_bytes", 8 * MIB, 1 << 44),
            ("pids", 2, 1 << 20),
            ("disk_bytes", 64 * KIB, 1 << 44),
            ("inodes", 16, 1 << 30),
            ("open_files", 16, 1 << 20),
            ("file_size_bytes", 0, 1 << 44),
        ):
            value = getattr(self, field)
            if not low <= value <= high:
                raise ConfigError(f"limits.{field}", value, f"must lie between {low} and {high}")
        if not (math.isfinite(self.cpus) and 0.01 <= self.cpus <= 1024):
            raise ConfigError("limits.cpus", self.cpus, "must lie between 0.01 and 1024 cores")


class SandboxSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a sandbox is made of. Equal specs describe interchangeable sandboxes."""

    image: str = "host"
    """Root file system: `host` (this machine's read-only /usr, /bin, /lib … and a minimal /etc),
    `python` (the host image and a world-readable interpreter at /opt/python, made by
    `rollout image build python`), or an absolute path of a directory image."""
    workspace: str | None = None
    """Absolute path of a directory of this host, whose regular files, directories and the links that stay inside it
    are copied into /workspace before the sandbox is handed out; `Sandbox.workspace_skipped` lists the rest."""
    limits: Limits = Limits()
    user: int = 1000
    """Uid and gid that code sees as its own, 0 to 65533. 0 looks like root and has no more rights than another."""
    env: dict[str, str] = {}
    """Environment of every command, over the minimal default; a command's own comes on top."""
    network: Literal["none"] = "none"
    """`none`: a private network namespace with loopback alone."""
    jail: JailName = "bubblewrap"
    """The tool that builds the namespaces and the read-only image; what holds inside is the same with each."""
    insist: tuple[str, ...] = ()
    """Names of limits that must be enforced (`memory`, `cpus`, `pids`, `disk`), or `image_isolation`; where the host
    cannot, creation raises `CapabilityError` instead of reporting."""

    def __post_init__(self) -> None:
        check_jail("spec.jail", self.jail)
        check_fields(self, "spec")
        check_text("spec.image", self.image)
        check_text("spec.workspace", self.workspace or "")
        check_variables("spec.env", self.env)
        if self.workspace is not None and not self.workspace.startswith("/"):
            raise ConfigError("spec.workspace", self.workspace, "must be the absolute path of a directory")
        if not 0 <= self.user <= MAX_USER:
            raise ConfigError("spec.user", self.user, f"must lie between 0 and {MAX_USER}")


class Command(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One execution in a sandbox."""

    argv: tuple[str, ...]
    cwd: str = "/workspace"
    env: dict[str, str] = {}
    stdin: bytes = b""
    timeout_s: float = 30.0
    """Wall time; when it is over, everything that this command started is killed."""
    cpu_s: float | None = None
    """CPU seconds; None for no limit beside the wall time. Of everything that the command starts where a cgroup
    counts them (checked at most every 50 ms), else of each process, rounded up to whole seconds (RLIMIT_CPU)."""
    output_limit_bytes: int = 1 * MIB
    """Kept of stdout and of stderr, each; head and tail are kept and the rest counted."""
    kill_output_bytes: int | None = None
    """The command is killed (reason `output_limit`) once one stream has produced this much;
    None for 64 times `output_limit_bytes`, at least 1 MiB."""

    def __post_init__(self) -> None:
        check_fields(self, "command")
        if not self.argv:
            raise ConfigError("command.argv", self.argv, "must be one or more strings")
        for word in self.argv:
            check_text("command.argv", word)
        check_text("command.cwd", self.cwd)
        check_variables("command.env", self.env)
        if not (math.isfinite(self.timeout_s) and 0 < self.timeout_s <= 86_400):
            raise ConfigError("command.timeout_s", self.timeout_s, "must lie in (0, 86400] seconds")
        if self.cpu_s is not None and not (math.isfinite(self.cpu_s) and 0 < self.cpu_s <= 86_400):
            raise ConfigError("command.cpu_s", self.cpu_s, "must lie in (0, 86400] seconds")
        if not 0 <= self.output_limit_bytes <= GIB:
            raise ConfigError("command.output_limit_bytes", self.output_limit_bytes, "must lie between 0 and 1 GiB")
        if self.kill_output_bytes is not None:
            check_count("command.kill_output_bytes", self.kill_output_bytes, 1, 1 << 50)
        if not self.cwd.startswith("/"):
            raise ConfigError("command.cwd", self.cwd, "must be an absolute path inside the sandbox")


class Reason(StrEnum):
    """Why a command ended. Only what was observed: never a guess from an exit code."""

    EXIT = "exit"
    """It exited by itself, with `exit_code`."""
    SIGNAL = "signal"
    """A signal that we did not send ended it (`signal`); a self-kill, for example."""
    TIMEOUT = "timeout"
    """`timeout_s` or `cpu_s` was over."""
    OOM = "oom"
    """The kernel's out-of-memory killer struck in the sandbox and the command did not succeed."""
    OUTPUT_LIMIT = "output_limit"
    """A stream produced more than `kill_output_bytes`."""
    DISK = "disk"
    """It failed, and no free block or inode was left in the writable mounts."""
    PIDS = "pids"
    """It failed, and the process limit refused a fork."""
    KILLED = "killed"
    """The caller cancelled it or closed the sandbox."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What one command consumed."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    """User and system CPU seconds of everything the command started, as its cgroup counts them; without
    cgroups (or for one without a leaf) of its first process and the children that this one waited for."""
    peak_memory_bytes: int = 0
    peak_scope: Literal["command", "sandbox", "process"] = "process"
    """`command`: the cgroup's peak, reset before this command; `sandbox`: the cgroup's peak
    while commands overlapped; `process`: largest resident set of one process (no cgroup)."""
    oom_kills: int = 0
    """Of the processes that the command started, those that the kernel killed for memory while it ran. On cgroup v1 a
    sandbox has five accounts: with more commands and background processes of earlier ones at once, those beyond the
    fifth share theirs with the first."""


class Output(msgspec.Struct, frozen=True):
    """A piece of what a command writes, as it was written."""

    stream: Literal["stdout", "stderr"]
    data: bytes
    """Never empty; at most 64 KiB. A character may be split between two pieces."""


class TarReport(msgspec.Struct, frozen=True, kw_only=True):
    """What an upload made."""

    num_files: int
    num_directories: int
    """Those that the tar names; directories made on the way are not counted."""
    num_bytes: int


SkippedKind = Literal["symlink", "fifo", "socket", "device", "unreadable", "too long", "changed", "other"]


class Skipped(msgspec.Struct, frozen=True, kw_only=True):
    """Something in a directory that does not cross the boundary."""

    path: str
    """Relative to that directory."""
    kind: SkippedKind
    """What it is, or why: `unreadable` (its mode forbids it), `too long` (something in that directory has too long a
    path), `changed` (it became something else while it was read)."""


class TarDownload(msgspec.Struct, frozen=True, kw_only=True):
    """A directory from inside, as a tar of regular files and directories."""

    data: bytes
    """A plain tar; names are relative to the directory, and parents come before what lies in them."""
    skipped: tuple[Skipped, ...]
    num_files: int
    num_directories: int


class SandboxUsage(msgspec.Struct, frozen=True, kw_only=True):
    """What a sandbox holds and has used so far; None where this host cannot tell."""

    memory_bytes: int | None
    """Charged to what the sandbox runs, files in the writable mounts and page cache included."""
    peak_memory_bytes: int | None
    """Highest of `memory_bytes` since the sandbox's start."""
    cpu_s: float | None
    """User and system CPU seconds of everything in the sandbox since its start."""
    pids: int | None
    """Processes and threads alive now (without cgroups: processes)."""
    disk_bytes: int | None
    """Taken from the quota of the writable mounts."""
    inodes: int | None
    """Files, directories and links in the writable mounts."""
    num_running: int
    """Commands whose foreground process has not ended; a session's shell counts during a run alone."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one command: a value that trains, never an exception."""

    reason: Reason
    exit_code: int | None
    """Set when the foreground process exited by itself (whatever the reason)."""
    signal: int | None
    """The signal that ended the foreground process."""
    stdout: bytes
    stderr: bytes
    stdout_truncated_bytes: int = 0
    stderr_truncated_bytes: int = 0
    usage: Usage
    unenforced: tuple[str, ...] = ()
    """Limits that this host could not enforce for this sandbox."""

    @property
    def ok(self) -> bool:
        """True for a plain exit with code 0."""
        return self.reason is Reason.EXIT and self.exit_code == 0
