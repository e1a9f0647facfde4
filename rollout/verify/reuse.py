"""Hands the verdict of a byte-identical submission of the same task to whoever asks again.

Owns a bounded map of verdicts, least recently used first out. Invariants: an `Invalid` verdict is never kept; at
most one computation of a key runs at a time, and when it fails or is cancelled a waiter takes over.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import anyio
import msgspec

from rollout.tasks.types import Task
from rollout.types import Invalid, Verdict

Key: TypeAlias = bytes
NOTE = "[verdict of an identical submission] "


def key_of(task: Task, submission: str) -> Key:
    """A digest of everything that decides the verdict: the whole task and the submission."""
    digest = hashlib.sha256(msgspec.msgpack.encode(task))
    digest.update(b"\0")
    digest.update(submission.encode("utf-8", "surrogatepass"))
    return digest.digest()


class VerdictCache:
    """At most `capacity` verdicts."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._verdicts: OrderedDict[Key, Verdict] = OrderedDict()
        self._running: dict[Key, anyio.Event] = {}
        self.num_reused = 0

    async def get(self, key: Key, compute: Callable[[], Awaitable[Verdict]]) -> Verdict:
        """The verdict of `key`, computed by `compute` unless it is known or on its way."""
        while True:
            known = self._verdicts.get(key)
            if known is not None:
                self._verdicts.move_to_end(key)
                self.num_reused += 1
                return _marked(known)
            running = self._running.get(key)
            if running is None:
                return await self._compute(key, compute)
            await running.wait()

    async def _compute(self, key: Key, compute: Callable[[], Awaitable[Verdict]]) -> Verdict:
        done = self._running[key] = anyio.Event()
        try:
            verdict = await compute()
        finally:
            del self._running[key]
            done.set()
        if not isinstance(verdict.reward, Invalid):
            self._verdicts[key] = verdict
            if len(self._verdicts) > self._capacity:
                self._verdicts.popitem(last=False)
        return verdict


def _marked(verdict: Verdict) -> Verdict:
    layers = tuple(msgspec.structs.replace(layer, evidence=NOTE + layer.evidence) for layer in verdict.layers)
    return msgspec.structs.replace(verdict, layers=layers)
