"""What a harness expects of any provider of sandboxes: files, working directories, users, input, exit codes, limits."""

from __future__ import annotations

import errno
import os

import pytest

from sandbox.errors import ConfigError, TransferError
from sandbox.sandbox import Sandbox
from sandbox.types import MIB, Command, Reason
from tests.sandbox.conformance.arena import PATIENCE_S, Arena, names_inside, sh, shell

pytestmark = pytest.mark.anyio


async def failed_read(box: Sandbox, path: str, max_bytes: int = MIB) -> int:
    with pytest.raises(TransferError) as caught:
        await box.read_file(path, max_bytes)
    assert path in str(caught.value)
    return caught.value.error


async def failed_write(box: Sandbox, path: str, data: bytes = b"x") -> int:
    with pytest.raises(TransferError) as caught:
        await box.write_file(path, data)
    assert path in str(caught.value)
    return caught.value.error


async def test_text_and_binary_files_come_back_as_they_went(box: Sandbox) -> None:
    samples = {
        "text": "line one\ngrößer ☃ 𝄞\r\nno newline".encode(),
        "binary": bytes(range(256)) * 10,
        "invalid utf-8": b"\xc3\x28\xff\xfe\x00\x80",
        "empty": b"",
        "one newline": b"\n",
        "large": os.urandom(4 * MIB),
    }
    for name, data in samples.items():
        await box.write_file(name, data)
        assert await box.read_file(name, 8 * MIB) == data, name
        assert (await box.run(Command(argv=("cat", "--", name), output_limit_bytes=8 * MIB))).stdout == data, name


async def test_names_of_any_kind_are_only_names(box: Sandbox) -> None:
    for name in ("with space", "-rf", "$(id)", "*", "'quoted\"", "new\nline", "ü☃", "a" * 255, "./x/../dotted"):
        await box.write_file(name, name.encode())
        assert await box.read_file(name, MIB) == name.encode()
    assert await failed_write(box, "a" * 256) == errno.ENAMETOOLONG
    for bad in ("", "nul\0inside"):
        with pytest.raises(ConfigError):
            await box.write_file(bad, b"")


async def test_a_write_replaces_makes_parents_and_takes_relative_paths_from_the_workspace(box: Sandbox) -> None:
    await box.write_file("deep/er/file", b"long content")
    await box.write_file("/workspace/deep/er/file", b"short")
    assert await box.read_file("deep/er/file", MIB) == b"short"
    assert (await sh(box, "cat /workspace/deep/er/file")).stdout == b"short"


async def test_a_program_inside_reads_what_was_written_and_we_read_what_it_wrote(box: Sandbox) -> None:
    await box.write_file("script.sh", b"#!/bin/sh\necho made by $1 > made\n", mode=0o755)
    assert (await box.run(Command(argv=("./script.sh", "me")))).ok
    assert await box.read_file("made", MIB) == b"made by me\n"


async def test_a_missing_file_a_directory_and_a_closed_file_are_three_errors(box: Sandbox) -> None:
    await sh(box, "mkdir dir; echo x > closed; chmod 0 closed; mkdir -m 0 shut")
    assert await failed_read(box, "missing") == errno.ENOENT
    assert await failed_read(box, "missing/deeper") == errno.ENOENT
    assert await failed_read(box, "closed/below") in (errno.ENOTDIR, errno.EACCES)
    assert await failed_read(box, "closed") == errno.EACCES
    assert await failed_read(box, "shut/file") == errno.EACCES
    await failed_read(box, "dir")
    assert await failed_write(box, "shut/file") == errno.EACCES
    assert await failed_write(box, "/etc/new") in (errno.EROFS, errno.EACCES)
    await failed_write(box, "dir")


async def test_a_file_over_the_callers_cap_is_refused_and_at_the_cap_it_comes(box: Sandbox) -> None:
    await box.write_file("f", bytes(100_000))
    assert await failed_read(box, "f", 99_999) == errno.EFBIG
    assert len(await box.read_file("f", 100_000)) == 100_000


async def test_a_command_runs_where_it_is_told(box: Sandbox) -> None:
    assert (await box.run(Command(argv=("pwd",)))).stdout == b"/workspace\n"
    await sh(box, "mkdir -p sub/dir")
    assert (await box.run(Command(argv=("pwd",), cwd="/workspace/sub/dir"))).stdout == b"/workspace/sub/dir\n"
    absent = await box.run(Command(argv=("true",), cwd="/nowhere"))
    assert (absent.reason, absent.exit_code) == (Reason.EXIT, 126)
    assert b"/nowhere" in absent.stderr
    with pytest.raises(ConfigError, match="cwd"):
        Command(argv=("true",), cwd="relative")


