"""The doctor: starts a real sandbox, looks around in it, and says what holds on this host and what does not.

Owns: nothing that outlives `examine`. Invariant: `isolates` is True only after a sandbox really ran here and every
check inside it passed; a limit counts as enforced only when the host that ran the sandbox reported it so.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

import anyio
import msgspec

from sandbox.cgroup.types import LIMIT_NAMES
from sandbox.errors import SandboxError
from sandbox.estate.state import default_state_dir
from sandbox.health.capabilities import (
    Capability,
    cgroup_capability,
    cgroup_remedy,
    controller_remedy,
    interpreter_capability,
    jail_capabilities,
    kernel_capability,
    namespace_capabilities,
    native_capability,
    seccomp_capability,
    shared_uid_capability,
    state_dir_capability,
    uid_capability,
)
from sandbox.host import SandboxConfig, SandboxHost
from sandbox.types import IMAGE_ISOLATION, Command, JailName, SandboxSpec

PROBE_TIMEOUT_S = 20.0
_LOOK_AROUND = """
echo uid=$(id -u)
grep -E '^(CapEff|CapBnd|NoNewPrivs|Seccomp):' /proc/self/status
echo interfaces=$(sed -n 's/^ *\\([^ :]*\\):.*/\\1/p' /proc/net/dev)
for path in /usr /etc /opt; do if [ -d $path ] && (: > $path/.probe) 2>/dev/null; then echo writable=$path; fi; done
for path in /etc/shadow /root /home /var /run /sys/fs/cgroup/cgroup.procs; do
  if [ -e $path ] && [ -n "$(ls -A $path 2>/dev/null)" ]; then echo seen=$path; fi
done
echo null=$(stat -c %d:%i /dev/null)
echo processes=$(ls -d /proc/[0-9]* | wc -l)
"""


BACKENDS = {
    "hybrid": "cgroup v1 limits with the v2 tree (hybrid)",
    "v2": "cgroup v2",
    "none": "no cgroups: resource limits of single processes only",
}
_BEST_EFFORT = {
    "memory": "each process is held to it alone (RLIMIT_DATA)",
    "pids": "counted over all sandboxes of this user (RLIMIT_NPROC)",
}


class LimitReport(msgspec.Struct, frozen=True, kw_only=True):
    """Whether one limit holds on this host."""

    name: str
    enforced: bool
    how: str
    remedy: str = ""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What the doctor found."""

    isolates: bool
    """A sandbox ran, and what it saw from inside was as it must be."""
    failure: str = ""
    """Why not, in the fault's own words."""
    backend: str = "unknown"
    """What enforces limits here, such as `cgroup v1+v2`."""
    jail: JailName = "bubblewrap"
    """The tool that built the sandbox."""
    state_dir: str
    checks: tuple[Capability, ...] = ()
    """What was seen from inside the sandbox."""
    limits: tuple[LimitReport, ...] = ()
    """Each limit, and `image_isolation`."""
    capabilities: tuple[Capability, ...] = ()
    """What the host offers, seen from outside."""
    probe_s: float = 0.0
    """Wall time of starting the host, one sandbox and one command, and closing all of it."""


async def examine(state_dir: Path | None = None, jail: JailName = "bubblewrap") -> Report:
    """Probe the host and run one sandbox of that jail on it; never raises for what it finds, only for bugs.

    Cancelling it closes the sandbox.
    """
    directory = state_dir or default_state_dir()
    capabilities = await anyio.to_thread.run_sync(look_outside, directory, jail)
    started = time.monotonic()
    try:
        with anyio.fail_after(PROBE_TIMEOUT_S):
            async with SandboxHost.start(SandboxConfig(state_dir=str(directory))) as host:
                backend, reasons, note = host.backend.name, host.backend_reasons, host.backend.note
                if host.shared_uid:
                    capabilities = _replace(capabilities, shared_uid_capability(host.shared_uid))
                async with host.acquire(SandboxSpec(jail=jail)) as box:
                    shared = host.image_shared
                    outcome = await box.run(Command(argv=("/bin/sh", "-c", _LOOK_AROUND), cwd="/workspace"))
    except (SandboxError, TimeoutError, OSError) as error:
        failure = str(error) or f"no answer within {PROBE_TIMEOUT_S:g} s"
        return Report(isolates=False, failure=failure, jail=jail, state_dir=str(directory), capabilities=capabilities)
    seen = outcome.stdout.decode("utf-8", "replace")
    checks = look_inside(seen)
    return Report(
        isolates=all(check.ok for check in checks),
        failure="" if outcome.ok else outcome.stderr.decode("utf-8", "replace"),
        backend=BACKENDS[backend] + (f" ({note})" if note else ""),
        jail=jail,
        state_dir=str(directory),
        checks=checks,
        limits=(*limit_reports(outcome.unenforced, reasons, backend), image_report(shared)),
        capabilities=(*capabilities, device_capability(seen, os.stat("/dev/null"))),
        probe_s=time.monotonic() - started,
    )


