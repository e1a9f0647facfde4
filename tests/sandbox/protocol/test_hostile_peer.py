"""Hostile answers end in outcomes and faults, close every descriptor, and leave the event loop alone."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable

import pytest

from tests.sandbox.protocol.fuzzing import scaled, seed
from tests.sandbox.protocol.hostile_peer import Passed, attack_engine, attack_sandbox

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(3600 if scaled(1) > 1 else 120)]
NUM_FRAMES = 4000
PER_PEER = 120


@pytest.mark.parametrize("attack", [attack_sandbox, attack_engine])
async def test_a_hostile_peer_causes_nothing_but_outcomes_and_faults(
    attack: Callable[[random.Random, Passed, int], Awaitable[int]],
) -> None:
    passed = Passed()
    sent = peers = 0
    try:
        while sent < scaled(NUM_FRAMES):
            peers += 1
            try:
                sent += await attack(random.Random(f"{seed()}-{peers}"), passed, PER_PEER)
            except AssertionError as error:
                pytest.fail(f"seed {seed()}, peer {peers}: {error}")
    finally:
        passed.close()
    print(f"seed {seed()}: {sent} frames of {peers} peers")
