"""The policy server as a process: its HTTP API, its bounds, its weights, and how it ends."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import pytest

torch = pytest.importorskip("torch")

from serving import SPEC, Server, make_prompts, make_request, serving  # noqa: E402

from learner.flat import flat_nbytes, write_flat  # noqa: E402
from learner.model import Decoder, DecoderConfig  # noqa: E402
from learner.serve.worker import model_checksum  # noqa: E402
from rollout.lane.weights import WeightPublisher, WeightsFault  # noqa: E402

pytestmark = pytest.mark.anyio
LONG = {"max_tokens": 2500, "ignore_eos": True}
FLAGS = ("--max-batch", "64", "--max-len", "4096")


def make_decoder(seed: int, **changes: Any) -> Decoder:
    sizes = {name: value for name, value in SPEC.items() if name != "seed"}
    return Decoder(DecoderConfig(**{**sizes, **changes}), seed=seed)


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """One event loop for the module, so that its tests share a server."""
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    async with serving(tmp_path_factory.mktemp("server"), *FLAGS) as running:
        yield running


async def test_an_answer_has_the_shape_of_vllm_and_equals_the_model(server: Server) -> None:
    answer = await server.generate([5, 6, 7], max_tokens=10, temperature=0.0, ignore_eos=True)
    (choice,) = answer["choices"]
    token_ids, content = choice["token_ids"], choice["logprobs"]["content"]
    decoder = make_decoder(seed=3)
    with torch.inference_mode():
        logprobs = decoder.logits(decoder(torch.tensor([[5, 6, 7, *token_ids]]))[0, 2:-1]).log_softmax(-1)
    assert token_ids == logprobs.argmax(-1).tolist()
    expected = logprobs.gather(1, torch.tensor(token_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor([entry["logprob"] for entry in content]), expected, atol=1e-4, rtol=1e-4)
    assert [entry["token"] for entry in content] == [f"token_id:{token}" for token in token_ids]
    assert choice["finish_reason"] == "length"
    assert answer["weight_versions"] == [{"version": 0, "start": 0, "end": 10}]
    assert (answer["request_id"], choice["index"]) == ("r", 0)
    card = (await server.get("/v1/models"))["data"][0]
    assert (card["id"], card["max_model_len"]) == (answer["model"], 4096)


async def test_errors_come_in_the_body_of_vllm(server: Server) -> None:
    status, body = await server.post("/inference/v1/generate", make_request([3, 60]))
    assert status == 400
    assert body["error"]["type"] == "BadRequestError"
    assert "token_ids[1] = 60" in body["error"]["message"]
    assert (await server.post("/inference/v1/generate", b"{"))[0] == 400
    assert (await server.post("/pause?mode=perhaps"))[0] == 400


async def test_many_requests_run_together_and_equal_prompts_share_their_prefill(tmp_path: Path) -> None:
    prompts = make_prompts(24, 40, 100)
    spec = {"vocab_size": 100, "dim": 96, "layers": 3, "heads": 3, "kv_heads": 3, "max_len": 160}
    async with serving(tmp_path, spec=spec) as server:
        answers: dict[tuple[int, int], list[int]] = {}

        async def ask(prompt: int, seed: int) -> None:
            answer = await server.generate(prompts[prompt], max_tokens=40, seed=seed, ignore_eos=True)
            answers[prompt, seed] = answer["choices"][0]["token_ids"]

        async with anyio.create_task_group() as group:
            for prompt in range(24):
                for seed in range(8):
                    group.start_soon(ask, prompt, seed)
        assert len(answers) == 192
        assert await server.metric("engine_steps_total") < 2 * 40
        assert await server.metric("prefix_cache_hits_total") >= 24 * 6 * 39
        first = answers[5, 2]
        await ask(5, 2)
        assert answers[5, 2] == first


async def test_a_request_whose_client_left_is_aborted(server: Server) -> None:
    before = await server.metric("generation_tokens_total")
    with anyio.move_on_after(60) as scope:
        async with anyio.create_task_group() as group:

            async def leave() -> None:
                await server.wait_metric("num_requests_running", 1)
                scope.cancel()

            group.start_soon(leave)
            await server.generate([3], **LONG)
    await server.wait_metric('request_success_total{finished_reason="abort"}', 1)
    assert await server.metric("num_requests_running") == 0
    assert await server.metric("generation_tokens_total") < before + 2500


async def test_pause_keeps_aborts_or_waits(server: Server) -> None:
    answers: dict[str, dict[str, Any]] = {}

    async def ask(name: str, **params: Any) -> None:
        answers[name] = await server.generate([3], **params)

    async with anyio.create_task_group() as group:
        group.start_soon(lambda: ask("kept", **{**LONG, "max_tokens": 1000}))
        await server.wait_metric("num_requests_running", 1)
        assert await server.post("/pause?mode=keep") == (200, {"status": "paused"})
        assert await server.get("/is_paused") == {"is_paused": True}
        frozen = await server.metric("generation_tokens_total")
        group.start_soon(lambda: ask("late"))
        await server.wait_metric("num_requests_waiting", 1)
        assert await server.metric("generation_tokens_total") == frozen
        await server.post("/resume")
    assert len(answers["kept"]["choices"][0]["token_ids"]) == 1000
    assert "late" in answers
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: ask("aborted", **LONG))
        await server.wait_metric("num_requests_running", 1)
        await server.post("/pause")
    assert answers["aborted"]["choices"][0]["finish_reason"] == "abort"
    await server.post("/resume")
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: ask("drained", **{**LONG, "max_tokens": 300}))
        await server.wait_metric("num_requests_running", 1)
        await server.post("/pause?mode=wait")
        assert await server.metric("num_requests_running") == 0
    assert answers["drained"]["choices"][0]["finish_reason"] == "length"


async def test_requests_beyond_the_bound_are_told_to_come_back(tmp_path: Path) -> None:
    async with serving(tmp_path, "--max-batch", "1", "--max-waiting", "1") as server:
        await server.post("/pause?mode=keep")
        async with anyio.create_task_group() as group:
            for _ in range(2):
                group.start_soon(server.generate, [3])
            await server.wait_metric("num_requests_waiting", 2)
            status, body = await server.post("/inference/v1/generate", make_request([3]))
            assert (status, body["error"]["code"]) == (429, 429)
            await server.post("/resume")


@asynccontextmanager
async def serving_with_weights(folder: Path) -> AsyncIterator[tuple[Server, socket.socket]]:
    """A server, and the learner's end of its weights socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        async with serving(folder, *FLAGS, weights_fd=theirs.fileno()) as server:
            theirs.close()
            yield server, ours


