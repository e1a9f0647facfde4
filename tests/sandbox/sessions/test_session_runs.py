"""Runs of a session: what stays in the shell, what is each run's own, and how every kind of script ends."""

from __future__ import annotations

import os

import anyio
import pytest

from sandbox.errors import ConfigError, SandboxDiedError
from sandbox.sandbox import Sandbox
from sandbox.sessions.session import Session
from sandbox.types import KIB, MIB, Outcome, Reason

pytestmark = pytest.mark.anyio


async def said(session: Session, script: str, **options: object) -> bytes:
    """What a script prints that ends well."""
    outcome: Outcome = await session.run(script, **options)  # type: ignore[arg-type]
    assert outcome.ok, outcome
    assert outcome.stderr == b"", outcome
    return outcome.stdout


async def test_directory_variables_functions_aliases_options_and_jobs_stay(session: Session) -> None:
    await said(session, "mkdir -p a/b; cd a/b; plain=1; export LOUD=2; f() { echo f $plain $1; }; alias g='f g'")
    await said(session, "set -f; umask 027; exec 7>kept; trap 'echo usr' USR1")
    await said(session, "sleep 60 >/dev/null 2>&1 & echo started >&7")
    assert await said(session, "pwd; f x; sh -c 'echo $LOUD'; echo *; umask; kill -USR1 $$") == (
        b"/workspace/a/b\nf 1 x\n2\n*\n0027\nusr\n"
    )
    assert await said(session, "g; cat kept; jobs | grep -c Running; kill %1") == b"f 1 g\nstarted\n1\n"


async def test_each_run_has_streams_of_its_own(session: Session) -> None:
    outcome = await session.run("cat; echo oops >&2; exit_code() { return 7; }; exit_code", stdin=b"typed\0\xff")
    assert (outcome.reason, outcome.exit_code, outcome.signal) == (Reason.EXIT, 7, None)
    assert (outcome.stdout, outcome.stderr) == (b"typed\0\xff", b"oops\n")
    assert await said(session, "echo $?; cat") == b"7\n"
    assert await said(session, "exec >elsewhere 2>&1 </dev/zero; echo hidden") == b""
    assert await said(session, "cat elsewhere; read -r x; echo $?") == b"hidden\n1\n"
    assert await said(session, "exec <&- >&- 2>&-; :") == b""
    assert await said(session, "for n in 0 1 2; do [ -e /proc/$$/fd/$n ] && echo $n; done; :") == b"0\n1\n2\n"


async def test_output_is_kept_by_head_and_tail(session: Session) -> None:
    outcome = await session.run("yes | head -c 300000; head -c 200000 /dev/zero >&2", output_limit_bytes=KIB)
    assert outcome.stdout == b"y\n" * 512
    assert outcome.stdout_truncated_bytes == 300_000 - KIB
    assert outcome.stderr == bytes(KIB)
    assert outcome.stderr_truncated_bytes == 200_000 - KIB


async def test_no_command_inherits_the_shells_own_descriptors(session: Session) -> None:
    listing = await said(session, "ls /proc/self/fd; (ls /proc/self/fd) & wait $!")
    assert listing == b"0\n1\n2\n3\n" * 2  # 3 is the directory


