"""A helper's side: reads `CONCURRENCY SECONDS` from each line of stdin, and answers with one line of JSON.

The answer has the seconds of each operation and of the whole batch, or `error`; `{}` is said once when the helper is
ready. Standard library alone, for any Python from 3.11 on. Invariants: no more operations at a time than asked for, all
over before the answer, at least one by each worker; what an operation prints does not come between the answers.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from typing import TextIO

Samples = list[float]


def serve_blocking(operate: Callable[[int], None]) -> None:
    """Serves an operation that blocks: each worker is a thread, and the operation gets its number."""
    answers = _answers()
    for line in sys.stdin:
        concurrency, slice_s = _asked(line)
        samples_s: Samples = []
        errors: list[BaseException] = []
        began = time.perf_counter()

        def work(
            worker: int, began: float = began, slice_s: float = slice_s, samples_s: Samples = samples_s,
            errors: list[BaseException] = errors,
        ) -> None:  # fmt: skip
            try:
                while not errors:
                    start = time.perf_counter()
                    operate(worker)
                    end = time.perf_counter()
                    samples_s.append(end - start)
                    if end - began >= slice_s:
                        return
            except Exception as error:  # noqa: BLE001 - whatever a peer raises is its answer
                errors.append(error)

        threads = [threading.Thread(target=work, args=(worker,), daemon=True) for worker in range(concurrency)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        _answer(answers, samples_s, began, errors[0] if errors else None)


def serve_async(operate: Callable[[int], Awaitable[None]]) -> None:
    """Serves an asynchronous operation: each worker is a task of one asyncio loop."""
    asyncio.run(_serve_async(operate))


async def _serve_async(operate: Callable[[int], Awaitable[None]]) -> None:
    answers = _answers()
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        concurrency, slice_s = _asked(line)
        samples_s: Samples = []
        began = time.perf_counter()

        async def work(
            worker: int, began: float = began, slice_s: float = slice_s, samples_s: Samples = samples_s
        ) -> None:
            while True:
                start = time.perf_counter()
                await operate(worker)
                end = time.perf_counter()
                samples_s.append(end - start)
                if end - began >= slice_s:
                    return

        done = await asyncio.gather(*(work(worker) for worker in range(concurrency)), return_exceptions=True)
        _answer(answers, samples_s, began, next((one for one in done if one is not None), None))


def _answers() -> TextIO:
    """Where the answers go; stdout goes where stderr does from now on. Says that the helper is ready."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print("{}", file=answers, flush=True)
    return answers


def _asked(line: str) -> tuple[int, float]:
    concurrency, slice_s = line.split()
    return int(concurrency), float(slice_s)


def _answer(answers: TextIO, samples_s: Samples, began: float, error: BaseException | None) -> None:
    answer: dict[str, object] = {"samples_s": samples_s, "wall_s": time.perf_counter() - began}
    if error is not None:
        words = " ".join(str(error).split())
        answer = {"error": f"{type(error).__name__}: {words[-400:]}"}
    print(json.dumps(answer), file=answers, flush=True)


def require(succeeded: bool, what: object) -> None:
    """Refuses an operation that did not do what it was to do."""
    if not succeeded:
        raise RuntimeError(f"did not succeed: {what}")
