"""Answers that were sampled once, read from a file, so that they can be judged again.

The file is JSON lines (gzip when its name ends in `.gz`) with `task_id`, `sample`, `token_ids`,
`logprobs`, `finish_reason`, `text` and, optionally, `prompt_token_ids`.

Invariant: recorded tokens are replayed only behind the very prompt they were sampled from;
behind any other prompt the recorded text is rendered anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from rollout.errors import ConfigError
from rollout.files import read_lines
from rollout.sampler.scripted import Answer
from rollout.sampler.types import Origin
from rollout.tasks.types import Task


class RecordedRow(msgspec.Struct):
    """One line of the file; further fields are ignored."""

    task_id: str
    sample: int
    text: str
    token_ids: list[int] = []
    logprobs: list[float] = []
    finish_reason: str = "stop"
    prompt_token_ids: list[int] = []


class RecordedScript:
    """`Script` of recorded answers, one turn each; sibling i gets sample i.

    Args:
        rows: the recorded answers, by task id and sample.
    """

    def __init__(self, rows: Sequence[RecordedRow]) -> None:
        self._rows: dict[str, dict[int, RecordedRow]] = {}
        for row in rows:
            self._rows.setdefault(_key(row.task_id), {})[row.sample] = row

    @classmethod
    def read(cls, path: Path | str) -> RecordedScript:
        """Reads a file.

        Raises:
            ConfigError: it cannot be read; names the line.
        """
        decoder = msgspec.json.Decoder(RecordedRow)
        rows: list[RecordedRow] = []
        for number, line in read_lines(Path(path), "sampler.recorded"):
            try:
                rows.append(decoder.decode(line))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise ConfigError("sampler.recorded", f"{path}:{number}", str(error)) from error
        return cls(rows)

    def num_samples(self, task: Task) -> int:
        """How many answers there are for a task, 0 to n - 1 without a gap."""
        samples = self._rows.get(_key(task.id), {})
        return next(number for number in range(len(samples) + 1) if number not in samples)

    def covers(self, task: Task) -> str | None:
        """See `Script.covers`."""
        return None if self.num_samples(task) else "it has no recorded answer"

    def answer(self, origin: Origin, prompt_token_ids: Sequence[int]) -> Answer:
        """See `Script.answer`; siblings beyond the recorded samples start over."""
        row = self._rows[_key(origin.task.id)][origin.sibling % self.num_samples(origin.task)]
        if row.token_ids and row.prompt_token_ids == list(prompt_token_ids):
            return Answer(token_ids=row.token_ids, logprobs=row.logprobs, finish_reason=row.finish_reason)
        return Answer(text=row.text)


def _key(task_id: str) -> str:
    """Ids of the same set differ by letter case and the set's variant: `Mbpp/2` is `mbppplus/2`."""
    family, _, name = task_id.lower().rpartition("/")
    return f"{family.removesuffix('plus').removesuffix('+')}/{name}"
