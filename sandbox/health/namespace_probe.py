"""Tries in throw-away children what a jail will need from the kernel, and prints what happened as JSON.

Owns: its own forked children, whose namespaces die with them; run as a program with the standard library alone (`python
-I -S namespace_probe.py [UID [DIRECTORY]]`), never imported by the engine's process. Invariant: nothing outside those
namespaces changes. With a UID (root only) the attempts run as that user, as a sandbox will: some hosts let root make a
user namespace and refuse everyone else.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import sys
from collections.abc import Callable

CLONE_NEWNS, CLONE_NEWUSER = 0x0002_0000, 0x1000_0000
OTHER_NAMESPACES = {
    "pid": 0x2000_0000,
    "network": 0x4000_0000,
    "ipc": 0x0800_0000,
    "uts": 0x0400_0000,
    "cgroup": 0x0200_0000,
}
MS_REC_PRIVATE = 0x4000 | 0x40000
PR_SET_DUMPABLE = 4
SYS_OPEN_TREE, SYS_MOUNT_SETATTR = 428, 442
OPEN_TREE_CLONE, AT_EMPTY_PATH, AT_FDCWD, MOUNT_ATTR_IDMAP = 1, 0x1000, -100, 0x0010_0000
SYS_MOVE_MOUNT, MOVE_MOUNT_F_EMPTY_PATH = 429, 4
SCRATCH = "/tmp"
OVERLAY = "upperdir=upper,workdir=work,userxattr"

DIRECTORY = sys.argv[2] if len(sys.argv) > 2 else "/usr"
libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> int:
    """Raise OSError, naming the call, for a negative result."""
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def enter_user_namespace(uid: int | None) -> None:
    """A user and a mount namespace in which this process is uid 0."""
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        # Changing uid made /proc/self belong to root; the maps below must be ours to write.
        check(libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0), "prctl")
    outer_uid, outer_gid = os.getuid(), os.getgid()
    check(libc.unshare(CLONE_NEWUSER | CLONE_NEWNS), "unshare")
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {outer_uid} 1"), ("gid_map", f"0 {outer_gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def mount_scratch() -> None:
    """A tmpfs over /tmp, seen by this process alone."""
    check(libc.mount(None, b"/", None, MS_REC_PRIVATE, None), "mount (private)")
    check(libc.mount(b"tmpfs", SCRATCH.encode(), b"tmpfs", 0, b"size=1m"), "mount (tmpfs)")


def try_user_namespace(uid: int | None) -> None:
    """A user namespace whose owner may mount."""
    enter_user_namespace(uid)
    mount_scratch()


def try_other_namespaces(uid: int | None) -> None:
    """Process, network, IPC, host name and cgroup namespaces inside a user namespace."""
    enter_user_namespace(uid)
    for name, flag in OTHER_NAMESPACES.items():
        check(libc.unshare(flag), f"unshare ({name})")


def try_overlay(uid: int | None) -> None:
    """An overlay mount inside a user namespace."""
    enter_user_namespace(uid)
    mount_scratch()
    for name in ("lower", "upper", "work", "merged"):
        os.mkdir(f"{SCRATCH}/{name}")
    options = f"lowerdir={SCRATCH}/lower,upperdir={SCRATCH}/upper,workdir={SCRATCH}/work,userxattr"
    check(libc.mount(b"overlay", f"{SCRATCH}/merged".encode(), b"overlay", 0, options.encode()), "mount (overlay)")


def try_idmapped_mount(uid: int | None) -> None:
    """An id-mapped copy of a mount (root only; nothing is attached anywhere)."""
    idmapped_copy(b"/usr", uid)


def try_layers(uid: int | None) -> None:
    """A sandbox's workspace over a directory where layers are to lie: id-mapped, below an overlay that can be
    written.
    """
    tree = idmapped_copy(os.fsencode(DIRECTORY), uid)
    enter_user_namespace(uid)
    mount_scratch()
    os.chdir(SCRATCH)
    for name in ("lower", "upper", "work", "merged"):
        os.mkdir(name)
    check(libc.syscall(SYS_MOVE_MOUNT, tree, b"", AT_FDCWD, b"lower", MOVE_MOUNT_F_EMPTY_PATH), "move_mount")
    check(libc.mount(b"overlay", b"merged", b"overlay", 0, f"lowerdir=lower,{OVERLAY}".encode()), "mount (overlay)")
    os.mkdir("merged/.rollout-probe")
    try:
        os.setxattr("upper", "user.rollout", b"y")
    except OSError as error:
        raise OSError(
            error.errno, f"tmpfs has no attributes of users, which came with Linux 6.6: {error.strerror}"
        ) from None


def idmapped_copy(directory: bytes, uid: int | None) -> int:
    """A detached copy of the mount of that directory, in which root's files belong to that user."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        code = libc.unshare(CLONE_NEWUSER)
        os.write(writing, b"n" if code else b"y")
        libc.alarm(10)  # should our parent be killed
        libc.pause()  # until killed below
    try:
        os.close(writing)
        if os.read(reading, 1) != b"y":
            raise OSError(errno.EPERM, "unshare: refused")
        for name in ("uid_map", "gid_map"):
            with open(f"/proc/{child}/{name}", "w") as file:
                file.write(f"0 {uid or 1000} 1")
        namespace = os.open(f"/proc/{child}/ns/user", os.O_RDONLY)
        tree = check(libc.syscall(SYS_OPEN_TREE, AT_FDCWD, directory, OPEN_TREE_CLONE), "open_tree")
        attributes = (ctypes.c_uint64 * 4)(MOUNT_ATTR_IDMAP, 0, 0, namespace)
        size = ctypes.c_size_t(ctypes.sizeof(attributes))
        check(libc.syscall(SYS_MOUNT_SETATTR, tree, b"", AT_EMPTY_PATH, attributes, size), "mount_setattr")
        return tree
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


ATTEMPTS: dict[str, Callable[[int | None], None]] = {
    "user_namespace": try_user_namespace,
    "other_namespaces": try_other_namespaces,
    "overlay": try_overlay,
    "idmapped_mount": try_idmapped_mount,
    "layers": try_layers,
}


def attempt(action: Callable[[int | None], None], uid: int | None) -> str | None:
    """Run `action` in a child of its own; None when it worked, else why not."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            action(uid)
        except OSError as error:
            os.write(writing, (error.strerror or str(error)).encode())
            os._exit(1)
        os._exit(0)
    os.close(writing)
    words = os.read(reading, 4096).decode()
    os.close(reading)
    _, status = os.waitpid(child, 0)
    return None if status == 0 else words or f"ended with status {status}"


def main() -> None:
    """Print `{attempt: null | reason}` on stdout."""
    uid = int(sys.argv[1]) if len(sys.argv) > 1 else None
    print(json.dumps({name: attempt(action, uid) for name, action in ATTEMPTS.items()}))


if __name__ == "__main__":
    main()
