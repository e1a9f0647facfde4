"""A writer that is killed at any moment leaves whole frames only, and the reader hears of it at once."""

from __future__ import annotations

import itertools
import random
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rollout.lane.errors import PeerGone
from rollout.lane.ring import LaneReader

REPOSITORY = Path(__file__).resolve().parents[3]
WRITER = """
import itertools, socket, sys
import anyio
from lane_helpers import delivered
from rollout.lane.packing import rl_frames
from rollout.lane.ring import LaneWriter

async def main():
    async with LaneWriter(socket.socket(fileno=int(sys.argv[1])), slots=3, slot_bytes=1 << 16) as writer:
        for step in itertools.count():
            await writer.write(rl_frames([delivered(step % 50, [20, 400])], step=step)[0])

anyio.run(main)
"""


def read_to_the_end(reader: LaneReader, first_step: int) -> None:
    for step in itertools.count(first_step):
        with reader.lease(20) as frame:  # checks order and both checksums
            assert frame.meta.step == step


@pytest.mark.parametrize("seed", range(4))
def test_a_writer_killed_at_a_random_moment_leaves_no_torn_frame(seed: int) -> None:
    engine, learner = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    path = f"{REPOSITORY}:{Path(__file__).parent}"
    argv = [sys.executable, "-c", WRITER, str(engine.fileno())]
    with subprocess.Popen(argv, pass_fds=[engine.fileno()], env={"PYTHONPATH": path}) as process:
        engine.close()
        reader = LaneReader(learner, timeout_s=20)
        killed_at: list[float] = []

        def kill() -> None:
            killed_at.append(time.monotonic())
            process.kill()

        with reader.lease(20):
            threading.Timer(random.Random(seed).uniform(0.0, 0.2), kill).start()
        with pytest.raises(PeerGone):
            read_to_the_end(reader, first_step=1)
        assert time.monotonic() - killed_at[0] < 2
        reader.close()
