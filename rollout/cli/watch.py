"""Shows the progress of groups on stderr; decides nothing."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rollout.train.progress import make_progress
from rollout.types import DroppedGroup, Group, Reward


class Watch:
    """Counts groups as they finish and shows their mean reward.

    Args:
        name: of the phase.
        num_groups: how many are to come.
    """

    def __init__(self, name: str, num_groups: int) -> None:
        self.num_groups = 0
        self.num_dropped = 0
        self.num_samples = 0
        self.num_invalid = 0
        self.reward_sum = 0.0
        self._name = name
        self._total = num_groups
        self._progress = make_progress(quiet=False)

    def __enter__(self) -> Self:
        self._progress.phase(self._name, self._total)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.close()

    @property
    def mean_reward(self) -> float:
        """Over samples with a reward."""
        return self.reward_sum / self.num_samples if self.num_samples else 0.0

    def saw(self, group: Group | DroppedGroup) -> None:
        """Counts one group."""
        self.num_groups += 1
        if isinstance(group, DroppedGroup):
            self.num_dropped += 1
            self._progress.say(f"dropped {group.task_id}: {group.reason}")
        else:
            for trajectory in group.trajectories:
                if isinstance(trajectory.reward, Reward):
                    self.num_samples += 1
                    self.reward_sum += trajectory.reward.value
                else:
                    self.num_invalid += 1
        self._progress.advance(self.num_groups, {"mean reward": self.mean_reward})
