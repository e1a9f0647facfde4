"""The system-call filter of every jail, as classic BPF built in pure Python.

Owns: which calls the sandboxed code may make. Invariant: no call reaches the agent but a signal (which the kernel
keeps from a first process); another ABI is killed, a call newer than this table answers ENOSYS, and whatever libc
probes answers ENOSYS instead of EPERM, so that it falls back.
The filter is installed once, before the agent, and every command inherits it.
"""

from __future__ import annotations

import errno
import platform
import struct

from sandbox.errors import CapabilityError

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# number on x86_64, number on aarch64 (None: the call does not exist there)
_DENIED: dict[str, tuple[int | None, int | None, int]] = {
    "mount": (165, 40, errno.EPERM),
    "umount2": (166, 39, errno.EPERM),
    "pivot_root": (155, 41, errno.EPERM),
    "chroot": (161, 51, errno.EPERM),
    "open_tree": (428, 428, errno.EPERM),
    "move_mount": (429, 429, errno.EPERM),
    "fsopen": (430, 430, errno.EPERM),
    "fsconfig": (431, 431, errno.EPERM),
    "fsmount": (432, 432, errno.EPERM),
    "fspick": (433, 433, errno.EPERM),
    "mount_setattr": (442, 442, errno.EPERM),
    "setns": (308, 268, errno.EPERM),
    "add_key": (248, 217, errno.EPERM),
    "request_key": (249, 218, errno.EPERM),
    "keyctl": (250, 219, errno.EPERM),
    "mq_open": (240, 180, errno.ENOSYS),  # a queue outlives its processes, and nobody inside or outside can list it
    "mq_unlink": (241, 181, errno.ENOSYS),
    "bpf": (321, 280, errno.EPERM),
    "userfaultfd": (323, 282, errno.EPERM),
    "perf_event_open": (298, 241, errno.EPERM),
    "io_uring_setup": (425, 425, errno.ENOSYS),
    "io_uring_enter": (426, 426, errno.ENOSYS),
    "io_uring_register": (427, 427, errno.ENOSYS),
    "clone3": (435, 435, errno.ENOSYS),  # its flags cannot be inspected; libc falls back to clone
    "name_to_handle_at": (303, 264, errno.EPERM),
    "open_by_handle_at": (304, 265, errno.EPERM),
    "kexec_load": (246, 104, errno.EPERM),
    "kexec_file_load": (320, 294, errno.EPERM),
    "init_module": (175, 105, errno.EPERM),
    "finit_module": (313, 273, errno.EPERM),
    "delete_module": (176, 106, errno.EPERM),
    "reboot": (169, 142, errno.EPERM),
    "swapon": (167, 224, errno.EPERM),
    "swapoff": (168, 225, errno.EPERM),
    "acct": (163, 89, errno.EPERM),
    "quotactl": (179, 60, errno.EPERM),
    "quotactl_fd": (443, 443, errno.EPERM),
    "syslog": (103, 116, errno.EPERM),
    "settimeofday": (164, 170, errno.EPERM),
    "clock_settime": (227, 112, errno.EPERM),
    "fanotify_init": (300, 262, errno.EPERM),
    "lookup_dcookie": (212, 18, errno.EPERM),
    "move_pages": (279, 239, errno.EPERM),
    "migrate_pages": (256, 238, errno.EPERM),
    "modify_ldt": (154, None, errno.EPERM),
    "iopl": (172, None, errno.EPERM),
    "ioperm": (173, None, errno.EPERM),
    "uselib": (134, None, errno.ENOSYS),
    "memfd_secret": (447, 447, errno.ENOSYS),
}
_TARGETED = (
    (302, 261),  # prlimit64
    (142, 118),  # sched_setparam
    (144, 119),  # sched_setscheduler
    (203, 122),  # sched_setaffinity
    (314, 274),  # sched_setattr
)
"""Calls that change the process named by their first argument, which needs no more than the same uid."""
_PRIORITIES = (
    ((141, 140), 2),  # setpriority, PRIO_USER
    ((251, 30), 3),  # ioprio_set, IOPRIO_WHO_USER
)
"""Calls that change the one named by their second argument, and what in their first stands for all of a user's."""
_AGENT = 1
"""The first process runs with the uid of the code: starved or limited, it could not tell how that code ended."""
_CLONE = (56, 220)
_UNSHARE = (272, 97)
_SOCKET = (41, 198)
_SOCKETPAIR = (53, 199)
_IOCTL = (16, 29)
_HUGE: tuple[tuple[tuple[int, int], int, int, int], ...] = (
    ((9, 222), 40, 0x40000, errno.ENOMEM),  # mmap, flags, MAP_HUGETLB
    ((319, 279), 24, 0x4, errno.ENOSYS),  # memfd_create, flags, MFD_HUGETLB
    ((29, 194), 32, 0x800, errno.EPERM),  # shmget, flags, SHM_HUGETLB
)
"""Ways to the host's pool of huge pages, which no memory limit counts: call, offset of its flags, flag, answer."""
_FIRST_UNKNOWN = 463
"""Calls from here on are newer than this table (and the x32 ABI's numbers lie above it)."""

