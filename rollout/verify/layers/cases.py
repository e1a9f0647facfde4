"""Judges `CaseTests`: asks the candidate, compares plain data here in the engine, runs no code.

Invariants: only arguments are ever sent; expected values stay in this process. All calls of one set are made in
one process, in order.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import anyio

from rollout.tasks.literals import parsed
from rollout.tasks.types import CaseTests
from rollout.types import TestResult
from rollout.verify.candidate import Candidate
from rollout.verify.channel import ChannelClosed
from rollout.verify.compare import equal, materialized
from rollout.verify.guest.codec import encode
from rollout.verify.layers.result import MAX_DETAIL
from rollout.verify.layers.shown import cut, shown

PIPELINED_BYTES = 32 * 1024
"""Calls that fit the socket's buffer together are sent at once; larger ones each after the last answer,
or two full buffers could wait for each other."""


async def judge_cases(candidate: Candidate, tests: CaseTests, entry_point: str) -> list[TestResult]:
    """One result for each case. When the candidate fails midway, `candidate.failure` says why."""
    calls = [["call", i, entry_point, arguments, False] for i, (arguments, _) in enumerate(parsed(tests))]
    results: list[TestResult] = []
    with anyio.move_on_after(candidate.timeout_s) as scope:
        try:
            await _ask(candidate, tests, calls, results)
        except ChannelClosed:
            await candidate.ended()
    if scope.cancelled_caught:
        await candidate.overran()
    first_detail = candidate.failure[:MAX_DETAIL]
    for i in range(len(results), len(calls)):
        results.append(TestResult(name=str(i), passed=False, detail=first_detail))
        first_detail = ""
    return results


async def _ask(candidate: Candidate, tests: CaseTests, calls: list[list[Any]], results: list[TestResult]) -> None:
    await candidate.channel.send(["limit", candidate.cpu_s])
    pipelined = _encoded_size(tests) <= PIPELINED_BYTES
    if pipelined:
        await candidate.channel.send(*calls)
    for i, call in enumerate(calls):
        if not pipelined:
            await candidate.channel.send(call)
        frame = await candidate.receive()
        if candidate.failure:
            return
        if frame[0] not in ("result", "error") or frame[1] != i:
            candidate.failure = "protocol: an answer to no question"
            return
        results.append(_result(tests, i, call[2], frame))


def _result(tests: CaseTests, i: int, entry_point: str, frame: list[Any]) -> TestResult:
    case = tests.cases[i]
    kind, _, value, more = frame
    if kind == "error":
        got = f"raised {value[:100]}: {more[:1200]}"
    else:
        value = materialized(value) if tests.materialize else value
        atol = tests.atol if case.atol is None else case.atol
        if equal(parsed(tests)[i][1], value, atol):
            return TestResult(name=str(i), passed=True)
        got = f"returned {shown(value)}"
    call = f"{entry_point}({cut(case.args.strip()[1:-1], 300)})"
    return TestResult(
        name=str(i), passed=False, detail=f"{call} {got}, expected {cut(case.expected, 300)}"[:MAX_DETAIL]
    )


@lru_cache(maxsize=1024)
def _encoded_size(tests: CaseTests) -> int:
    return sum(len(encode(arguments, 1 << 26)) + 64 for arguments, _ in parsed(tests))