async def publish(publisher: WeightPublisher, decoder: Decoder, version: int) -> None:
    """Publishes a decoder's weights without holding up the loop."""
    await anyio.to_thread.run_sync(lambda: publisher.publish(version, lambda view: write_flat(decoder, view), 10.0))


async def test_published_weights_are_used_in_flight_and_outlive_their_publisher(tmp_path: Path) -> None:
    new = make_decoder(seed=8)
    answer: dict[str, Any] = {}
    async with serving_with_weights(tmp_path) as (server, ours):
        publisher = WeightPublisher(ours, flat_nbytes(new))

        async def ask() -> None:
            answer.update(await server.generate([3], **LONG))

        async with anyio.create_task_group() as group:
            group.start_soon(ask)
            await server.wait_metric("generation_tokens_total", 20)
            await publish(publisher, new, 4)
        first, second = answer["weight_versions"]
        assert (first["version"], first["start"]) == (0, 0)
        assert first["end"] >= 20
        assert second == {"version": 4, "start": first["end"], "end": 2500}
        token_ids = (await server.generate([7, 8], temperature=0.0, ignore_eos=True))["choices"][0]["token_ids"]
        with torch.inference_mode():
            expected = new.logits(new(torch.tensor([[7, 8, *token_ids]]))[0, 1:-1]).argmax(-1)
        assert token_ids == expected.tolist()
        before = await server.get("/weight_info")
        assert before["checksum"] == model_checksum(new)
        with torch.no_grad():
            new.norm.weight.mul_(2)
        await publish(publisher, new, 5)
        after = await server.get("/weight_info")
        assert (before["weight_version"], after["weight_version"]) == (4, 5)
        assert before["checksum"] != after["checksum"]
        publisher.close()
        await server.generate([3])


async def test_damaged_weights_and_weights_of_another_model_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving_with_weights(tmp_path) as (server, ours):
        before = await server.get("/weight_info")
        fitting = make_decoder(seed=8)
        publisher = WeightPublisher(ours, flat_nbytes(fitting))
        monkeypatch.setattr("rollout.lane.weights.sum64", lambda view: 1)
        with pytest.raises(WeightsFault, match="damaged"):
            await publish(publisher, fitting, 1)
        assert await server.get("/weight_info") == before
        publisher.close()
    async with serving_with_weights(tmp_path) as (server, ours):
        other = make_decoder(seed=8, layers=1)
        publisher = WeightPublisher(ours, flat_nbytes(other))
        with pytest.raises(WeightsFault, match="but the model has"):
            await publish(publisher, other, 1)
        assert await server.get("/weight_info") == before
        publisher.close()


async def test_a_dead_inference_thread_fails_its_requests_and_ends_the_process(tmp_path: Path) -> None:
    async with serving_with_weights(tmp_path) as (server, ours):

        async def ask_in_vain() -> None:
            status, body = await server.post("/inference/v1/generate", make_request([3], **LONG))
            assert status == 500
            assert "inference thread died" in body["error"]["message"]

        async with anyio.create_task_group() as group:
            group.start_soon(ask_in_vain)
            await server.wait_metric("num_requests_running", 1)
            ours.send(b"no message of this channel")
            assert await server.wait_end(5.0) == 1
        os.close(server.parent_fd)


async def test_the_server_ends_with_its_parent_even_when_it_is_busy(tmp_path: Path) -> None:
    async with serving(tmp_path, *FLAGS) as server:

        async def ask_in_vain(prompt: list[int]) -> None:
            with pytest.raises(aiohttp.ClientError):
                await server.generate(prompt, **LONG)

        async with anyio.create_task_group() as group:
            for prompt in make_prompts(32, 50, 60):
                group.start_soon(ask_in_vain, prompt)
            await server.wait_metric("num_requests_running", 32)
            started = time.monotonic()
            os.close(server.parent_fd)
            await server.wait_end(1.0)
            assert time.monotonic() - started < 1.0


async def test_sigterm_answers_what_is_in_flight_and_ends_cleanly(tmp_path: Path) -> None:
    async with serving(tmp_path, *FLAGS) as server:
        answers: list[dict[str, Any]] = []

        async def ask() -> None:
            answers.append(await server.generate([3], **LONG))

        async with anyio.create_task_group() as group:
            group.start_soon(ask)
            await server.wait_metric("num_requests_running", 1)
            server.process.send_signal(signal.SIGTERM)
            assert await server.wait_end(5.0) == 0
        assert answers[0]["choices"][0]["finish_reason"] == "abort"
        assert not (tmp_path / "policy.sock").exists()
        os.close(server.parent_fd)
