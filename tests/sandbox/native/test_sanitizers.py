"""The C helper is free of warnings, and a sanitizer's report in any of its processes is seen."""

from __future__ import annotations

import shutil
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import anyio
import pytest

from sandbox.build import FLAGS, NATIVE, compile_c
from sandbox.errors import CapabilityError, ConfigError, SandboxError
from sandbox.host import SandboxConfig, SandboxHost
from sandbox.protocol.wire import Tag, text
from sandbox.types import Command, JailName, SandboxSpec
from tests.sandbox.sanitizers import Sanitized, named_native

pytestmark = pytest.mark.anyio
ENDED = "status 0x5600"
"""What the warden notes about a child that ended with a report."""
EXTRA = (
    *("-Wconversion", "-Wsign-conversion", "-Wcast-qual", "-Wundef"),
    *("-Wshadow", "-Wvla", "-Wstrict-prototypes", "-Wmissing-prototypes", "-Wformat=2", "-Wpointer-arith"),
)


@pytest.fixture
def reports_of(sanitized: Sanitized) -> Iterator[Sanitized]:
    with named_native(sanitized.native):
        sanitized.reports.take()
        yield sanitized


@pytest.fixture(params=["auto", "none"])
async def host(reports_of: Sanitized, state_dir: Path, request: pytest.FixtureRequest) -> AsyncIterator[SandboxHost]:
    config = SandboxConfig(state_dir=str(state_dir), cgroup_backend=request.param)
    async with SandboxHost.start(config) as host:
        yield host


async def words_until(sanitized: Sanitized, expected: str) -> str:
    """The reports up to one that must come, also where the process that wrote it is still ending."""
    deadline = time.monotonic() + 20
    words = ""
    while expected not in words:
        assert time.monotonic() < deadline, f"no {expected!r} in {words!r}"
        words += sanitized.reports.take()
        await anyio.sleep(0.01)
    return words


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_the_helper_compiles_without_a_warning(compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler} on this host")
    monkeypatch.setenv("CC", compiler)
    assert {"-Wall", "-Wextra", "-Werror"} <= set(FLAGS)
    compile_c(tmp_path / "native", sorted(NATIVE.glob("*.c")), (*FLAGS, *EXTRA), [()])


def test_a_warning_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "bad.c").write_text("int main(void) { int unused; return 0; }\n")
    with pytest.raises(CapabilityError, match="unused"):
        compile_c(tmp_path / "bad", [tmp_path / "bad.c"], FLAGS, [()])


async def test_a_named_helper_that_is_none_is_refused(
    state_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLOUT_NATIVE", str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match="ROLLOUT_NATIVE"):
        async with SandboxHost.start(SandboxConfig(state_dir=str(state_dir))):
            pass


async def test_an_error_in_a_live_agent_ends_its_sandbox_and_is_reported(
    host: SandboxHost, jail: JailName, sanitized: Sanitized
) -> None:
    async with host.acquire(SandboxSpec(jail=jail)) as box:
        assert (await box.run(Command(argv=("true",)))).ok
        assert not sanitized.reports.take()
        with pytest.raises(SandboxError), anyio.fail_after(20):
            await box.read_file("/planted-agent", 100)
        words = await words_until(sanitized, ENDED)
    if jail == "bubblewrap":  # nsjail lets no descriptor through that could carry the words
        assert "heap-buffer-overflow" in words


@pytest.mark.parametrize("what", ["command", "put"])
async def test_an_error_in_a_child_of_the_agent_is_reported(
    host: SandboxHost, jail: JailName, sanitized: Sanitized, what: str
) -> None:
    async with host.acquire(SandboxSpec(jail=jail)) as box:
        action = (
            box.run(Command(argv=("/planted-command",))) if what == "command" else box.write_file("/planted-put", b"")
        )
        with pytest.raises(SandboxError), anyio.fail_after(20):
            await action
        words = await words_until(sanitized, ENDED)
    if jail == "bubblewrap" and what == "put":  # a command's words are its own stderr
        assert "heap-buffer-overflow" in words


async def test_an_error_in_the_warden_is_reported_in_its_own_words(host: SandboxHost, sanitized: Sanitized) -> None:
    async with host.acquire(SandboxSpec()) as box:
        assert (await box.run(Command(argv=("true",)))).ok
        with pytest.raises(SandboxError), anyio.fail_after(20):
            await host._warden.release(0, [text(Tag.REMOVE, "/planted-warden")])
    await words_until(sanitized, "heap-buffer-overflow")


async def test_a_leak_in_the_warden_is_reported_when_it_ends(reports_of: Sanitized, state_dir: Path) -> None:
    async with SandboxHost.start(SandboxConfig(state_dir=str(state_dir))) as host:
        async with host.acquire(SandboxSpec()):
            await host._warden.release(0, [text(Tag.REMOVE, "/planted-leak")])
    assert "LeakSanitizer" in reports_of.reports.take()
