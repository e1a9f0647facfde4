"""Whatever the standard descriptors are (closed, full, gone), a command ends with a fitting status and no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROLLOUT = f"{sys.executable} -m rollout.cli.main"
COMMANDS = {
    "exec": "exec {state} -- echo hello",
    "exec --json": "exec {state} --json -- echo hello",
    "doctor": "doctor {state}",
    "doctor --json": "doctor {state} --json",
    "verify": "verify {state} demo:heldout:1",
    "verify --json": "verify {state} demo:heldout:1 --json",
    "census": "census {state}",
    "gc": "gc {state}",
    "image list": "image list {state}",
    "--help": "--help",
    "exec --help": "exec --help",
}


def shell(text: str, *, unbuffered: str = "") -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    return subprocess.run(["bash", "-c", text], capture_output=True, text=True, timeout=60, env=env)


@pytest.fixture
def state(state_dir: Path) -> str:
    return f"--state-dir {state_dir}"


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&-", ">&- 2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("command", ["exec {state} -- sh -c 'cat; exit 4'", "doctor {state}"])
def test_a_closed_standard_descriptor_changes_no_status(state: str, command: str, closed: str) -> None:
    words = f"{ROLLOUT} {command.format(state=state)}"
    usual = shell(f"{words} < /dev/null > /dev/null")
    assert usual.returncode == (4 if "exit 4" in command else 0)
    done = shell(f"{words} {closed}")
    # stderr holds what it holds anyway: which limits this host does not enforce.
    assert (done.returncode, done.stderr) == (usual.returncode, "" if "2>&-" in closed else usual.stderr)


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_full_stdout_is_one_line_and_a_fault(state: str, command: str, unbuffered: str) -> None:
    done = shell(f"{ROLLOUT} {command.format(state=state)} > /dev/full", unbuffered=unbuffered)
    assert done.returncode == 3
    assert done.stderr.splitlines()[-1] == "fault: OutputError: stdout cannot be written: No space left on device"
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_reader_that_goes_away_is_no_failure(state: str, command: str) -> None:
    done = shell(f"{ROLLOUT} {command.format(state=state)} | true; echo ${{PIPESTATUS[0]}}")
    assert (done.stdout, "Traceback" in done.stderr) == ("0\n", False)


@pytest.mark.parametrize("stderr", ["2>/dev/full", "2>&1 >/dev/null | true"])
def test_a_stderr_that_takes_nothing_is_no_failure(state: str, stderr: str) -> None:
    done = shell(f"{ROLLOUT} verify {state} demo:heldout:1 {stderr}; echo ${{PIPESTATUS[0]}}")
    assert done.stdout.splitlines()[-1] == "0"


def test_a_commands_stderr_that_cannot_be_written_is_a_fault(state: str) -> None:
    assert shell(f"{ROLLOUT} exec {state} -- sh -c 'echo lost >&2' 2>/dev/full").returncode == 3


def test_letters_beyond_the_encoding_of_stdout_are_escaped(tmp_path: Path) -> None:
    code = "import sys; from rollout.cli.output import open_standard_streams as o; o(); print('\u2026 \\udcff'); o()"
    env = {"PYTHONIOENCODING": "ascii", "PATH": os.environ["PATH"]}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, env=env)
    assert (done.stdout, done.stderr) == (b"\\u2026 \\udcff\n", b"")


@pytest.fixture
def full_disk() -> Iterator[str]:
    """A file system of 128 KiB; needs the right to mount."""
    path = tempfile.mkdtemp(prefix="rollout-full-")
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k,mode=755", "tmpfs", path], capture_output=True)
    if made.returncode != 0:
        os.rmdir(path)
        pytest.skip("may not mount a small file system here")
    yield path
    subprocess.run(["umount", path], check=True)
    os.rmdir(path)


@pytest.mark.parametrize(
    "command",
    ["exec --state-dir {} -- true", "verify --state-dir {} demo:heldout:1", "image build python --state-dir {}"],
)
def test_a_full_state_directory_is_one_line(full_disk: str, command: str) -> None:
    done = shell(f"{ROLLOUT} {command.format(full_disk)}")
    assert done.returncode in (2, 3)
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith(("error: ", "fault: "))
    assert full_disk in last
    assert "No space left" in last
    assert len(last) < 500
