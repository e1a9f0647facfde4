"""The engine over the HTTP sampler and a fake server that fails in every way it can."""

from __future__ import annotations

import itertools
import secrets
from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import pytest
from engine_fakes import RENDERER, collect, make_engine, make_task

from rollout.errors import RunFault
from rollout.rendering.bytes import EOS
from rollout.sampler.config import SamplerConfig
from rollout.sampler.fake import FakeServerConfig, serve_fake
from rollout.sampler.vllm import VllmSampler
from rollout.types import Group, Reward

pytestmark = pytest.mark.anyio

FAULTS = ["500", "reset", "400", "garbage", "short_logprobs", "positive", "bad_id", "gap", "abort", "empty", "hang"]


def right_or_wrong(body: dict[str, Any]) -> list[int]:
    """Every second task is solved: its prompt says so."""
    prompt = bytes(token for token in body["token_ids"] if token < 256).decode()
    return [*(b"right" if "program right" in prompt else b"bug"), EOS]


@pytest.fixture
def server() -> SamplerConfig:
    return SamplerConfig(server=f"unix:/tmp/fake-{secrets.token_hex(4)}.sock", backoff_s=0.001, max_retries=0)


async def test_no_injected_fault_becomes_a_reward_and_no_group_is_lost(server: SamplerConfig) -> None:
    """Each of eleven kinds of failure hits several of 240 requests; hangs end at their deadline."""

    def fault(number: int) -> str | None:
        return FAULTS[number // 5 % len(FAULTS)] if number % 5 == 0 else None

    tasks = [make_task(f"{'right' if i % 2 else 'bug'}{i}") for i in range(60)]
    socket = Path(server.server.removeprefix("unix:"))
    async with serve_fake(socket, right_or_wrong, fault=fault):
        async with VllmSampler(server, vocab_size=RENDERER.vocab_size) as sampler:
            settings = {"group_size": 4, "max_sample_retries": 6, "request_timeout_s": 0.5, "max_fault_fraction": 0.5}
            with anyio.fail_after(30):
                groups = await collect(make_engine(sampler, **settings), tasks)
    assert sorted(group.task_id for group in groups) == sorted(task.id for task in tasks)
    assert all(isinstance(group, Group) for group in groups)
    rewards = {t.task_id: t.reward for group in groups for t in group.trajectories}
    assert rewards == {task.id: Reward(1.0 if "right" in task.id else 0.0) for task in tasks}
    causes = Counter(cause for group in groups for t in group.trajectories for cause in t.faults)
    assert sum(causes.values()) >= 48
    assert any("HTTP 500" in cause for cause in causes)
    assert any("within 0.5 s" in cause for cause in causes)


async def test_every_sampled_token_carries_the_version_that_the_server_reported(server: SamplerConfig) -> None:
    socket = Path(server.server.removeprefix("unix:"))
    async with serve_fake(socket, right_or_wrong, config=FakeServerConfig(weight_version=5)):
        async with VllmSampler(server) as sampler:
            (group,) = await collect(make_engine(sampler), [make_task("right")])
    for trajectory in group.trajectories:
        covered = [False] * len(trajectory.token_ids)
        for span in trajectory.spans:
            assert span.version == 5
            covered[span.start : span.end] = [True] * (span.end - span.start)
        assert covered == trajectory.loss_mask
        assert trajectory.oldest_version == 5


async def test_a_server_that_dies_stops_the_run_with_its_cause(server: SamplerConfig) -> None:
    socket = Path(server.server.removeprefix("unix:"))
    tasks = (make_task(f"right{i}") for i in itertools.count())
    async with VllmSampler(server) as sampler, make_engine(sampler) as engine:
        async with serve_fake(socket, right_or_wrong):
            stream = engine.run(tasks)
            assert isinstance(await anext(stream), Group)
        with pytest.raises(RunFault, match="connect"):
            await _drain(stream)


async def _drain(stream: Any) -> None:
    with anyio.fail_after(20):
        async for _ in stream:
            pass
