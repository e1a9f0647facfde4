"""`rollout exec` gives the right reason for everything that a hostile or broken command does."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.sandbox.tools import installed

Exec = Callable[..., dict[str, Any]]
CANARY = "canary-5f1b9c"


def rollout(
    state_dir: Path,
    *words: str,
    stdin: bytes = b"",
    python: tuple[str, ...] = (sys.executable,),
    env: Mapping[str, str] = os.environ,
) -> subprocess.CompletedProcess[bytes]:
    """`rollout exec WORDS…` with the project's own interpreter, or another."""
    command = [*python, "-m", "rollout.cli.main", "exec", "--state-dir", str(state_dir), *words]
    variables = {**env, "ROLLOUT_TEST_SECRET": CANARY}
    return subprocess.run(command, input=stdin, capture_output=True, timeout=60, env=variables)


@pytest.fixture(
    params=[
        ("current user", "bubblewrap"),
        ("unprivileged user", "bubblewrap"),
        ("unprivileged user", "nsjail"),  # as the current user, nsjail runs the same commands in test_commands
    ],
    ids=" ".join,
)
def execute(request: pytest.FixtureRequest, state_dir: Path) -> Exec:
    """Run and return the object of `--json`; every test that asks for it runs without privileges too."""
    user, jail = request.param
    installed(jail)
    python: tuple[str, ...] = (sys.executable,)
    env: Mapping[str, str] = os.environ
    directory = state_dir
    if user == "unprivileged user":
        words, env, directory = request.getfixturevalue("unprivileged")
        python = tuple(words)

    def call(*words: str) -> dict[str, Any]:
        done = rollout(directory, "--json", "--jail", jail, *words, python=python, env=env)
        assert done.returncode == 0, done.stderr.decode()
        result: dict[str, Any] = json.loads(done.stdout)
        return result

    return call


def shell(text: str) -> tuple[str, ...]:
    return ("--", "sh", "-c", text)


def test_an_exit_code_is_an_exit(execute: Exec) -> None:
    result = execute(*shell("echo out; echo err >&2; exit 7"))
    assert (result["reason"], result["exit_code"], result["signal"]) == ("exit", 7, None)
    assert (result["stdout"], result["stderr"]) == ("out\n", "err\n")
    assert result["truncated_bytes"] == 0
    assert set(result["enforced"]).isdisjoint(result["unenforced"])


def test_wall_time_over_is_a_timeout(execute: Exec) -> None:
    result = execute("--timeout", "500ms", *shell("echo started; sleep 30"))
    assert result["reason"] == "timeout"
    assert result["stdout"] == "started\n"
    assert 0.5 <= result["wall_s"] < 5


def test_cpu_time_over_is_a_timeout(execute: Exec) -> None:
    result = execute("--cpu-time", "1", "--timeout", "20", *shell("while :; do :; done"))
    assert result["reason"] == "timeout"
    assert result["wall_s"] < 15


def test_a_hog_is_out_of_memory_where_memory_is_enforced(execute: Exec) -> None:
    result = execute("--memory", "64M", *shell("head -c 400M /dev/zero | tail"))
    if "memory" in result["enforced"]:
        assert result["reason"] == "oom"
        assert result["oom_kills"] >= 1
        assert result["peak_memory_bytes"] >= 32 << 20


def test_a_self_kill_is_a_signal_and_nothing_else(execute: Exec) -> None:
    result = execute(*shell("kill -9 $$"))
    assert (result["reason"], result["signal"], result["exit_code"]) == ("signal", 9, None)
    assert execute(*shell("kill -15 $$"))["signal"] == 15


def test_a_flood_ends_at_the_output_limit_with_head_and_tail(execute: Exec) -> None:
    result = execute(*shell("echo first; head -c 300M /dev/zero"))
    assert result["reason"] == "output_limit"
    assert result["stdout"].startswith("first\n")
    assert len(result["stdout"]) <= 1 << 20
    assert result["truncated_bytes"] >= 32 << 20


