"""Output taken piece by piece while the command runs: the same bytes, the same counts, bounded by its reader."""

from __future__ import annotations

import hashlib
import os

import anyio
import pytest

from sandbox.commands.process import Process
from sandbox.sandbox import Sandbox
from sandbox.types import GIB, MIB, Command, Reason
from tests.sandbox.conformance.arena import PATIENCE_S, names_inside, python, sh, shell
from tests.sandbox.conformance.measure import memory_growth

pytestmark = pytest.mark.anyio

MUCH = 200_000_000
SLACK = 6 * MIB
BYTE_BY_BYTE = "import os, sys\nfor byte in sys.stdin.buffer.read(): os.write(1, bytes([byte]))"


async def collect(process: Process) -> dict[str, bytes]:
    seen = {"stdout": bytearray(), "stderr": bytearray()}
    async for piece in process.output():
        seen[piece.stream] += piece.data
    return {name: bytes(data) for name, data in seen.items()}


@pytest.mark.parametrize(
    "script",
    [f"head -c {MUCH} /dev/zero", f"yes '+    a line of a very long diff, and another' | head -c {MUCH}"],
    ids=["zeros", "a diff"],
)
async def test_200_mb_of_output_pass_through_and_the_engine_stays_small(box: Sandbox, script: str) -> None:
    command = shell(f"{script}; exit 3", output_limit_bytes=MIB, kill_output_bytes=GIB, timeout_s=8 * PATIENCE_S)
    total = 0
    with memory_growth() as growth:
        async with box.start(command, output="stream") as process:
            async for piece in process.output():
                total += len(piece.data)
            outcome = await process.wait()
    assert total == MUCH
    assert (outcome.reason, outcome.exit_code) == (Reason.EXIT, 3)
    assert len(outcome.stdout) + outcome.stdout_truncated_bytes == MUCH
    assert growth.peak_bytes < 2 * MIB + SLACK


async def test_yes_ends_at_the_limit_also_when_it_is_read_as_it_comes(box: Sandbox) -> None:
    command = Command(argv=("yes",), output_limit_bytes=1000, kill_output_bytes=3 * MIB, timeout_s=PATIENCE_S)
    async with box.start(command, output="stream") as process:
        seen = await collect(process)
        outcome = await process.wait()
    assert outcome.reason is Reason.OUTPUT_LIMIT
    assert len(seen["stdout"]) >= 3 * MIB
    assert set(seen["stdout"]) == set(b"y\n")


async def test_a_reader_that_pauses_stops_its_writer_and_memory_stays_bounded(box: Sandbox) -> None:
    command = Command(argv=("yes",), output_limit_bytes=1000, kill_output_bytes=GIB, timeout_s=PATIENCE_S)
    with memory_growth() as growth:
        async with box.start(command, output="stream") as process:
            assert (await anext(process.output())).data.startswith(b"y\n")
            await anyio.sleep(0.5)
            assert (await sh(box, "echo beside")).stdout == b"beside\n"
            await process.kill()
            outcome = await process.wait()
    assert outcome.reason is Reason.KILLED
    assert growth.peak_bytes < SLACK
    assert await names_inside(box) == []


async def test_random_bytes_and_split_characters_arrive_as_they_were(box: Sandbox) -> None:
    data = os.urandom(1_000_000)
    async with box.start(Command(argv=("cat",), stdin=data), output="stream") as process:
        seen = await collect(process)
    assert hashlib.sha256(seen["stdout"]).digest() == hashlib.sha256(data).digest()
    text = "é".encode() * 300
    async with box.start(python(BYTE_BY_BYTE, stdin=text), output="stream") as process:
        seen = await collect(process)
    assert seen["stdout"].decode() == text.decode()


async def test_a_conversation_takes_turns_and_a_background_child_does_not_hold_its_end(box: Sandbox) -> None:
    script = "sleep 600 & while read -r word; do echo got $word; done; echo done >&2"
    async with box.start(shell(script, timeout_s=PATIENCE_S), stdin="pipe", output="stream") as process:
        output = process.output()
        for word in (b"one", b"two"):
            assert await process.write_stdin(word + b"\n")
            assert (await anext(output)).data == b"got " + word + b"\n"
        process.close_stdin()
        with anyio.fail_after(PATIENCE_S / 2):
            rest = [piece async for piece in output]
        outcome = await process.wait()
    assert [(piece.stream, piece.data) for piece in rest] == [("stderr", b"done\n")]
    assert (outcome.reason, outcome.exit_code) == (Reason.EXIT, 0)


async def test_more_input_than_anybody_reads_waits_and_ends_with_the_command(box: Sandbox) -> None:
    async with box.start(shell("head -c 10; exit 4", timeout_s=PATIENCE_S), stdin="pipe") as process:
        with anyio.fail_after(PATIENCE_S):
            while await process.write_stdin(bytes(100_000)):
                pass
        outcome = await process.wait()
    assert (outcome.exit_code, outcome.stdout) == (4, bytes(10))
