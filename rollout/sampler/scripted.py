"""A sampler without a model: known answers, for tests, gates and re-grading.

Owns the choice of each turn's text; the renderer makes it tokens. Invariant: the same request
gets the same action, whatever else is in flight.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Literal, Protocol, TypeAlias, get_args

import anyio
import anyio.lowlevel
import msgspec

from rollout.errors import ConfigError, SamplerFault
from rollout.rendering.types import Renderer
from rollout.sampler.types import Action, Origin, SampleRequest
from rollout.tasks.types import Task
from rollout.types import VersionSpan

Role: TypeAlias = Literal["oracle", "noop", "wrong"]
NOOP_PROGRAM = "pass"


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What a script says in one turn: a text, or tokens that were sampled once."""

    text: str = ""
    token_ids: list[int] | None = None
    """Used instead of the text."""
    logprobs: list[float] | None = None
    finish_reason: str = "stop"


class Script(Protocol):
    """Chooses answers."""

    def covers(self, task: Task) -> str | None:
        """None when the script can answer for `task`; otherwise why it cannot."""
        ...

    def answer(self, origin: Origin, prompt_token_ids: Sequence[int]) -> Answer:
        """The answer of this turn; `covers` has returned None for its task."""
        ...


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """Log-normal waiting times, as policy servers have them."""

    mean_s: float
    sigma: float = 0.5
    """Of the logarithm."""
    seed: int = 0

    def draw_s(self, origin: Origin) -> float:
        """Seconds for this request; the same for the same request."""
        rng = random.Random(f"{self.seed} {origin.task.id} {origin.sibling} {origin.turn}")
        return self.mean_s * rng.lognormvariate(-self.sigma * self.sigma / 2, self.sigma)


class RolesScript:
    """Submits the oracle, a known wrong program or one that does nothing, turn by turn.

    Args:
        roles: one per turn; the last one repeats.
        renderer: says how a program is written.
        noop: the program that does nothing.

    Example: `RolesScript(("wrong", "oracle"), renderer)` fails once and then corrects itself.
    """

    def __init__(self, roles: Sequence[Role], renderer: Renderer, *, noop: str = NOOP_PROGRAM) -> None:
        unknown = [role for role in roles if role not in get_args(Role)]
        if unknown or not roles:
            raise ConfigError("sampler", ",".join(roles), f"roles are {', '.join(get_args(Role))}, comma-separated")
        self._roles = tuple(roles)
        self._renderer = renderer
        self._noop = noop

    def covers(self, task: Task) -> str | None:
        """See `Script.covers`."""
        if "oracle" in self._roles and task.oracle is None:
            return "it has no oracle"
        if "wrong" in self._roles and not any(task.known_wrong):
            return "it has no known wrong program"
        return None

    def answer(self, origin: Origin, prompt_token_ids: Sequence[int]) -> Answer:
        """See `Script.answer`."""
        role = self._roles[min(origin.turn, len(self._roles) - 1)]
        return Answer(text=self._renderer.write_program(self._program(role, origin.task)))

    def _program(self, role: Role, task: Task) -> str:
        if role == "noop":
            return self._noop
        if role == "oracle":
            assert task.oracle is not None, "covers() was not asked"
            return task.oracle
        return next(program for program in task.known_wrong if program)


class ScriptedSampler:
    """`Sampler` that follows a script, with logprobs of 0 where none are recorded.

    Args:
        script: chooses the answers.
        renderer: makes texts tokens.
        latency: waiting times; None answers at once.
        weight_version: what the answers claim to be sampled with.
    """

    def __init__(
        self, script: Script, renderer: Renderer, *, latency: Latency | None = None, weight_version: int = 0
    ) -> None:
        self._script = script
        self._renderer = renderer
        self._latency = latency
        self.weight_version = weight_version
        self.num_requests = 0

    def check(self, tasks: Iterable[Task]) -> None:
        """Whether the script can answer for every task.

        Raises:
            ConfigError: it cannot; names the first such task.
        """
        for task in tasks:
            problem = self._script.covers(task)
            if problem is not None:
                raise ConfigError("sampler", task.id, f"the script cannot answer for this task: {problem}")

    async def sample(self, request: SampleRequest) -> Action:
        """See `Sampler.sample`."""
        self.num_requests += 1
        origin = request.origin
        assert origin is not None, "a scripted sampler must know who asks"
        if self._latency is not None:
            await self._wait(self._latency.draw_s(origin), request.timeout_s)
        else:
            # Whatever answers at once must still let the loop breathe between turns.
            await anyio.lowlevel.checkpoint()
        answer = self._script.answer(origin, request.token_ids)
        token_ids = answer.token_ids
        if token_ids is None:
            token_ids = self._renderer.encode_action(answer.text)
        logprobs = answer.logprobs if answer.logprobs is not None else [0.0] * len(token_ids)
        finish_reason = answer.finish_reason
        if len(token_ids) > request.max_tokens:
            token_ids, logprobs = token_ids[: request.max_tokens], logprobs[: request.max_tokens]
            finish_reason = "length"
        return Action(
            token_ids=list(token_ids),
            logprobs=list(logprobs),
            finish_reason=finish_reason,
            spans=(VersionSpan(0, len(token_ids), self.weight_version),),
        )

    @staticmethod
    async def _wait(seconds: float, timeout_s: float) -> None:
        if seconds > timeout_s:
            await anyio.sleep(timeout_s)
            raise SamplerFault(f"no answer within {timeout_s:g} s")
        await anyio.sleep(seconds)
