"""Streams while a command runs: what is written arrives, in order and whole, and an unread stream stops its writer."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import anyio
import pytest

from sandbox.commands.process import Process
from sandbox.errors import ConfigError
from sandbox.host import SandboxHost
from sandbox.sandbox import Sandbox
from sandbox.types import KIB, Command, JailName, Reason, SandboxSpec

pytestmark = pytest.mark.anyio


@pytest.fixture
async def box(host: SandboxHost, jail: JailName) -> AsyncIterator[Sandbox]:
    async with host.acquire(SandboxSpec(jail=jail)) as box:
        yield box


def shell(script: str, timeout_s: float = 30) -> Command:
    return Command(argv=("sh", "-c", script), timeout_s=timeout_s)


def python(code: str) -> Command:
    return Command(argv=("python3", "-I", "-S", "-c", code))


async def collect(process: Process) -> dict[str, bytes]:
    seen = {"stdout": b"", "stderr": b""}
    async for piece in process.output():
        seen[piece.stream] += piece.data
    return seen


async def test_input_and_output_take_turns_while_the_command_runs(box: Sandbox) -> None:
    with anyio.fail_after(30):
        async with box.start(shell("while read -r x; do echo got $x; done"), stdin="pipe", output="stream") as process:
            output = process.output()
            for word in (b"one", b"two"):
                assert await process.write_stdin(word + b"\n")
                assert (await anext(output)).data == b"got " + word + b"\n"
            process.close_stdin()
            with pytest.raises(StopAsyncIteration):
                await anext(output)
            outcome = await process.wait()
    assert (outcome.reason, outcome.exit_code, outcome.stdout) == (Reason.EXIT, 0, b"got one\ngot two\n")


async def test_both_streams_arrive_whole_and_in_order_and_the_outcome_keeps_head_and_tail(box: Sandbox) -> None:
    code = "import os\nfor i in range(3000):\n os.write(1, b'%06d\\n' % i * 40); os.write(2, b'%06d ' % i)"
    command = Command(argv=python(code).argv, output_limit_bytes=1000)
    async with box.start(command, output="stream") as process:
        seen = await collect(process)
        outcome = await process.wait()
    whole = b"".join(b"%06d\n" % i * 40 for i in range(3000))
    assert seen["stdout"] == whole
    assert seen["stderr"] == b"".join(b"%06d " % i for i in range(3000))
    assert outcome.stdout == whole[:500] + whole[-500:]
    assert outcome.stdout_truncated_bytes == len(whole) - 1000


async def test_unread_output_stops_its_writer_and_memory_stays_bounded(box: Sandbox) -> None:
    code = """
import os
for i in range(400):
    os.write(1, b"x" * 10_000)
    open("count", "w").write(str(i + 1))
