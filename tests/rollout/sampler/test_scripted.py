"""Scripts: roles by turn, recorded answers, latencies."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import anyio
import pytest
from engine_fakes import RENDERER, collect, make_engine, make_task, scripted

from rollout.errors import ConfigError, SamplerFault
from rollout.sampler.recorded import RecordedScript
from rollout.sampler.scripted import Latency, RolesScript, ScriptedSampler
from rollout.sampler.types import Origin, SampleRequest
from rollout.tasks.types import Task

pytestmark = pytest.mark.anyio


def request(turn: int = 0, sibling: int = 0, task: Task | None = None, **changes: object) -> SampleRequest:
    task = task or make_task()
    values: dict[str, object] = {
        "token_ids": RENDERER.prompt(task),
        "max_tokens": 1_000,
        "temperature": 1.0,
        "stop_token_ids": RENDERER.stop_token_ids,
        "origin": Origin(task=task, sibling=sibling, turn=turn),
    }
    return SampleRequest(**{**values, **changes})  # type: ignore[arg-type]


async def test_roles_follow_the_turns_and_the_last_one_repeats() -> None:
    sampler = scripted("wrong", "noop", "oracle")
    texts = [RENDERER.decode((await sampler.sample(request(turn))).token_ids) for turn in range(5)]
    programs = [text.splitlines()[1] for text in texts]
    assert programs == ["bug", "pass", "right", "right", "right"]


async def test_a_script_longer_than_the_budget_is_cut_as_a_server_would() -> None:
    action = await scripted("oracle").sample(request(max_tokens=3))
    assert (len(action.token_ids), len(action.logprobs), action.finish_reason) == (3, 3, "length")
    assert action.spans[0].end == 3


async def test_tasks_that_a_script_cannot_answer_are_named_before_anything_starts() -> None:
    task = Task(id="fake/none", prompt="?")
    with pytest.raises(ConfigError, match=r"fake/none.*no oracle"):
        scripted("oracle").check([make_task(), task])
    with pytest.raises(ConfigError, match="no known wrong"):
        scripted("wrong").check([task])


async def test_an_unknown_role_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="oracle, noop, wrong"):
        scripted("perfect")


async def test_latencies_repeat_and_differ_between_requests() -> None:
    latency = Latency(mean_s=5.0, seed=3)
    draws = [latency.draw_s(Origin(task=make_task(), sibling=i, turn=0)) for i in range(2_000)]
    assert draws[:10] == [latency.draw_s(Origin(task=make_task(), sibling=i, turn=0)) for i in range(10)]
    assert 4.7 < sum(draws) / len(draws) < 5.3


async def test_a_latency_beyond_the_deadline_is_a_sampler_fault() -> None:
    sampler = ScriptedSampler(RolesScript(("oracle",), RENDERER), RENDERER, latency=Latency(mean_s=60))
    with anyio.fail_after(2), pytest.raises(SamplerFault, match=r"within 0\.01 s"):
        await sampler.sample(request(timeout_s=0.01))


def write_rows(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    return path


async def test_recorded_tokens_are_replayed_behind_their_own_prompt(tmp_path: Path) -> None:
    task = make_task()
    ids = RENDERER.encode_action("right")
    row = {"task_id": task.id, "sample": 0, "text": "right", "token_ids": ids, "finish_reason": "stop"}
    row |= {"logprobs": [-0.1] * len(ids), "prompt_token_ids": RENDERER.prompt(task)}
    script = RecordedScript.read(write_rows(tmp_path / "rows.jsonl.gz", [row]))
    action = await ScriptedSampler(script, RENDERER).sample(request())
    assert action.token_ids == ids
    assert action.logprobs == [-0.1] * len(ids)
    elsewhere = await ScriptedSampler(script, RENDERER).sample(request(token_ids=[256, 65, 258]))
    assert elsewhere.token_ids == ids
    assert elsewhere.logprobs == [0.0] * len(ids)


async def test_siblings_get_the_recorded_samples_in_order(tmp_path: Path) -> None:
    rows = [{"task_id": "Fake/a", "sample": i, "text": text} for i, text in enumerate(["bug", "right", "bug"])]
    script = RecordedScript.read(write_rows(tmp_path / "rows.jsonl.gz", rows))
    engine = make_engine(ScriptedSampler(script, RENDERER), group_size=3)
    (group,) = await collect(engine, [make_task("a")])
    assert [t.reward.value for t in group.trajectories] == [0.0, 1.0, 0.0]


async def test_a_damaged_recording_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"task_id": "a/b", "sample": 0, "text": "x"}\n{"sample": 1}\n')
    with pytest.raises(ConfigError, match=r"rows\.jsonl:2"):
        RecordedScript.read(path)
