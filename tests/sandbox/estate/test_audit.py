"""The audit: one line for every sandbox that was handed out, saying how it ended."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta

import msgspec
import pytest

from sandbox.errors import ConfigError
from sandbox.estate.audit import LOG_NAME, Audit, Lease
from sandbox.health.processes import snapshot, with_descendants
from sandbox.host import SandboxHost
from sandbox.types import Command, JailName, Limits, SandboxSpec
from tests.sandbox.waiting import until

TRUE = Command(argv=("true",))


class Collector(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def leases(self) -> list[Lease]:
        return [msgspec.json.decode(line, type=Lease) for line in self.lines]


class Broken(logging.Handler):
    """What an embedder may install."""

    def emit(self, record: logging.LogRecord) -> None:
        raise OSError("no space left on device")


@contextmanager
def listening(handler: logging.Handler) -> Iterator[None]:
    log = logging.getLogger(LOG_NAME)
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


@pytest.mark.anyio
async def test_a_closed_sandbox_leaves_one_line_that_tells_what_it_was(host: SandboxHost, jail: JailName) -> None:
    collector = Collector()
    spec = SandboxSpec(jail=jail, limits=Limits(pids=17))
    with listening(collector):
        async with host.acquire(spec) as box:
            await box.run(TRUE)
            await box.run(TRUE)
            assert collector.lines == []
    (lease,) = collector.leases()
    assert (lease.engine_pid, lease.jail, lease.image) == (os.getpid(), jail, "host")
    assert lease.limits == spec.limits
    assert lease.unenforced == box.unenforced
    assert lease.num_commands == 2
    assert (lease.ending, lease.why) == ("closed", "")
    if os.geteuid() == 0:
        assert host._uids is not None
        assert lease.host_uid == host._uids.start + lease.number
    started, ended = datetime.fromisoformat(lease.started), datetime.fromisoformat(lease.ended)
    assert started.utcoffset() == timedelta(0)
    assert started <= ended


@pytest.mark.anyio
async def test_a_sandbox_that_died_says_so_and_why(host: SandboxHost, jail: JailName) -> None:
    collector = Collector()
    with listening(collector):
        async with host.acquire(SandboxSpec(jail=jail)) as box:
            family = with_descendants([host._warden.pid], snapshot())
            (agent,) = [info.pid for info in family if info.name == "rollout-agent"]
            os.kill(agent, signal.SIGKILL)
            await until(lambda: not box.alive)
    (lease,) = collector.leases()
    assert lease.ending == "died"
    assert "died" in lease.why


@pytest.mark.anyio
async def test_a_sandbox_that_was_never_handed_out_leaves_no_line(host: SandboxHost) -> None:
    collector = Collector()
    with listening(collector):
        with pytest.raises(ConfigError):
            async with host.acquire(SandboxSpec(image="/nonexistent/image")):
                pass
    assert collector.lines == []


@pytest.mark.anyio
async def test_a_handler_that_fails_ends_nothing(host: SandboxHost) -> None:
    with listening(Broken()):
        async with host.acquire(SandboxSpec()) as box:
            assert (await box.run(TRUE)).ok
        async with host.acquire(SandboxSpec()) as box:
            assert (await box.run(TRUE)).ok


def test_bytes_that_are_no_text_are_written_as_escapes() -> None:
    collector = Collector()
    with listening(collector):
        Audit(1, 2, SandboxSpec()).end((), 0, "w\udcffhy")
    (lease,) = collector.leases()
    assert lease.why == "w\\udcffhy"


def test_nothing_is_written_where_nobody_listens() -> None:
    collector = Collector()
    log = logging.getLogger(LOG_NAME)
    log.addHandler(collector)
    try:
        Audit(1, 2, SandboxSpec()).end((), 0, None)
    finally:
        log.removeHandler(collector)
    assert collector.lines == []
