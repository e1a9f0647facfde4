"""Counters of the engine, and the event loop's lag.

Invariant: plain numbers changed on the loop's thread alone; `snapshot` is consistent and cheap.
"""

from __future__ import annotations

from collections import Counter, deque

import anyio

_LAG_PERIOD_S = 0.02
_LAG_WINDOW = 3_000
"""Samples kept: the last minute."""


class EngineMetrics:
    """What happened since the engine was made."""

    def __init__(self) -> None:
        self.episodes_live = 0
        self.episodes_finished = 0
        self.turns = 0
        self.action_tokens = 0
        self.attempts = 0
        self.groups_admitted = 0
        self.groups_emitted = 0
        self.groups_dropped = 0
        self.faults: Counter[str] = Counter()
        self.stop_reasons: Counter[str] = Counter()
        self.sample_s = 0.0
        """Seconds of waiting for the policy server, summed over episodes."""
        self.act_s = 0.0
        """Seconds in environments, summed over episodes."""
        self.verify_s = 0.0
        """Seconds of waiting for verdicts, summed over episodes."""
        self._lags_s: deque[float] = deque(maxlen=_LAG_WINDOW)

    async def watch_loop(self) -> None:
        """Measures, until it is cancelled, how late the loop wakes a sleeper."""
        while True:
            due = anyio.current_time() + _LAG_PERIOD_S
            await anyio.sleep(_LAG_PERIOD_S)
            self._lags_s.append(max(0.0, anyio.current_time() - due))

    def loop_lag_s(self, quantile: float) -> float:
        """Quantile of the loop's lag over the last minute, in seconds; 0 before the first sample."""
        ordered = sorted(self._lags_s)
        if not ordered:
            return 0.0
        return ordered[min(len(ordered) - 1, int(quantile * len(ordered)))]

    def snapshot(self) -> dict[str, float]:
        """Every counter by name, for logs and dashboards."""
        values: dict[str, float] = {name: value for name, value in vars(self).items() if isinstance(value, int | float)}
        values.update({f"faults.{kind}": count for kind, count in self.faults.items()})
        values.update({f"stop.{reason}": count for reason, count in self.stop_reasons.items()})
        values["loop_lag_p50_s"] = self.loop_lag_s(0.5)
        values["loop_lag_p99_s"] = self.loop_lag_s(0.99)
        return values