def test_the_network_is_unreachable_and_the_hosts_loopback_is_another(execute: Exec) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        port = listener.getsockname()[1]
        result = execute("--", "bash", "-c", f"exec 3<>/dev/tcp/127.0.0.1/{port}")
        assert (result["reason"], result["exit_code"]) == ("exit", 1)
        assert "refused" in result["stderr"]
        with pytest.raises(BlockingIOError):
            listener.accept()
    outside = execute("--", "bash", "-c", "exec 3<>/dev/tcp/192.0.2.1/80")
    assert (outside["reason"], outside["exit_code"]) == ("exit", 1)
    assert "unreachable" in outside["stderr"]


def test_the_hosts_secrets_are_not_there(execute: Exec, state_dir: Path) -> None:
    (state_dir / "canary").write_text(CANARY)
    hidden = ("/etc/shadow", "/etc/gshadow", "/root", "/home", "/var", "/run", str(state_dir), str(Path.home()))
    result = execute(*shell(f"for path in {' '.join(hidden)}; do cat $path $path/*; ls -A $path; done"))
    assert result["reason"] == "exit"
    assert result["exit_code"] != 0
    assert result["stdout"] == ""
    everywhere = execute(*shell("env; cat /proc/*/environ /proc/*/cmdline /etc/* /tmp/* 2>/dev/null; ls -R /workspace"))
    assert CANARY not in everywhere["stdout"]


def test_it_is_nobody_and_its_image_is_read_only(execute: Exec) -> None:
    result = execute(*shell("id -u; touch /usr/x /etc/x /bin/x /x; echo done > /workspace/y && cat /workspace/y"))
    assert result["stdout"].split()[0] != "0"
    assert result["stdout"].split()[-1] == "done"
    assert result["exit_code"] == 0
    assert len(result["stderr"].splitlines()) == 4


def test_a_background_child_neither_delays_the_result_nor_survives(execute: Exec) -> None:
    result = execute(*shell("sleep 61.7531 & echo ok"))
    assert (result["reason"], result["exit_code"], result["stdout"]) == ("exit", 0, "ok\n")
    assert result["wall_s"] < 5
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                assert b"61.7531" not in (entry / "cmdline").read_bytes()
            except OSError:
                continue  # it ended while we looked


def test_a_full_disk_is_named_where_it_is_enforced(execute: Exec) -> None:
    result = execute("--disk", "1M", *shell("head -c 8M /dev/zero > /workspace/f"))
    if "disk" in result["enforced"]:
        assert result["reason"] == "disk"
        assert result["exit_code"] not in (0, None)


def test_the_process_limit_is_named_where_it_is_enforced(execute: Exec) -> None:
    result = execute("--pids", "16", *shell("for i in $(seq 40); do sleep 2 & done; wait"))
    if "pids" in result["enforced"]:
        assert result["reason"] == "pids"


def test_bytes_that_are_not_text_come_as_base64_too(execute: Exec) -> None:
    result = execute("--", "printf", "a\\377b")
    assert result["stdout"] == "a\ufffdb"
    assert result["stdout_base64"] == "Yf9i"
    assert "stderr_base64" not in result


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (shell("exit 7"), 7, ""),
        (shell("kill -9 $$"), 137, "signal 9 (SIGKILL)"),
        (("--timeout", "0.3", *shell("sleep 30")), 124, "timeout"),
        (("--output-limit", "1K", *shell("head -c 300M /dev/zero")), 141, "over 64 KiB"),
    ],
)
def test_the_exit_status_says_what_happened(state_dir: Path, words: tuple[str, ...], status: int, said: str) -> None:
    done = rollout(state_dir, *words)
    assert done.returncode == status
    assert said in done.stderr.decode()


def test_streams_pass_through_untouched(state_dir: Path) -> None:
    data = bytes(range(256)) * 300
    done = rollout(state_dir, "--", "sh", "-c", "cat; echo err >&2", stdin=data)
    assert done.returncode == 0
    assert done.stdout == data
    assert done.stderr.startswith(b"err\n")


