"""The HTTP sampler against a fake server: good answers, every kind of bad one, and deadlines."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from rollout.errors import ConfigError, SamplerFault
from rollout.sampler.config import SamplerConfig
from rollout.sampler.fake import FakeServerConfig, Fault, serve_fake
from rollout.sampler.types import SampleRequest
from rollout.sampler.vllm import VllmSampler
from rollout.types import VersionSpan

pytestmark = pytest.mark.anyio


@pytest.fixture
def socket() -> Iterator[Path]:
    """A short path: Unix sockets allow 108 bytes."""
    path = Path(f"/tmp/fake-{secrets.token_hex(4)}.sock")
    yield path
    path.unlink(missing_ok=True)


def request(**changes: Any) -> SampleRequest:
    values: dict[str, Any] = {
        "token_ids": [1, 2, 3],
        "max_tokens": 8,
        "temperature": 0.8,
        "stop_token_ids": (257,),
        "seed": 5,
        "cache_salt": "v3",
        "timeout_s": 5.0,
    }
    return SampleRequest(**{**values, **changes})


def respond(body: dict[str, Any]) -> list[int]:
    return [*body["token_ids"], 257]


def config(socket: Path, **changes: Any) -> SamplerConfig:
    return SamplerConfig(server=f"unix:{socket}", backoff_s=0.001, **changes)


def nth(faults: dict[int, str]) -> Fault:
    return faults.get


async def test_an_action_comes_back_with_its_tokens_logprobs_and_weight_version(socket: Path) -> None:
    async with serve_fake(socket, respond, config=FakeServerConfig(weight_version=4)) as server:
        async with VllmSampler(config(socket), vocab_size=259) as sampler:
            action = await sampler.sample(request())
            assert await sampler.weight_version() == 4
    assert action.token_ids == [1, 2, 3, 257]
    assert action.logprobs == [-0.5] * 4
    assert action.finish_reason == "stop"
    assert action.spans == (VersionSpan(0, 4, 4),)
    (body,) = server.requests
    assert body["cache_salt"] == "v3"
    assert body["sampling_params"]["seed"] == 5
    assert body["sampling_params"]["stop_token_ids"] == [257]


async def test_a_cut_action_keeps_its_finish_reason(socket: Path) -> None:
    async with serve_fake(socket, respond):
        async with VllmSampler(config(socket)) as sampler:
            assert (await sampler.sample(request(max_tokens=2))).finish_reason == "length"


@pytest.mark.parametrize("fault", ["500", "reset"])
async def test_a_passing_failure_is_retried(socket: Path, fault: str) -> None:
    async with serve_fake(socket, respond, fault=nth({0: fault, 1: fault})):
        async with VllmSampler(config(socket)) as sampler:
            assert (await sampler.sample(request())).token_ids[-1] == 257
            assert sampler.num_retries == 2


async def test_a_full_queue_is_waited_for_however_often_it_is_met(socket: Path) -> None:
    async with serve_fake(socket, respond, fault=lambda number: "429" if number < 10 else None):
        async with VllmSampler(config(socket, max_retries=0)) as sampler:
            assert (await sampler.sample(request())).token_ids[-1] == 257
            assert sampler.num_retries == 10


async def test_a_queue_that_stays_full_is_a_fault_at_the_deadline(socket: Path) -> None:
    async with serve_fake(socket, respond, fault=lambda number: "429"):
        async with VllmSampler(config(socket)) as sampler:
            with pytest.raises(SamplerFault, match=r"no answer within 0\.3 s; last: HTTP 429: the queue is full"):
                await sampler.sample(request(timeout_s=0.3))


@pytest.mark.parametrize("fault", ["500", "reset"])
async def test_a_lasting_failure_is_a_fault_that_names_its_cause(socket: Path, fault: str) -> None:
    async with serve_fake(socket, respond, fault=lambda number: fault) as server:
        async with VllmSampler(config(socket, max_retries=3)) as sampler:
            with pytest.raises(SamplerFault, match="4 tries"):
                await sampler.sample(request())
        assert len(server.requests) == 4


async def test_a_refused_request_is_not_retried(socket: Path) -> None:
    async with serve_fake(socket, respond, fault=lambda number: "400") as server:
        async with VllmSampler(config(socket)) as sampler:
            with pytest.raises(SamplerFault, match="HTTP 400: injected"):
                await sampler.sample(request())
        assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("garbage", "schema"),
        ("short_logprobs", "4 token ids and 3 logprobs"),
        ("positive", "logprob"),
        ("bad_id", "outside"),
        ("gap", "cover 3 of 4"),
        ("abort", "abort"),
        ("empty", "weight versions"),
        ("no_versions", "weight versions"),
    ],
)
async def test_an_answer_that_breaks_the_contract_is_a_fault(socket: Path, fault: str, message: str) -> None:
    async with serve_fake(socket, respond, fault=lambda number: fault):
        async with VllmSampler(config(socket), vocab_size=259) as sampler:
            with pytest.raises(SamplerFault, match=message):
                await sampler.sample(request())


async def test_a_server_without_versions_is_accepted_when_one_is_assumed(socket: Path) -> None:
    async with serve_fake(socket, respond, fault=lambda number: "no_versions"):
        async with VllmSampler(config(socket, assume_version=0)) as sampler:
            assert (await sampler.sample(request())).spans == (VersionSpan(0, 4, 0),)


async def test_a_server_that_hangs_is_a_fault_at_the_deadline_and_learns_of_it(socket: Path) -> None:
    async with serve_fake(socket, respond, fault=lambda number: "hang") as server:
        async with VllmSampler(config(socket)) as sampler:
            with anyio.fail_after(2):
                with pytest.raises(SamplerFault, match=r"within 0\.1 s"):
                    await sampler.sample(request(timeout_s=0.1))
                await server.cancelled.wait()


async def test_no_server_at_all_is_a_fault(socket: Path) -> None:
    async with VllmSampler(config(socket)) as sampler:
        with pytest.raises(SamplerFault, match="3 tries"):
            await sampler.sample(request())
        with pytest.raises(SamplerFault, match="no healthy policy server"):
            await sampler.wait_ready(0.05)


async def test_readiness_is_seen_once_the_server_is_up(socket: Path) -> None:
    ready = anyio.Event()

    async def wait(sampler: VllmSampler) -> None:
        await sampler.wait_ready(5.0)
        ready.set()

    async with VllmSampler(config(socket)) as sampler, anyio.create_task_group() as tasks:
        tasks.start_soon(wait, sampler)
        await anyio.wait_all_tasks_blocked()
        assert not ready.is_set()
        async with serve_fake(socket, respond):
            await ready.wait()


async def test_many_requests_share_a_bounded_number_of_connections(socket: Path) -> None:
    async with serve_fake(socket, respond, config=FakeServerConfig(mean_latency_s=0.001)) as server:
        async with VllmSampler(config(socket, max_connections=4)) as sampler, anyio.create_task_group() as tasks:
            for seed in range(100):
                tasks.start_soon(sampler.sample, request(seed=seed))
        assert len(server.requests) == 100


async def test_an_address_that_is_no_address_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="unix:PATH"):
        SamplerConfig(server="localhost:8000")