"""
    await box.write_file("count", b"0")
    async with box.start(python(code), output="stream") as process:
        output = process.output()
        total = len((await anext(output)).data)
        before = -1
        while (now := int(await box.read_file("count", 10) or b"0")) != before:
            before = now
            await anyio.sleep(0.3)
        assert now * 10_000 <= 4 * 64 * KIB, "a full pipe and one piece, and no more"
        async for piece in output:
            total += len(piece.data)
        assert total == 4_000_000
        assert (await process.wait()).ok


async def test_a_consumer_that_stops_may_go_on_later_or_leave_without_a_trace(box: Sandbox) -> None:
    async with box.start(shell("echo a; read x; echo b; sleep 60"), stdin="pipe", output="stream") as process:
        async for piece in process.output():
            assert piece.data == b"a\n"
            break
        with anyio.move_on_after(0.2) as scope:
            await anext(process.output())
        assert scope.cancelled_caught
        await process.write_stdin(b"\n")
        assert (await anext(process.output())).data == b"b\n"
    assert (await process.wait()).reason is Reason.KILLED
    assert (await box.usage()).num_running == 0


async def test_a_second_consumer_at_the_same_time_is_refused(box: Sandbox) -> None:
    async with box.start(shell("sleep 60"), output="stream") as process:
        async with anyio.create_task_group() as group:
            group.start_soon(collect, process)
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(ConfigError, match="in one place at a time"):
                await anext(process.output())
            await process.kill()


async def test_a_consumer_may_end_the_command_from_inside_its_loop(box: Sandbox) -> None:
    with anyio.fail_after(30):
        async with box.start(shell("echo ready; sleep 60"), output="stream") as process:
            async for piece in process.output():
                assert piece.data == b"ready\n"
                await process.kill()
            assert (await process.wait()).reason is Reason.KILLED


async def test_background_children_hold_the_end_of_the_output_up_for_a_moment_only(box: Sandbox) -> None:
    with anyio.fail_after(20):
        async with box.start(shell("echo first; sleep 61 & yes > /dev/null & echo last"), output="stream") as process:
            seen = await collect(process)
        assert seen["stdout"] == b"first\nlast\n"
        begun = "{ echo y; echo y; touch begun; exec yes; } & until [ -e begun ]; do sleep 0.01; done; echo done >&2"
        async with box.start(shell(begun), output="stream") as process:
            seen = await collect(process)
        assert seen["stderr"] == b"done\n"
        assert b"y\ny\n" in seen["stdout"]


async def test_what_was_in_the_pipe_at_the_end_is_delivered_to_a_late_consumer(box: Sandbox) -> None:
    async with box.start(shell("head -c 60000 /dev/zero; sleep 61 &"), output="stream") as process:
        outcome = await process.wait()
        seen = await collect(process)
    assert seen["stdout"] == bytes(60_000) == outcome.stdout


async def test_a_flood_ends_as_one_in_a_stream_too(box: Sandbox) -> None:
    command = Command(argv=("yes",), output_limit_bytes=1000, kill_output_bytes=500_000)
    async with box.start(command, output="stream") as process:
        seen = await collect(process)
        outcome = await process.wait()
    assert outcome.reason is Reason.OUTPUT_LIMIT
    assert len(seen["stdout"]) == len(outcome.stdout) + outcome.stdout_truncated_bytes >= 500_000


async def test_input_waits_for_its_reader_and_ends_with_it(box: Sandbox) -> None:
    data = os.urandom(1_000_000)
    async with box.start(shell("cat"), stdin="pipe", output="stream") as process:
        async with anyio.create_task_group() as group:

            async def write() -> None:
                assert await process.write_stdin(data)
                process.close_stdin()

            group.start_soon(write)
            assert (await collect(process))["stdout"] == data
    async with box.start(shell("exec <&-; sleep 60"), stdin="pipe") as process:
        with anyio.fail_after(20):
            while await process.write_stdin(b"z" * 10_000):
                continue
    async with box.start(shell("sleep 0.3"), stdin="pipe") as process:
        with anyio.fail_after(20):
            assert not await process.write_stdin(bytes(10_000_000)), "the command's end ends the wait"
            assert not await process.write_stdin(b"x")


async def test_a_write_that_is_cancelled_leaves_the_command_running(box: Sandbox) -> None:
    async with box.start(shell("sleep 0.5; wc -c"), stdin="pipe") as process:
        with anyio.move_on_after(0.1) as scope:
            await process.write_stdin(bytes(10_000_000))
        assert scope.cancelled_caught
        process.close_stdin()
        with pytest.raises(ConfigError, match="close_stdin"):
            await process.write_stdin(b"late")
        outcome = await process.wait()
    assert outcome.ok
    assert 0 < int(outcome.stdout) <= 200_000


async def test_what_cannot_go_together_is_refused_before_anything_starts(box: Sandbox) -> None:
    refused = [
        (Command(argv=("true",), stdin=b"x"), (), {"stdin": "pipe"}),
        (Command(argv=("true",)), (0,), {"stdin": "pipe"}),
        (Command(argv=("true",)), (0, 1, 2), {"output": "stream"}),
        (Command(argv=("true",)), (), {"output": "nonsense"}),
        (Command(argv=("true",)), (), {"stdin": "tty"}),
    ]
    for command, fds, modes in refused:
        with pytest.raises(ConfigError, match=r"start\."):
            async with box.start(command, fds, **modes):  # type: ignore[arg-type]
                pass
    async with box.start(Command(argv=("true",))) as process:
        with pytest.raises(ConfigError, match="stdin='pipe'"):
            await process.write_stdin(b"x")
        with pytest.raises(ConfigError, match="output='stream'"):
            process.output()


async def test_the_death_of_the_sandbox_ends_the_iteration_with_what_it_was(box: Sandbox) -> None:
    async with box.start(shell("echo x; sleep 60"), output="stream") as process:
        output = process.output()
        assert (await anext(output)).data == b"x\n"
        box.close()
        with pytest.raises(StopAsyncIteration):
            await anext(output)
        assert (await process.wait()).reason is Reason.KILLED