@pytest.mark.parametrize("shell", ["bash", "sh"])
async def test_whatever_a_script_is_its_shell_goes_on(box: Sandbox, shell: str) -> None:
    """Each with what it prints, its exit code and words on stderr."""
    bash = shell == "bash"
    scripts: list[tuple[str, bytes, int, bytes]] = [
        ("if", b"", 2, b"yntax error"),
        ("echo 'never ends", b"", 2, b"'" if bash else b"Unterminated"),
        ("echo one\nfi\necho two", b"one\n", 2, b"yntax error"),
        ("cat <<END\none\nEND", b"one\n", 0, b""),
        ("cat <<'END'\n$never ends", b"$never ends\n", 0, b"here-document" if bash else b""),
        ("# nothing", b"", 0, b""),
        ("", b"", 0, b""),
        ("no-such-command", b"", 127, b"not found"),
        ("echo before; break; continue; echo after", b"before\nafter\n", 0, b""),
        ("echo before; return 5; echo after", b"before\n", 5, b""),
        ("echo ${unset?no}; echo after", b"", 1 if bash else 2, b"no"),
        ("echo $((1 / 0)); echo after", b"", 1 if bash else 2, b"division"),
        ("(exit 9)", b"", 9, b""),
        ("sh -c 'kill -9 $$'", b"", 137, b""),
        ("kill $$; echo spared", b"spared\n", 0, b""),
        ("kill -INT $$; echo interrupted", b"", 130, b""),
        ("trap 'echo usr' USR1; kill -USR1 $$; trap - USR1", b"usr\n", 0, b""),
        ("mkdir gone; cd gone; rmdir ../gone; echo here", b"here\n", 0, b""),
        ("echo still; cd /workspace", b"still\n", 0, b""),
        ("set -u; set -x; set -v; echo loud", b"loud\n", 0, b"echo loud"),
        ("set +xvu; echo quiet", b"quiet\n", 0, b""),
        ("set -C; echo clobber", b"clobber\n", 0, b""),
        ("set -- a b; echo $#", b"2\n", 0, b""),
        ("printf '%s' 'no newline at the end'", b"no newline at the end", 0, b""),
        ("alias echo='echo aliased' .='false' printf=false unset=false exit=false", b"", 0, b""),
        ("echo x; unalias -a", b"aliased x\n", 0, b""),
        ("printf() { false; }; read() { false; }; type() { false; }; echo done", b"done\n", 0, b""),
        ("echo more", b"more\n", 0, b""),
        ("command() { false; }; test() { false; }; kill() { false; }; echo done", b"done\n", 0, b""),
        ("IFS=0123456789; PS1='$(echo no)'; PS4=no; echo a1b", b"a1b\n", 0, b""),
        ("(exit 23)", b"", 23, b""),
        ("echo $?; unset IFS", b" \n", 0, b""),
        ("readonly _x=1; _x=2; echo after", b"", 1 if bash else 2, b"_x"),
        ("readonly x=1 y=2; shopt -s failglob 2>/dev/null; echo \"a!b\" '!!'", b"a!b !!\n", 0, b""),
        ("echo last", b"last\n", 0, b""),
    ]
    async with box.session(shell=shell) as session:
        assert session.bash == bash
        for script, stdout, code, words in scripts:
            outcome = await session.run(script)
            assert session.alive, (script, outcome)
            assert (outcome.stdout, outcome.exit_code) == (stdout, code), (script, outcome)
            assert outcome.reason is Reason.EXIT, (script, outcome)
            assert words in outcome.stderr, (script, outcome)
            assert b"POSIXLY" not in outcome.stderr, outcome


async def test_functions_in_the_place_of_every_builtin_change_no_boundary(box: Sandbox) -> None:
    names = "eval exit unset set exec export trap return source declare builtin enable local shift times : . ["
    async with box.session(shell="bash") as session:
        for name in names.split():
            assert await said(session, f"function {name} {{ echo fooled; }}") == b""
        assert await said(session, "echo one; exit 3") == b"one\nfooled\n"
        outcome = await session.run("[[ -n $BASH ]] && (( 0 ))")
        assert (outcome.exit_code, outcome.stdout, outcome.stderr) == (1, b"", b"")
        assert await said(session, "echo $?; shopt -o posix; true") == b"1\nposix          \toff\n"


async def test_posix_mode_stays_as_the_script_set_it(box: Sandbox) -> None:
    async with box.session(shell="bash") as session:
        await said(session, "set -o posix")
        assert await said(session, "shopt -o posix") == b"posix          \ton\n"
        await said(session, "set +o posix; function . { :; }")
        assert await said(session, "shopt -o posix; true") == b"posix          \toff\n"


async def test_a_line_number_is_the_scripts_own(session: Session) -> None:
    assert await said(session, "echo $LINENO\n\necho $LINENO") == b"1\n3\n"
    outcome = await session.run("echo one\n\nfi")
    assert b"line 3" in outcome.stderr


