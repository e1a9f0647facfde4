"""The floor of isolation: `clone` with every namespace, `execve` of a program, and nothing else.

Run with the program's path, as a process of its own, so that the cloned address space is a bare interpreter's and not
an engine's. Answers as `serving` does, with the seconds from each `clone` to its reaping. No mounts, no uid map, no
filter: nobody could use such a child, and no sandbox can be cheaper. Invariant: no more children at a time than asked
for, all reaped before the answer.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import signal
import sys
import time

_SYS_CLONE = {"x86_64": 56, "aarch64": 220}
_NEWNS, _NEWCGROUP, _NEWUTS, _NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
_NEWUSER, _NEWPID, _NEWNET = 0x10000000, 0x20000000, 0x40000000
_EVERY_NAMESPACE = _NEWNS | _NEWCGROUP | _NEWUTS | _NEWIPC | _NEWUSER | _NEWPID | _NEWNET


def start(number: int, libc: ctypes.PyDLL, program: str) -> int:
    """Clones one child that becomes `program`; returns its process id."""
    # PyDLL keeps the interpreter's lock: the child is the only thread of its process and goes on with it.
    pid: int = libc.syscall(number, _EVERY_NAMESPACE | int(signal.SIGCHLD), 0, 0, 0, 0)
    if pid == 0:
        try:
            os.execv(program, [program])
        finally:
            os._exit(127)
    if pid < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return pid


def batch(number: int, libc: ctypes.PyDLL, program: str, concurrency: int, slice_s: float) -> dict[str, object]:
    """Keeps `concurrency` children going until the slice is over and each place has had one."""
    samples_s: list[float] = []
    started_s: dict[int, float] = {}
    began = time.perf_counter()
    num_started = 0
    while started_s or num_started < concurrency or time.perf_counter() - began < slice_s:
        over = num_started >= concurrency and time.perf_counter() - began >= slice_s
        if len(started_s) < concurrency and not over:
            start_s = time.perf_counter()
            started_s[start(number, libc, program)] = start_s
            num_started += 1
            continue
        pid, status = os.waitpid(-1, 0)
        samples_s.append(time.perf_counter() - started_s.pop(pid))
        if status:
            raise OSError(0, f"{program} ended with status {status}")
    return {"samples_s": samples_s, "wall_s": time.perf_counter() - began}


def main() -> None:
    """Answers batches until stdin ends; an error is answered as `{"error": …}`."""
    number = _SYS_CLONE.get(platform.machine())
    libc = ctypes.PyDLL(None, use_errno=True)
    print("{}", flush=True)
    for line in sys.stdin:
        words = line.split()
        try:
            if number is None:
                raise OSError(0, f"the number of clone is not known on {platform.machine()}")
            answer = batch(number, libc, sys.argv[1], int(words[0]), float(words[1]))
        except OSError as error:
            answer = {"error": f"clone: {error.strerror or error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
