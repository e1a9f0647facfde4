"""Hostile answers end in outcomes and faults, close every descriptor, and leave the event loop alone."""

from __future__ import annotations

import os
import random
from collections.abc import Awaitable, Callable

import pytest

from tests.sandbox.hostile_peer import Passed, attack_engine, attack_sandbox

pytestmark = pytest.mark.anyio
NUM_FRAMES = 4000
PER_PEER = 120


@pytest.mark.parametrize("attack", [attack_sandbox, attack_engine])
async def test_a_hostile_peer_causes_nothing_but_outcomes_and_faults(
    attack: Callable[[random.Random, Passed, int], Awaitable[int]],
) -> None:
    seed = int(os.environ.get("ROLLOUT_FUZZ_SEED", "1"))
    passed = Passed()
    sent = peers = 0
    try:
        while sent < NUM_FRAMES:
            peers += 1
            try:
                sent += await attack(random.Random(f"{seed}-{peers}"), passed, PER_PEER)
            except AssertionError as error:
                pytest.fail(f"seed {seed}, peer {peers}: {error}")
    finally:
        passed.close()
