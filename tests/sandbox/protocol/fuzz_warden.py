"""Broken frames for wardens, sent from inside a sandbox: what they make, write, remove and execute stays in there.

Usage: python -m tests.sandbox.protocol.fuzz_warden NATIVE SEED NUM_FRAMES, in an empty directory. Prints one JSON
object; exits 1, with the words in `problems`, when a warden ended otherwise than it should or left a process.
"""

from __future__ import annotations

import array
import json
import os
import random
import select
import socket
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from sandbox.protocol.wire import Kind, Tag, decode, encode, number, numbered, rlimit, text
from tests.sandbox.protocol.mutation import mutated

PER_WARDEN = 150
READY, BOUND = 65, 68
EXIT_S = 40.0
NUM_PLACES = 6
_NAME = b"rollout-"


def _quoted(frame: bytes) -> str:
    """Words of a shell that write one frame to stderr, which is the warden's socket."""
    return "printf '" + "".join(f"\\{byte:03o}" for byte in frame) + "' >&2"


def _tools(chance: random.Random, native: str) -> list[list[str]]:
    """Stand-ins for jail tools: some end, some say they are agents, some talk nonsense to the warden."""
    spoken = [encode(Kind.STARTED, 0), encode(Kind.OWN, 0, [text(Tag.TEXT, "words")])]
    spoken = [READY.to_bytes(2, "little").join((frame[:6], frame[8:])) for frame in spoken]
    broken = [_quoted(frame[:400]) for frame in mutated(chance, spoken, 3, (READY, BOUND))]
    bound = BOUND.to_bytes(2, "little").join((spoken[0][:6], spoken[0][8:]))
    return [
        ["/bin/true"],
        [native, "agent", "3"],
        ["/bin/sh", "-c", f"{_quoted(spoken[0])}; exec sleep 0.02"],
        ["/bin/sh", "-c", f"{_quoted(spoken[0])}; {_quoted(bound)}; {_quoted(bound)}; exec sleep 0.02"],
        ["/bin/sh", "-c", "; ".join((*broken, "echo words >&2", "sleep 0.01 & exec sleep 0.02"))],
        ["/bin/sh", "-c", "exec sleep 5"],
    ]


def _frames(chance: random.Random, native: str, ident: int) -> list[bytes]:
    place = str(Path.cwd() / f"c{chance.randrange(NUM_PLACES)}")
    words = [text(Tag.ARGV, word) for word in chance.choice(_tools(chance, native))]
    common = [
        *(text(Tag.DIR, place), text(Tag.SET, f"{place}.value", "12"), text(Tag.JOIN, f"{place}.procs")),
        *(
            number(Tag.AT, 3),
            numbered(Tag.OPEN, 4, f"{place}.value"),
            rlimit(4, 1, 1),
            text(Tag.ENV, "PATH=/bin:/usr/bin"),
        ),
        *(text(Tag.TMPFS, "/tmp", "size=65536"), numbered(Tag.BIND, 0o755, "w", "/tmp")),
    ]
    odd = [number(Tag.IDS, 1000, 1000), text(Tag.COVER, "/tmp"), text(Tag.SEAL, "/"), text(Tag.DEVICE, "/dev/null")]
    return [
        encode(Kind.START, ident, [*words, *common]),
        encode(Kind.START, ident, [*words, *common]),
        encode(Kind.START, ident, [*words, *common, *odd]),
        encode(Kind.RELEASE, ident, [text(Tag.KILL, f"{place}.value"), text(Tag.REMOVE, place)]),
        encode(Kind.RELEASE, ident),
        encode(Kind.OWN, 0, [text(Tag.DIR, place), text(Tag.PATH, f"{place}.absent")]),
    ]


def _tidy() -> None:
    for index in range(NUM_PLACES):
        for suffix in ("value", "procs"):
            Path(f"c{index}.{suffix}").write_text("")


def _descendants() -> list[int]:
    """Processes here that are neither this one, nor above it, nor the sandbox's own."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) in (1, os.getpid(), os.getppid()):
            continue
        with suppress(OSError):
            if " Z " not in (entry / "stat").read_text() and not (entry / "comm").read_bytes().startswith(_NAME):
                found.append(int(entry.name))
    return found


class Attack:
    """Frames for one warden after the other."""

    def __init__(self, native: str, seed: int) -> None:
        self._native = native
        self._seed = seed
        self.answers: Counter[str] = Counter()
        self.problems: list[str] = []
        self.num_frames = 0
        self.num_wardens = 0
        reader, writer = os.pipe()
        self._spare = [os.open("/dev/null", os.O_RDWR), reader, writer]

    def one_warden(self) -> None:
        """Starts a warden, sends it frames until it has enough (or of it), and waits for its end."""
        self.num_wardens += 1
        chance = random.Random(f"{self._seed}-{self.num_wardens}")
        _tidy()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs, open("/dev/null") as lock, open("stderr", "w+b") as stderr:
            argv = [self._native, "warden", str(theirs.fileno()), str(lock.fileno())]
            warden = subprocess.Popen(argv, pass_fds=(theirs.fileno(), lock.fileno()), stderr=stderr, env={})
            theirs.close()
            ours.settimeout(EXIT_S)
            try:
                hello = ours.recv(65_536)
                if not hello or decode(hello).kind != Kind.HELLO:
                    self.problems.append(f"warden {self.num_wardens} said no hello")
                self._send_all(chance, ours)
            except OSError:  # the warden has ended over a frame, as it may
                self.answers["ended"] += 1
            ours.close()
            try:
                code = warden.wait(EXIT_S)
            except subprocess.TimeoutExpired:
                warden.kill()
                code = warden.wait()
            stderr.seek(0)
            words = stderr.read().decode(errors="replace")
        if code not in (0, 1) or words:  # 1: what it was told to remove cannot be removed
            self.problems.append(f"warden {self.num_wardens} of seed {self._seed} ended with {code}: {words}")
        if left := _descendants():
            self.problems.append(f"warden {self.num_wardens} of seed {self._seed} left processes {left}")
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, 9)

    def _send_all(self, chance: random.Random, end: socket.socket) -> None:
        kinds = [int(kind) for kind in Kind]
        for index in range(PER_WARDEN):
            frames = _frames(chance, self._native, chance.randrange(12))
            shaped = index < PER_WARDEN - 3
            frame = next(mutated(chance, frames, 1, kinds, shaped=shaped))
            fds = array.array("i", [chance.choice(self._spare) for _ in range(chance.choice((0, 1, 1, 1, 2, 64, 65)))])
            if len(fds) > 64 and index < PER_WARDEN - 20:
                fds = fds[:3]
            end.sendmsg([frame[:190_000]], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)] if fds else [])
            self.num_frames += 1
            self._read_answers(end)

    def _read_answers(self, end: socket.socket) -> None:
        while select.select([end], [], [], 0)[0]:
            data = end.recv(65_536)
            if not data:
                raise ConnectionResetError
            answer = decode(data)
            self.answers[Kind(answer.kind).name] += 1


def main(native: str, seed: str, num_frames: str) -> int:
    """Attacks until so many frames are sent."""
    attack = Attack(native, int(seed))
    started_s = time.monotonic()
    while attack.num_frames < int(num_frames) and not attack.problems:
        attack.one_warden()
    report = {
        "frames": attack.num_frames,
        "wardens": attack.num_wardens,
        "answers": attack.answers,
        "wall_s": round(time.monotonic() - started_s, 1),
        "problems": attack.problems,
    }
    print(json.dumps(report))
    return 1 if attack.problems else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
