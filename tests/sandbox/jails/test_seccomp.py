"""The system-call filter, judged by running its program on made-up calls."""

from __future__ import annotations

import errno
import struct

import pytest

from sandbox.errors import CapabilityError
from sandbox.jails.seccomp import build_filter

ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def run(program: bytes, data: bytes) -> int:
    """A classic BPF machine with the few instructions that filters use."""
    ops = list(struct.iter_unpack("<HBBI", program))
    at = accumulator = 0
    while True:
        code, if_true, if_false, value = ops[at]
        at += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, value)
        elif code == 0x54:
            accumulator &= value
        elif code == 0x15:
            at += if_true if accumulator == value else if_false
        elif code == 0x35:
            at += if_true if accumulator >= value else if_false
        elif code == 0x06:
            return int(value)
        else:
            raise AssertionError(f"unknown instruction {code:#x}")


def call(machine: str, number: int, *args: int, arch: int | None = None) -> int:
    words = [*args, 0, 0, 0, 0, 0, 0][:6]
    return run(build_filter(machine), struct.pack("<IIQ6Q", number, arch or ARCH[machine], 0, *words))


@pytest.mark.parametrize(
    ("machine", "number", "args", "expected"),
    [
        ("x86_64", 39, (), ALLOW),  # getpid
        ("x86_64", 165, (), ERRNO | errno.EPERM),  # mount
        ("x86_64", 435, (), ERRNO | errno.ENOSYS),  # clone3
        ("x86_64", 56, (0x11,), ALLOW),  # a fork
        ("x86_64", 56, (0x3D0F00,), ALLOW),  # a thread
        ("x86_64", 56, (0x10000011,), ERRNO | errno.EPERM),  # clone with a user namespace
        ("x86_64", 272, (0x10000000,), ERRNO | errno.EPERM),  # unshare
        ("x86_64", 272, (0x200,), ALLOW),
        ("x86_64", 41, (1, 1, 0), ALLOW),  # socket UNIX
        ("x86_64", 41, (16, 3, 0), ALLOW),  # NETLINK_ROUTE
        ("x86_64", 41, (16, 3, 15), ERRNO | errno.EAFNOSUPPORT),  # another netlink
        ("x86_64", 41, (40, 1, 0), ERRNO | errno.EAFNOSUPPORT),  # vsock
        ("x86_64", 16, (0, 0x5412), ERRNO | errno.EPERM),  # ioctl TIOCSTI
        ("x86_64", 16, (0, 0x5401), ALLOW),
        ("x86_64", 425, (), ERRNO | errno.ENOSYS),  # io_uring_setup
        ("x86_64", 9, (0, 4096, 3, 0x22), ALLOW),  # mmap
        ("x86_64", 9, (0, 4096, 3, 0x40022), ERRNO | errno.ENOMEM),  # mmap of huge pages
        ("x86_64", 319, (0, 1), ALLOW),  # memfd_create
        ("x86_64", 319, (0, 5), ERRNO | errno.ENOSYS),  # memfd_create of huge pages
        ("x86_64", 29, (0, 4096, 0o1600), ALLOW),  # shmget
        ("x86_64", 29, (0, 4096, 0o5600), ERRNO | errno.EPERM),  # shmget of huge pages
        ("x86_64", 302, (0, 7, 1, 0), ALLOW),  # prlimit64 of oneself
        ("x86_64", 302, (77, 7, 1, 0), ALLOW),  # of a child
        ("x86_64", 302, (1, 7, 1, 0), ERRNO | errno.EPERM),  # of the agent
        ("x86_64", 144, (1, 5, 0), ERRNO | errno.EPERM),  # sched_setscheduler
        ("x86_64", 141, (0, 0, 19), ALLOW),  # setpriority of oneself
        ("x86_64", 141, (0, 1, 19), ERRNO | errno.EPERM),  # of the agent
        ("x86_64", 141, (2, 0, 19), ERRNO | errno.EPERM),  # of all that this user runs
        ("x86_64", 251, (3, 0, 0), ERRNO | errno.EPERM),  # ioprio_set of all
        ("x86_64", 251, (1, 0, 0), ALLOW),
        ("aarch64", 261, (1, 7, 1, 0), ERRNO | errno.EPERM),  # prlimit64 of the agent
        ("aarch64", 140, (0, 1, 19), ERRNO | errno.EPERM),  # setpriority of the agent
        ("x86_64", 9999, (), ERRNO | errno.ENOSYS),
        ("x86_64", 0x40000027, (), ERRNO | errno.ENOSYS),  # x32
        ("aarch64", 172, (), ALLOW),  # getpid
        ("aarch64", 40, (), ERRNO | errno.EPERM),  # mount
        ("aarch64", 220, (0x20000011,), ERRNO | errno.EPERM),  # clone
        ("aarch64", 222, (0, 4096, 3, 0x40022), ERRNO | errno.ENOMEM),  # mmap of huge pages
        ("aarch64", 198, (38, 5, 0), ERRNO | errno.EAFNOSUPPORT),  # ALG
    ],
)
def test_a_call_gets_the_answer_that_the_table_says(
    machine: str, number: int, args: tuple[int, ...], expected: int
) -> None:
    assert call(machine, number, *args) == expected


def test_a_call_of_another_architecture_kills_the_process() -> None:
    assert call("x86_64", 39, arch=0x40000003) == KILL


def test_a_machine_without_a_table_is_a_capability_error() -> None:
    with pytest.raises(CapabilityError, match="riscv64"):
        build_filter("riscv64")