_NEW_NAMESPACES = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
_NEW_TIME = 0x80  # in unshare only: clone reads these bits as the exit signal
_FAMILIES = (1, 2, 10)  # UNIX, INET, INET6
_NETLINK = 16  # protocol 0 (route) alone: libc lists interfaces with it
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C

_LD, _AND, _RET = 0x20, 0x54, 0x06
_JEQ, _JGE = 0x15, 0x35
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NR, _ARCH, _ARG0, _ARG1, _ARG2 = 0, 4, 16, 24, 32  # offsets in struct seccomp_data, low words


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)


def _only_for(number: int, body: list[bytes]) -> list[bytes]:
    """Runs `body` (which must return) for one call; others skip it with the number still loaded."""
    return [_op(_JEQ, number, 0, len(body)), *body]


def _fail(error: int) -> bytes:
    return _op(_RET, _ERRNO | error)


def _deny_flags(mask: int, offset: int = _ARG0, error: int = errno.EPERM) -> list[bytes]:
    return [
        _op(_LD, offset),
        _op(_AND, mask),
        _op(_JEQ, 0, 0, 1),
        _op(_RET, _ALLOW),
        _fail(error),
    ]


def _allow_families() -> list[bytes]:
    tests = [op for family in _FAMILIES for op in (_op(_JEQ, family, 0, 1), _op(_RET, _ALLOW))]
    netlink = [_op(_JEQ, _NETLINK, 0, 3), _op(_LD, _ARG2), _op(_JEQ, 0, 0, 1), _op(_RET, _ALLOW)]
    return [_op(_LD, _ARG0), *tests, *netlink, _fail(errno.EAFNOSUPPORT)]


def _spare_agent(offset: int, all_of_user: int | None = None) -> list[bytes]:
    whole = [] if all_of_user is None else [_op(_LD, _ARG0), _op(_JEQ, all_of_user, 0, 1), _fail(errno.EPERM)]
    return [*whole, _op(_LD, offset), _op(_JEQ, _AGENT, 0, 1), _fail(errno.EPERM), _op(_RET, _ALLOW)]


def _deny_terminal_injection() -> list[bytes]:
    return [
        _op(_LD, _ARG1),
        _op(_JEQ, _TIOCSTI, 2, 0),
        _op(_JEQ, _TIOCLINUX, 1, 0),
        _op(_RET, _ALLOW),
        _fail(errno.EPERM),
    ]


def build_filter(machine: str | None = None) -> bytes:
    """The filter program as the bytes of `struct sock_filter[]`, for `bwrap --seccomp`.

    Args:
        machine: `x86_64` or `aarch64`; None for this machine.

    Raises:
        CapabilityError: no table for that machine.
    """
    machine = machine or platform.machine()
    if machine not in _AUDIT_ARCH:
        raise CapabilityError(f"no system-call table for {machine}", "use an x86_64 or aarch64 machine")
    column = 0 if machine == "x86_64" else 1
    program = [
        _op(_LD, _ARCH),
        _op(_JEQ, _AUDIT_ARCH[machine], 1, 0),
        _op(_RET, _KILL),
        _op(_LD, _NR),
        _op(_JGE, _FIRST_UNKNOWN, 0, 1),
        _fail(errno.ENOSYS),
    ]
    for row in _DENIED.values():
        number = row[column]
        if number is not None:
            program += _only_for(number, [_fail(int(row[2] or errno.EPERM))])
    program += _only_for(_CLONE[column], _deny_flags(_NEW_NAMESPACES))
    program += _only_for(_UNSHARE[column], _deny_flags(_NEW_NAMESPACES | _NEW_TIME))
    program += _only_for(_SOCKET[column], _allow_families())
    program += _only_for(_SOCKETPAIR[column], _allow_families())
    program += _only_for(_IOCTL[column], _deny_terminal_injection())
    for numbers in _TARGETED:
        program += _only_for(numbers[column], _spare_agent(_ARG0))
    for numbers, all_of_user in _PRIORITIES:
        program += _only_for(numbers[column], _spare_agent(_ARG1, all_of_user))
    for numbers, offset, flag, error in _HUGE:
        program += _only_for(numbers[column], _deny_flags(flag, offset, error))
    program.append(_op(_RET, _ALLOW))
    return b"".join(program)