def _replace(capabilities: tuple[Capability, ...], found: Capability) -> tuple[Capability, ...]:
    """What was found by really doing it, in place of what was expected."""
    return tuple(found if known.name == found.name else known for known in capabilities)


def look_outside(state_dir: Path, jail: JailName = "bubblewrap") -> tuple[Capability, ...]:
    """Every capability of the host; blocks for some tens of milliseconds."""
    return (
        kernel_capability(),
        *namespace_capabilities(state_dir),
        seccomp_capability(),
        *jail_capabilities(jail),
        native_capability(),
        cgroup_capability(),
        uid_capability(),
        state_dir_capability(state_dir),
        interpreter_capability(state_dir),
    )


def look_inside(text: str) -> tuple[Capability, ...]:
    """Judge what the sandbox's own shell printed about itself."""
    facts: dict[str, list[str]] = {}
    for line in text.splitlines():
        name, _, value = line.replace(":", "=", 1).partition("=")
        facts.setdefault(name, []).append(value.strip())

    def one(name: str) -> str:
        return facts.get(name, [""])[0]

    seen, writable = facts.get("seen", []), facts.get("writable", [])
    rows = (
        ("unprivileged", one("uid") not in ("", "0"), f"uid {one('uid') or 'unknown'}"),
        ("no capabilities", set(one("CapEff")) == {"0"} and set(one("CapBnd")) == {"0"}, f"effective {one('CapEff')}"),
        ("no new privileges", one("NoNewPrivs") == "1", f"NoNewPrivs {one('NoNewPrivs')}"),
        ("system call filter", one("Seccomp") == "2", f"mode {one('Seccomp')}"),
        ("no network", one("interfaces").split() == ["lo"], f"interfaces: {one('interfaces')}"),
        ("read-only image", bool(one("uid")) and not writable, ", ".join(writable) or "nothing of it can be written"),
        ("host hidden", bool(one("uid")) and not seen, ", ".join(seen) or "no accounts, homes or services to be seen"),
        ("own processes", one("processes").isdigit() and int(one("processes")) < 16, f"{one('processes')} visible"),
    )
    remedy = "this is a fault of the sandbox on this host; do not run hostile code here"
    return tuple(
        Capability(name=name, ok=ok, detail=detail, remedy="" if ok else remedy, required=True)
        for name, ok, detail in rows
    )


def device_capability(text: str, host_null: os.stat_result) -> Capability:
    """Whether the sandbox's device nodes are its own; judged by what its shell printed about /dev/null."""
    name = "own device nodes"
    if f"null={host_null.st_dev}:{host_null.st_ino}" not in text.splitlines():
        return Capability(name=name, ok=True, detail="null, zero, full and random are each sandbox's own")
    detail = "siblings feel each other's locks on /dev/null and the like, and can watch their use"
    remedy = "run as the host's root, with a kernel that lets it make device nodes (Linux 5.2, CAP_MKNOD)"
    return Capability(name=name, ok=False, detail=detail, remedy=remedy)


def limit_reports(unenforced: tuple[str, ...], reasons: Mapping[str, str], backend: str) -> tuple[LimitReport, ...]:
    """One row per limit: those of the cgroup backend as the host reported them, then those that always hold.

    Args:
        unenforced: as the outcome of a command named them.
        reasons: for each cgroup backend that does not work here, or not for every limit, why.
        backend: the one that is in use.
    """
    always = {
        "open_files": "resource limit",
        "file_size": "resource limit",
        "cpu_time": "resource limit of each process, in whole seconds"
        + ("" if backend == "none" else "; the command's cgroup is watched and killed"),
        "wall_time": "timer, then every process of the command is killed",
        "output": "pipes are read to the limit, then the command is killed",
    }
    rows = []
    for name in LIMIT_NAMES:
        enforced = name not in unenforced
        how = "size of the writable mounts" if name == "disk" else BACKENDS.get(backend, backend)
        remedy = ""
        if not enforced:
            how = "; ".join(f"{tried}: {why}" for tried, why in reasons.items() if backend in (tried, "none"))
            how = (how or "no cgroups") + (f"; {_BEST_EFFORT[name]}" if name in _BEST_EFFORT else "")
            remedy = cgroup_remedy() if backend == "none" else controller_remedy((name,))
        rows.append(LimitReport(name=name, enforced=enforced, how=how, remedy=remedy))
    rows += [LimitReport(name=name, enforced=True, how=how) for name, how in always.items()]
    return tuple(rows)


def image_report(shared: str) -> LimitReport:
    """Whether siblings share more of an image than its bytes; `shared` says why, and is empty where they do not."""
    if not shared:
        how = "each sandbox has overlays of its own over the image"
        return LimitReport(name=IMAGE_ISOLATION, enforced=True, how=how)
    how = f"{shared}; siblings feel each other's file locks on the image, and can watch which of its files are opened"
    remedy = "use Linux 5.11 or later with the overlay module, and an image without mounts below it"
    return LimitReport(name=IMAGE_ISOLATION, enforced=False, how=how, remedy=remedy)