def test_an_input_that_never_ends_holds_nothing_up(state_dir: Path) -> None:
    reading, writing = os.pipe()
    try:
        command = [sys.executable, "-m", "rollout.cli.main", "exec", "--state-dir", str(state_dir), "--", "head", "-n1"]
        with subprocess.Popen(command, stdin=reading, stdout=subprocess.PIPE) as process:
            os.write(writing, b"one\ntwo\n")
            out, _ = process.communicate(timeout=20)
        assert (process.returncode, out) == (0, b"one\n")
    finally:
        os.close(reading)
        os.close(writing)


def test_output_and_input_pass_while_the_command_runs(state_dir: Path) -> None:
    script = "while read -r x; do echo got $x; echo err $x >&2; done; echo end"
    command = [
        sys.executable,
        "-m",
        "rollout.cli.main",
        "exec",
        "--state-dir",
        str(state_dir),
        "--",
        "sh",
        "-c",
        script,
    ]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        for word in (b"one", b"two"):
            process.stdin.write(word + b"\n")
            process.stdin.flush()
            assert process.stdout.readline() == b"got " + word + b"\n"
            assert process.stderr.readline() == b"err " + word + b"\n"
        assert process.communicate(timeout=20)[0] == b"end\n"
    assert process.returncode == 0


def test_a_long_output_is_shown_by_its_head_and_tail_and_what_is_missing_is_said(state_dir: Path) -> None:
    done = rollout(state_dir, "--output-limit", "1001", *shell("seq 1000; seq 1000 >&2"))
    whole = b"".join(b"%d\n" % i for i in range(1, 1001))
    assert done.stdout == whole[:501] + whole[-500:]
    assert done.stderr.startswith(whole[:501] + whole[-500:])
    assert b"stdout shortened" in done.stderr


def test_a_reader_that_goes_away_ends_a_command_that_would_never_end(state_dir: Path) -> None:
    script = f"{sys.executable} -m rollout.cli.main exec --state-dir {state_dir} --timeout 60 -- yes | head -n 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", script], capture_output=True, timeout=30)
    assert (done.returncode, done.stdout) == (0, b"y\n")


def test_an_interrupt_ends_it_though_nobody_reads_its_output(state_dir: Path) -> None:
    command = [sys.executable, "-m", "rollout.cli.main", "exec", "--state-dir", str(state_dir), "--", "yes"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read(2) == b"y\n"
        process.send_signal(signal.SIGINT)
        process.wait(timeout=20)  # with the pipe full and open
        assert process.returncode == 130


def test_a_workspace_file_and_a_variable_arrive(execute: Exec, state_dir: Path) -> None:
    source = state_dir / "in.txt"
    source.write_text("content")
    words = ("--workspace-file", f"{source}:deep/er.txt", "--workspace-file", str(source), "--env", "GREETING=a=b")
    result = execute(*words, *shell("cat deep/er.txt in.txt; echo $GREETING"))
    assert result["stdout"] == "contentcontenta=b\n"


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("--memory", "64X", "--", "true"), ("--memory", "64X")),
        (("--memory=-64M", "--", "true"), ("--memory", "-64M")),
        (("--memory", "1K", "--", "true"), ("--memory", "8 MiB")),
        (("--cpus", "0", "--", "true"), ("--cpus", "0.01")),
        (("--pids", "-1", "--", "true"), ("--pids", "-1")),
        (("--timeout", "never", "--", "true"), ("--timeout", "never")),
        (("--image", "ubuntu", "--", "true"), ("ubuntu", "host, python")),
        (("--insist", "weather", "--", "true"), ("weather",)),
        (("--network", "host", "--", "true"), ("--network", "host")),
        (("--jail", "chroot", "--", "true"), ("--jail", "chroot", "bubblewrap, nsjail")),
        (("--env", "novalue", "--", "true"), ("--env", "novalue")),
        (("--workspace-file", "/nonexistent", "--", "true"), ("--workspace-file", "/nonexistent")),
        ((), ("CMD",)),
    ],
)
def test_bad_input_is_one_clear_line(state_dir: Path, words: tuple[str, ...], parts: tuple[str, ...]) -> None:
    done = rollout(state_dir, *words)
    text = done.stderr.decode()
    assert done.returncode == 2
    assert text.startswith("error: ")
    assert len(text.splitlines()) == 1
    for part in parts:
        assert part in text
