"""Judges `CodeTests`: the author's test code in the judge's sandbox, asking the candidate in its own.

Invariants: the engine runs none of that code; the judge never receives the submission; a test passes only by the
judge's word. A judge that dies, or tests that do not start, are our fault; one job that ends by itself while
the judge lives on is, when it does so in every try, the doing of the submission's data.
"""

from __future__ import annotations

import anyio

from rollout.errors import VerifierFault
from rollout.tasks.types import CodeTests, Task
from rollout.types import TestResult
from rollout.verify.candidate import Candidate
from rollout.verify.channel import ChannelClosed, FrameChannel
from rollout.verify.config import VerifierConfig
from rollout.verify.guest.codec import CodecError
from rollout.verify.judge import Judge
from rollout.verify.layers.result import MAX_DETAIL
from rollout.verify.layers.shown import shown

_PRELOADED = ("numpy",)
"""Slow imports that the judge makes once, where a task's tests name them."""


async def judge_code(
    candidate: Candidate, tests: CodeTests, task: Task, judge: Judge, config: VerifierConfig, last_try: bool
) -> list[TestResult]:
    """One result for each snippet. When the candidate fails midway, `candidate.failure` says why.

    A job that ended by itself is a fault, in case someone killed it, unless this is the `last_try`.
    """
    await candidate.limit()
    if candidate.failure:
        return _completed([], len(tests.snippets), candidate.failure)
    modules = [name for name in _PRELOADED if any(name in text for text in (tests.setup, *tests.snippets))]
    lifetime_s = config.startup_timeout_s + candidate.timeout_s + config.judge_grace_s
    async with judge.job(candidate.channel.fileno(), lifetime_s, modules) as (stream, server):
        with anyio.move_on_after(config.startup_timeout_s) as scope:
            entry_points = list(task.entry_points)
            await _send_job(stream, tests, entry_points, config.max_reply_bytes + 4096, task.id)
        if scope.cancelled_caught:
            raise VerifierFault(f"the tests of {task.id} did not start within {config.startup_timeout_s:g} s")
        results: list[TestResult] = []
        gone: str | None = None
        with anyio.move_on_after(candidate.timeout_s) as scope:
            gone = await _collect(stream, results, task.id)
        if scope.cancelled_caught:
            await candidate.overran()
        elif gone is None:
            if not (last_try and await judge.alive(server)):
                raise VerifierFault(f"the judge ended in test {len(results)} of {task.id}")
            candidate.failure = f"the judge ended while it tested what the program returned, in test {len(results)}"
        elif gone == "ended":
            await candidate.ended()
        elif gone:
            candidate.failure = gone[:MAX_DETAIL]
    return _completed(results, len(tests.snippets), candidate.failure)


async def _send_job(stream: FrameChannel, tests: CodeTests, entry_points: list[str], max_bytes: int, task: str) -> None:
    try:
        await stream.send(["job", tests.setup, list(tests.snippets), entry_points, tests.mutates, max_bytes])
        frame = await stream.receive()
    except (ChannelClosed, CodecError) as error:
        raise VerifierFault(f"the judge of {task} died: {error}") from None
    if frame != ["started"]:
        raise VerifierFault(f"the tests of {task} cannot run: {shown(frame[1:])}")


async def _collect(stream: FrameChannel, results: list[TestResult], task: str) -> str | None:
    """Appends each snippet's result as it comes; returns why the candidate is gone, or "".

    None when the job ended without a last word.
    """
    while True:
        try:
            frame = await stream.receive()
        except ChannelClosed:
            return None
        except CodecError as error:
            raise VerifierFault(f"the judge of {task} died: {error}") from None
        match frame:
            case ["test", int(index), bool(passed), str(detail)] if index == len(results):
                results.append(TestResult(name=str(index), passed=passed, detail=detail[:MAX_DETAIL]))
            case ["done", str(gone)]:
                return gone
            case ["broken", str(text)]:
                raise VerifierFault(f"the tests of {task} cannot run: {text}")
            case _:
                raise VerifierFault(f"the judge of {task} said {shown(frame)}")


def _completed(results: list[TestResult], num_tests: int, failure: str) -> list[TestResult]:
    """Says `failure` at the first test that it cost, and fails those that were never reached."""
    if failure:
        first = next((i for i, result in enumerate(results) if not result.passed), len(results))
        results = results[:first] + [
            TestResult(name=str(i), passed=False, detail=failure[:MAX_DETAIL] if i == first else "")
            for i in range(first, num_tests)
        ]
    if len(results) != num_tests:
        raise VerifierFault(f"the judge reported {len(results)} of {num_tests} tests")
    return results
