"""Output: bounded memory, bytes intact, what is missing counted exactly, and nobody ever waits for ever."""

from __future__ import annotations

import hashlib
import os

import pytest

from sandbox.sandbox import Sandbox
from sandbox.types import GIB, MIB, Command, Reason
from tests.sandbox.conformance.arena import PATIENCE_S, python, sh, shell
from tests.sandbox.conformance.measure import memory_growth

pytestmark = pytest.mark.anyio

MUCH = 200_000_000
SLACK = 6 * MIB
BYTE_BY_BYTE = "import os, sys\nfor byte in sys.stdin.buffer.read(): os.write(1, bytes([byte]))"


async def test_a_flood_is_cut_at_its_limit_and_the_engine_stays_small(box: Sandbox) -> None:
    cap = 16 * MIB
    flood = "while True: print('x' * 99)"
    with memory_growth() as growth:
        outcome = await box.run(
            python(flood, output_limit_bytes=cap, kill_output_bytes=4 * cap, timeout_s=4 * PATIENCE_S)
        )
    assert outcome.reason is Reason.OUTPUT_LIMIT
    assert len(outcome.stdout) == cap
    assert outcome.stdout_truncated_bytes >= 3 * cap
    assert growth.peak_bytes < 2 * cap + SLACK


async def test_yes_ends_at_the_limit(box: Sandbox) -> None:
    outcome = await box.run(Command(argv=("yes",), output_limit_bytes=1000, timeout_s=PATIENCE_S))
    assert outcome.reason is Reason.OUTPUT_LIMIT
    assert outcome.stdout == b"y\n" * 500
    assert 1 * MIB - 1000 <= outcome.stdout_truncated_bytes < 64 * MIB  # it writes on until the kill is carried out


@pytest.mark.parametrize(
    "script",
    [f"head -c {MUCH} /dev/zero", f"yes '+    a line of a very long diff, and another' | head -c {MUCH}"],
    ids=["zeros", "a diff"],
)
async def test_200_mb_of_output_end_and_every_byte_is_counted(box: Sandbox, script: str) -> None:
    with memory_growth() as growth:
        outcome = await box.run(
            shell(f"{script}; exit 3", output_limit_bytes=1 * MIB, kill_output_bytes=GIB, timeout_s=8 * PATIENCE_S)
        )
    assert (outcome.reason, outcome.exit_code) == (Reason.EXIT, 3)
    assert len(outcome.stdout) == 1 * MIB
    assert len(outcome.stdout) + outcome.stdout_truncated_bytes == MUCH
    assert growth.peak_bytes < 2 * MIB + SLACK


async def test_both_streams_are_read_at_once_and_counted_apart(box: Sandbox) -> None:
    script = "head -c 7000001 /dev/zero & head -c 9000002 /dev/zero >&2; wait"
    outcome = await box.run(shell(script, output_limit_bytes=3000, kill_output_bytes=GIB, timeout_s=PATIENCE_S))
    assert outcome.ok
    assert len(outcome.stdout) + outcome.stdout_truncated_bytes == 7_000_001
    assert len(outcome.stderr) + outcome.stderr_truncated_bytes == 9_000_002


async def test_head_and_tail_are_kept_and_the_middle_counted(box: Sandbox) -> None:
    for keep, size in ((0, 5), (1, 5), (2, 2), (7, 8), (8, 8), (9, 8), (1000, 100_000)):
        data = bytes(number % 251 for number in range(size))
        outcome = await box.run(Command(argv=("cat",), stdin=data, output_limit_bytes=keep))
        kept = min(keep, size)
        head = kept - kept // 2 if keep < size else size
        assert outcome.stdout == data[:head] + data[size - (kept - head) :]
        assert outcome.stdout_truncated_bytes == size - kept


async def test_a_megabyte_of_random_bytes_comes_back_as_it_was(box: Sandbox) -> None:
    data = os.urandom(1_000_000)
    assert (await box.run(Command(argv=("cat",), stdin=data))).stdout == data
    made = await box.run(shell("head -c 1000000 /dev/urandom > r; sha256sum < r; cat r >&2"))
    assert made.stdout.split()[0].decode() == hashlib.sha256(made.stderr).hexdigest()


async def test_a_character_split_over_writes_arrives_whole_and_the_session_lives(box: Sandbox) -> None:
    text = "é".encode() * 300
    outcome = await box.run(python(BYTE_BY_BYTE, stdin=text))
    assert outcome.stdout == text
    assert (await sh(box, "echo alive")).stdout == b"alive\n"


async def test_an_input_that_nobody_reads_holds_nothing_up(box: Sandbox) -> None:
    outcome = await box.run(Command(argv=("true",), stdin=bytes(20 * MIB)))
    assert outcome.ok
    closed = await box.run(shell("exec <&-; sleep 0.2; echo closed", stdin=bytes(20 * MIB)))
    assert closed.stdout == b"closed\n"


async def test_much_input_and_much_output_pass_at_once(box: Sandbox) -> None:
    data = os.urandom(1 * MIB) * 20
    outcome = await box.run(Command(argv=("cat",), stdin=data, output_limit_bytes=32 * MIB, timeout_s=2 * PATIENCE_S))
    assert outcome.stdout == data


async def test_a_command_without_output_streams_ends_like_any_other(box: Sandbox) -> None:
    assert (await sh(box, "exec >&- 2>&-; sleep 0.1; exit 6")).exit_code == 6


async def test_what_comes_before_a_kill_is_kept(box: Sandbox) -> None:
    late = await sh(box, "echo before; echo error >&2; sleep 600", timeout_s=0.5)
    assert (late.reason, late.stdout, late.stderr) == (Reason.TIMEOUT, b"before\n", b"error\n")
