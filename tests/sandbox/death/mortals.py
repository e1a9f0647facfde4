"""A started `mortal_engine`, seen from outside: what belongs to it, and what is left of it after a death."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from sandbox.health.census import is_warden, take_census
from sandbox.health.processes import ProcessInfo, ancestors, inspect, real_uid, snapshot
from sandbox.jails.plan import AGENT_PATH
from tests.sandbox.death.mortal_engine import Answer, Faults, Plan, Ready

SCRIPT = Path(__file__).with_name("mortal_engine.py")
REPOSITORY = SCRIPT.parents[3]


def command(plan: Plan, python: Sequence[str] | None = None) -> list[str]:
    """The words that start such an engine."""
    return [*(python or [sys.executable]), str(SCRIPT), msgspec.json.encode(plan).decode()]


def is_of_a_jail(info: ProcessInfo) -> bool:
    """Lives in a process namespace below ours, or builds one."""
    if any(os.path.basename(word) in ("bwrap", "nsjail") for word in info.words[:4]):
        return True
    try:
        with open(f"/proc/{info.pid}/status") as file:
            return any(len(line.split()) > 2 for line in file if line.startswith("NSpid:"))
    except (FileNotFoundError, ProcessLookupError):
        return False


def variables() -> dict[str, str]:
    """Its environment, for this user."""
    places = filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH")))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(places)}


class MortalEngine:
    """Args: what it is to hold, and who runs it (None: this user, with this interpreter)."""

    def __init__(self, plan: Plan, python: Sequence[str] | None = None, env: Mapping[str, str] | None = None) -> None:
        self.plan = plan
        self._others = {(info.pid, info.started) for info in snapshot().values()}
        self.process = subprocess.Popen(
            command(plan, python), stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env or variables()
        )
        self.ready = msgspec.json.decode(self._line(), type=Ready)

    def _line(self) -> bytes:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def faults(self) -> dict[str, str]:
        """How its waiters ended; waits for all of them."""
        return msgspec.json.decode(self._line(), type=Faults).by_waiter

    def answers(self, text: str) -> bool:
        """Does a sandbox that it holds in the state `answering` echo that?"""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{text}\n".encode())
        self.process.stdin.flush()
        return msgspec.json.decode(self._line(), type=Answer).text == text

    def jailed(self) -> list[ProcessInfo]:
        """Processes of its sandboxes: they run as its uids, were not there before it, and are no other engine's.

        Where all engines of a user share its uid, the warden above a process tells whose it is; without any, what
        belongs to a jail is an orphan of an engine whose warden has died, and the rest is the user's other work.
        """
        first, last = self.ready.uids
        table = snapshot()
        family = []
        for pid, info in table.items():
            uid = real_uid(pid)
            if uid is None or not first <= uid <= last or (pid, info.started) in self._others:
                continue
            wardens = [above.pid for above in ancestors(pid, table) if is_warden(above)]
            is_ours = self.ready.warden in wardens if self.ready.warden in table else not wardens and is_of_a_jail(info)
            if is_ours and pid != self.ready.pid and not is_warden(info):
                family.append(info)
        return family

    def stop_some(self) -> None:
        """Where no cgroup freezes, stops one sandbox by hand: an agent, and what it has started."""
        if self.ready.can_freeze or "frozen" not in self.plan.states:
            return
        table = snapshot()
        asleep = [info for info in self.jailed() if info.words == ("sleep", self.plan.mark)]
        for info in asleep[:3]:
            for above in ancestors(info.pid, table):
                if above.words[:1] == (AGENT_PATH,):
                    os.kill(above.pid, signal.SIGSTOP)
            os.kill(info.pid, signal.SIGSTOP)

    def kill(self, victim: str) -> None:
        """Kills `warden`, `engine`, `both` (warden first) or `both-reversed`, at once."""
        if victim in ("both-reversed", "engine"):
            self.process.kill()
        if victim != "engine":
            os.kill(self.ready.warden, signal.SIGKILL)
        if victim == "both":
            self.process.kill()
        if victim != "warden":
            self.process.wait()

    def processes_left(self) -> list[str]:
        """Of its sandboxes, and its warden."""
        left = self.jailed()
        if (warden := inspect(self.ready.warden)) is not None:
            left.append(warden)
        return [f"{info.pid} {info.name} {' '.join(info.words)}" for info in left]

    def traces(self) -> list[str]:
        """Everything else that a census counts and that is its own."""
        census = take_census(Path(self.plan.state_dir))
        slot = f"/engines/{self.ready.slot}"
        cgroups = [path for path in self.ready.roots if os.path.exists(path)]
        return [*cgroups, *(entry for entry in census.dead_engines if entry.endswith(slot)), *census.mounts]

    def end(self) -> None:
        """Whatever state it is in."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


@contextmanager
def mortal_engine(
    plan: Plan, python: Sequence[str] | None = None, env: Mapping[str, str] | None = None
) -> Iterator[MortalEngine]:
    """Such an engine, which does not outlive the context."""
    engine = MortalEngine(plan, python, env)
    try:
        yield engine
    finally:
        engine.end()
