"""The parts of the C helper, tested in C under the sanitizers; both decoders on the same hundred thousand frames."""

from __future__ import annotations

import random
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from sandbox.build import NATIVE
from sandbox.errors import ProtocolError
from sandbox.protocol.wire import MAX_FRAME_BYTES, Kind, Tag, decode, encode, number, numbered, rlimit, text
from tests.sandbox.protocol.fuzzing import seed
from tests.sandbox.protocol.mutation import mutated
from tests.sandbox.sanitizers import SOURCES, compile_sanitized, require_sanitizers

NUM_FRAMES = 100_000
COMMAND_PARTS = ("wire", "transfer", "archive", "archive_io", "archive_out", "session")
PARTS = {
    "test_wire": ("wire",),
    "test_command": COMMAND_PARTS,
    "test_files": ("wire", "files", "transfer"),
    "test_archive": ("archive", "archive_io", "archive_out"),
    "test_jail": ("wire", "files", "jail"),
    "test_sweep": ("wire",),
}
FRAMES = (
    encode(
        Kind.START,
        7,
        [
            *(text(Tag.DIR, "/c/a"), text(Tag.SET, "/c/a/pids.max", "12"), text(Tag.JOIN, "/c/a/cgroup.procs")),
            *(number(Tag.IDS, 700_001, 700_001), numbered(Tag.OPEN, 4, "/filter"), number(Tag.AT, 3)),
            *(text(Tag.TMPFS, "/tmp", "size=1,mode=0755"), numbered(Tag.BIND, 0o755, "w", "/workspace")),
            *(text(Tag.ARGV, "/bin/jail"), text(Tag.ARGV, "--agent"), text(Tag.ENV, "A=b")),
        ],
    ),
    encode(Kind.RELEASE, 7, [text(Tag.KILL, "/c/a/cgroup.kill"), text(Tag.REMOVE, "/c/a")]),
    encode(
        Kind.RUN,
        8,
        [
            *(text(Tag.ARGV, "sh"), text(Tag.ARGV, "-c"), text(Tag.ARGV, "true"), text(Tag.ENV, "PATH=/bin")),
            *(text(Tag.CWD, "/workspace"), number(Tag.STDIO, 3), rlimit(7, 64, 64), number(Tag.KEEPER, 1)),
        ],
    ),
    encode(Kind.KILL, 8),
    encode(Kind.RUN, 9, [text(Tag.ARGV, "sh"), number(Tag.STDIO, 5), number(Tag.HOLDER, 2), number(Tag.KEEPER, 1)]),
    encode(Kind.PREPARE, 10),
)


def compiled(name: str, parts: tuple[str, ...], folder: Path) -> Path:
    require_sanitizers()
    program = folder / name
    compile_sanitized(program, [SOURCES / f"{name}.c", *(NATIVE / f"{part}.c" for part in parts)])
    return program


@pytest.mark.parametrize("name", PARTS)
def test_a_part_keeps_its_rules_under_the_sanitizers(name: str, tmp_path: Path) -> None:
    command = [str(compiled(name, PARTS[name], tmp_path))]
    if name == "test_sweep":  # it kills everything below pid 1, so it is pid 1 of a namespace
        unshare = shutil.which("unshare")
        if unshare is None:
            pytest.skip("no unshare (util-linux) on this host")
        # The namespace's end is the launcher's: whatever survives a failed sweep dies with it.
        command = [unshare, "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc", *command]
        probe = subprocess.run([*command[:-1], "true"], capture_output=True, text=True, timeout=10)
        if probe.returncode != 0:
            pytest.skip(f"no user and pid namespaces here: {probe.stderr.strip()}")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stderr) == (0, ""), f"after {done.stdout}: {done.stderr}"
    assert len(done.stdout.split()) >= 3


def test_a_broken_rule_is_seen(tmp_path: Path) -> None:
    """The programs end with a failure when a check fails, and when a sanitizer finds something."""
    require_sanitizers()
    source = tmp_path / "planted.c"
    planted = """
#include "check.h"
static void passes(void) { CHECK(1); }
static volatile char *volatile block;
int main(int length, char **words) { RUN(passes); block = malloc((size_t)length); WRONG; return words == NULL; }
"""
    for statement, words in (("block[length] = 1", "heap-buffer-overflow"), ("block = NULL", "LeakSanitizer")):
        source.write_text(planted.replace("WRONG", statement))
        compile_sanitized(tmp_path / "planted", [source])
        done = subprocess.run([tmp_path / "planted"], capture_output=True, text=True, timeout=60)
        assert done.returncode != 0
        assert words in done.stderr
    source.write_text('#include "check.h"\nint main(void) { CHECK(1 == 2); return 0; }\n')
    compile_sanitized(tmp_path / "planted", [source])
    done = subprocess.run([tmp_path / "planted"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, "not so: 1 == 2" in done.stderr) == (1, True)


def accepted(frame: bytes) -> bool:
    if len(frame) > MAX_FRAME_BYTES:
        return False
    try:
        decode(frame)
    except ProtocolError:
        return False
    return True


def test_both_sides_accept_the_same_frames_of_a_hundred_thousand(tmp_path: Path) -> None:
    print(f"seed {seed()}: {NUM_FRAMES} frames for both decoders")
    frames = list(mutated(random.Random(seed()), FRAMES, NUM_FRAMES, [int(kind) for kind in Kind]))
    program = compiled("decode_frames", COMMAND_PARTS, tmp_path)
    stream = b"".join(struct.pack("<I", len(frame)) + frame for frame in frames)
    done = subprocess.run([program], input=stream, capture_output=True, timeout=100)
    assert done.returncode == 0, f"seed {seed()}: {done.stderr.decode(errors='replace')}"
    ours = [accepted(frame) for frame in frames]
    assert [answer == ord("1") for answer in done.stdout] == ours, f"seed {seed()}"
    assert NUM_FRAMES // 3 < sum(ours) < NUM_FRAMES