async def test_a_script_of_a_mebibyte_runs_whole(session: Session) -> None:
    lines = "".join(f": {'x' * 100} {n}\n" for n in range(9000))
    script = f"{lines}echo end #"
    script += "y" * (MIB - len(script))
    assert await said(session, script) == b"end\n"
    with pytest.raises(ConfigError, match="1 MiB"):
        await session.run(script + "y")
    for wrong in ("a\0b", "\ud800"):
        with pytest.raises(ConfigError, match=r"session\.script"):
            await session.run(wrong)
    with pytest.raises(ConfigError, match="timeout_s"):
        await session.run("true", timeout_s=0)
    assert await said(session, "echo here") == b"here\n"


@pytest.mark.parametrize(
    ("script", "stdout", "exit_code", "signal"),
    [
        ("echo a; exit 3; echo b", b"a\n", 3, None),
        ("trap 'echo bye' EXIT; exit 4", b"bye\n", 4, None),
        ("exec sh -c 'echo replaced; exit 5'", b"replaced\n", 5, None),
        ("set -e; echo a; false; echo b", b"a\n", 1, None),
        ("echo a; kill -9 $$", b"a\n", None, 9),
        ('exec 0<&-; for n in 10 11 12 13 14; do eval "exec $n<&-"; done; echo closed', b"closed\n", 0, None),
    ],
)
async def test_the_end_of_the_shell_is_the_outcome_and_ends_the_session(
    session: Session, script: str, stdout: bytes, exit_code: int | None, signal: int | None
) -> None:
    await session.run("sleep 60 & :")
    outcome = await session.run(script, timeout_s=10)
    assert (outcome.stdout, outcome.exit_code, outcome.signal) == (stdout, exit_code, signal), outcome
    assert outcome.reason is (Reason.EXIT if signal is None else Reason.SIGNAL)
    assert not session.alive
    with pytest.raises(SandboxDiedError, match="session has ended"):
        await session.run("true")


async def test_an_exec_of_what_does_not_exist_ends_nothing(box: Sandbox) -> None:
    async with box.session(shell="bash") as session:
        assert (await session.run("exec no-such-program")).exit_code == 127
        assert await said(session, "echo on") == b"on\n"


async def test_what_a_background_job_writes_after_its_run_is_in_no_other_run(session: Session) -> None:
    outcome = await session.run("while :; do echo late; echo late >&2; sleep 0.01; done & echo mine")
    assert outcome.stdout.startswith(b"mine\n") or b"mine\n" in outcome.stdout
    for _ in range(5):
        assert await said(session, "sleep 0.03; echo other") == b"other\n"
    assert await said(session, "jobs | grep -c Running") == b"1\n"  # nobody broke its pipe
    outcome = await session.run("head -c 1000000 /dev/zero & sleep 0.1; echo mine >&2")
    assert outcome.stderr == b"mine\n"


async def test_one_run_at_a_time(session: Session) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(said, session, "sleep 0.3")
        await anyio.sleep(0.1)
        with pytest.raises(ConfigError, match="wait until"):
            await session.run("echo no")
    assert await said(session, "echo yes") == b"yes\n"


async def test_several_sessions_and_commands_share_a_sandbox(box: Sandbox) -> None:
    async with box.session() as one, box.session(shell="sh") as other:
        await said(one, "x=1; cd /tmp; echo shared > file")
        assert await said(other, "echo ${x-none}; cat /tmp/file; pwd") == b"none\nshared\n/workspace\n"
        assert other.alive


async def test_a_session_leaves_no_descriptor(box: Sandbox) -> None:
    async with box.session() as session:
        await said(session, "true")
    before = len(os.listdir("/proc/self/fd"))
    for script in ("echo a", "if", "exit 3", "sleep 50 &"):
        async with box.session() as session:
            await session.run(script)
            await session.run("true") if session.alive else None
    left = len(os.listdir("/proc/self/fd"))
    assert left <= before + 2  # the streams of that sleep, which nobody holds any more, or not yet seen to end
