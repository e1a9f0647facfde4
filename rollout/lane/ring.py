"""The lane's two ends under one name: `LaneWriter` for the engine, `LaneReader` for the learner."""

from rollout.lane.reader import LaneReader
from rollout.lane.writer import LaneStats, LaneWriter

__all__ = ["LaneReader", "LaneStats", "LaneWriter"]