async def test_the_environment_is_minimal_and_a_commands_own_comes_on_top(arena: Arena) -> None:
    async with arena.hostile(env={"FROM_SPEC": "spec", "BOTH": "spec"}) as box:
        values = {"BOTH": "command", "EMPTY": "", "ODD": "a=b\n$(id) ☃"}
        outcome = await box.run(Command(argv=("env", "-0"), env=values))
        variables = dict(entry.split("=", 1) for entry in outcome.stdout.decode().split("\0")[:-1])
        assert variables["FROM_SPEC"] == "spec"
        assert {name: variables[name] for name in values} == values
        assert variables["HOME"] == "/workspace"
        assert not set(variables) & (set(os.environ) - {"PATH", "HOME", "LANG", "BOTH", "PYTHONDONTWRITEBYTECODE"})


async def test_it_is_one_unprivileged_user_with_a_name_and_a_home(box: Sandbox) -> None:
    outcome = await sh(box, "id -u; id -g; id -un; echo ~; groups; umask")
    assert outcome.stdout.split() == [b"1000", b"1000", b"sandbox", b"/workspace", b"sandbox", b"0022"]
    assert not (await sh(box, "su root -c id || sudo id || chown 0 . || setpriv --reuid=0 id")).ok


async def test_it_is_the_user_that_was_asked_for_and_has_no_power_as_root(arena: Arena) -> None:
    for user in (0, 4242):
        async with arena.hostile(user=user) as box:
            await box.write_file("mine", b"")
            outcome = await sh(box, "id -u; id -g; stat -c '%u %g' mine . ; grep CapEff /proc/self/status")
            assert outcome.stdout.split() == [str(user).encode()] * 6 + [b"CapEff:", b"0" * 16]
            assert not (await sh(box, "chown 1 mine || mount -t tmpfs x /tmp || touch /usr/x")).ok


async def test_input_arrives_whole_and_ends(box: Sandbox) -> None:
    data = os.urandom(300_000)
    assert (await box.run(Command(argv=("cat",), stdin=data))).stdout == data
    assert (await box.run(Command(argv=("cat",)))).stdout == b""  # nothing to wait for
    assert (await box.run(Command(argv=("wc", "-c"), stdin=data))).stdout.strip() == b"300000"


async def test_output_that_is_not_text_comes_as_bytes(box: Sandbox) -> None:
    outcome = await sh(box, r"printf 'a\377\000b\303'; printf '\376' >&2")
    assert (outcome.stdout, outcome.stderr) == (b"a\xff\x00b\xc3", b"\xfe")


async def test_a_missing_program_is_127_and_one_that_cannot_run_126(box: Sandbox) -> None:
    await sh(box, "echo text > plain; echo '#!/no/such' > lost; chmod +x lost")
    for argv, code in (
        (("no-such-program",), 127),
        (("/no/such/program",), 127),
        (("./lost",), 127),
        (("./plain",), 126),
        (("/workspace",), 126),
    ):
        outcome = await box.run(Command(argv=argv))
        assert (outcome.reason, outcome.exit_code) == (Reason.EXIT, code), (argv, outcome)
        assert argv[0].encode() in outcome.stderr


async def test_arguments_arrive_as_they_are(box: Sandbox) -> None:
    words = ("", " ", "a b", "$HOME", "*", "'", '"', "\\", "\n", "ü☃", "-n", "x" * 5000)
    outcome = await box.run(Command(argv=("printf", r"%s\0", *words)))
    assert outcome.stdout.decode().split("\0")[:-1] == list(words)


async def test_a_timeout_is_kept_with_a_child_and_the_next_command_runs(box: Sandbox) -> None:
    outcome = await box.run(shell("sleep 600 | sleep 600", timeout_s=0.5))
    assert outcome.reason is Reason.TIMEOUT
    assert outcome.usage.wall_s < PATIENCE_S / 4
    assert await names_inside(box) == []
    for bad in (0, -1, float("nan"), float("inf"), 1e9):
        with pytest.raises(ConfigError, match="timeout_s"):
            Command(argv=("true",), timeout_s=bad)


async def test_output_limits_hold_for_each_stream_and_the_exit_code_stays(box: Sandbox) -> None:
    script = "head -c 50000 /dev/zero; head -c 60000 /dev/zero >&2; exit 3"
    outcome = await box.run(shell(script, output_limit_bytes=1000))
    assert (outcome.reason, outcome.exit_code) == (Reason.EXIT, 3)
    assert (len(outcome.stdout), outcome.stdout_truncated_bytes) == (1000, 49_000)
    assert (len(outcome.stderr), outcome.stderr_truncated_bytes) == (1000, 59_000)


async def test_state_lives_on_between_commands_and_not_between_sandboxes(arena: Arena) -> None:
    async with arena.hostile() as box:
        await sh(box, "echo kept > f; cd /tmp; export X=1; umask 0")
        assert (await sh(box, "cat f; pwd; echo [$X]; umask")).stdout.split() == [
            b"kept",
            b"/workspace",
            b"[]",
            b"0022",
        ]
    async with arena.hostile() as box:
        assert (await sh(box, "ls -A /workspace /tmp /dev/shm | grep -c '^f$'")).stdout == b"0\n"
