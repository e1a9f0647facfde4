"""What code in a sandbox can see of the host and of its siblings, and what it may not do: asked from inside."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import AsyncIterator

import pytest

from sandbox.host import SandboxHost
from sandbox.sandbox import Sandbox
from sandbox.types import Command, JailName, SandboxSpec
from tests.sandbox.jails.probes import ask

pytestmark = pytest.mark.anyio
by_number = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="environment reason: the numbers of the calls are x86_64's"
)


@pytest.fixture
async def box(host: SandboxHost, jail: JailName) -> AsyncIterator[Sandbox]:
    async with host.acquire(SandboxSpec(image="python", jail=jail)) as box:
        yield box


@pytest.fixture
async def sibling(host: SandboxHost, jail: JailName) -> AsyncIterator[Sandbox]:
    async with host.acquire(SandboxSpec(image="python", jail=jail)) as box:
        yield box


# ---------------------------------------------------------------------- what it sees


async def test_the_environment_and_the_names_are_the_sandboxs_own(box: Sandbox) -> None:
    seen = await ask(box, "answer([dict(os.environ), list(os.uname()), os.getcwd()])")
    environment, names, cwd = seen
    threads = {"OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "LD_LIBRARY_PATH"}
    own = {"HOME", "LANG", "PATH", "PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED"}
    assert set(environment) - threads == own
    assert names[1] == "sandbox" != os.uname().nodename
    assert cwd == "/workspace"


async def test_proc_shows_processes_and_a_few_files_and_nothing_else_of_the_host(box: Sandbox) -> None:
    code = """
kept = {"cpuinfo", "filesystems", "loadavg", "meminfo", "stat", "uptime", "version", "vmstat",
        "mounts", "net", "self", "sys", "sysvipc", "thread-self"}
told = []
for name in os.listdir("/proc"):
    path = f"/proc/{name}"
    if name.isdigit() or name in kept:
        continue
    try:
        if os.listdir(path) if os.path.isdir(path) else open(path, "rb").read(1):
            told.append(path)
    except OSError:
        pass
answer(told)
"""
    assert await ask(box, code) == []


async def test_nothing_in_proc_can_be_written(box: Sandbox) -> None:
    code = """
own = ("oom_score_adj", "comm", "uid_map", "setgroups", "coredump_filter", "clear_refs", "timerslack_ns", "mem")
answer([
    {name: attempt(os.open, f"/proc/self/{name}", os.O_WRONLY) for name in own},
    [os.path.join(folder, name) for folder, _, names in os.walk("/proc/sys") for name in names
     if os.access(os.path.join(folder, name), os.W_OK)],
    os.statvfs("/proc").f_flag & os.ST_RDONLY,
])
"""
    own, switches, read_only = await ask(box, code)
    assert set(own.values()) <= {"EROFS", "EACCES", "EPERM"}, own
    assert switches == []
    assert read_only


async def test_there_is_no_sysfs_no_cgroupfs_and_no_device_but_five(box: Sandbox) -> None:
    code = """
types = [line.split(" - ")[1].split()[0] for line in open("/proc/self/mountinfo")]
there = [path for path in ("/sys", "/run", "/root", "/home") if os.path.exists(path)]
answer([types, os.listdir("/dev"), there])
"""
    types, devices, places = await ask(box, code)
    assert not {"sysfs", "cgroup", "cgroup2", "debugfs", "mqueue", "securityfs", "bpf"} & set(types)
    assert set(devices) == {"null", "zero", "full", "random", "urandom", "fd", "shm", "stdin", "stdout", "stderr"}
    assert places == []


async def test_one_uid_exists_and_it_cannot_become_another(box: Sandbox) -> None:
    code = """
answer([
    open("/proc/self/uid_map").read().split(), open("/proc/self/gid_map").read().split(),
    [attempt(os.setuid, 0), attempt(os.setgid, 0), attempt(os.setgroups, [0]), attempt(os.setresuid, 0, 0, 0)],
    [os.getuid(), os.getgid()],
])
"""
    uids, gids, attempts, own = await ask(box, code)
    assert uids[2] == gids[2] == "1"
    assert uids[1] != "0" != gids[1]
    assert uids[0] == str(own[0])
    assert "ok" not in attempts


# ---------------------------------------------------------------------- what it may do

STATUS = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp")
"""Lines of /proc/PID/status that say what a process may do."""


async def test_no_process_has_a_capability_and_none_can_gain_one(box: Sandbox) -> None:
    code = """
def told(pid):
    lines = dict(line.rstrip("\\n").split(":\\t", 1) for line in open(f"/proc/{pid}/status") if ":\\t" in line)
    return [int(lines[name], 16) for name in sys.argv[1:]]
child = os.fork()
if child == 0:
    os.execvp("sleep", ["sleep", "30"])
everyone = {name: told(name) for name in os.listdir("/proc") if name.isdigit()}
os.kill(child, 9)
answer(everyone)
"""
    everyone = await ask(box, code, *STATUS)
    assert "1" in everyone
    assert len(everyone) >= 3
    for pid, values in everyone.items():
        assert values == [0, 0, 0, 0, 0, 1, 2], f"process {pid}"


async def test_the_first_process_cannot_be_read_traced_or_killed(box: Sandbox) -> None:
    code = """
files = ("environ", "mem", "maps", "auxv", "stack", "syscall", "io", "timers", "fd/0")
links = ("exe", "root", "cwd", "fd/3", "ns/mnt", "ns/user")
space = ctypes.create_string_buffer(16)
class Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
here, there = Vector(ctypes.addressof(space), 8), Vector(0x400000, 8)
libc.ptrace.restype = libc.process_vm_readv.restype = ctypes.c_long
def traced():
    if libc.ptrace(16, 1, 0, 0) < 0: raise OSError(ctypes.get_errno(), "")
def read():
    got = libc.process_vm_readv(1, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
    if got < 0: raise OSError(ctypes.get_errno(), "")
pidfd = os.pidfd_open(1)
answer([
    {name: attempt(lambda: open(f"/proc/1/{name}", "rb").read(1)) for name in files}
    | {name: attempt(os.readlink, f"/proc/1/{name}") for name in links}
    | {"ptrace": attempt(traced), "process_vm_readv": attempt(read), "pidfd_getfd": call(438, pidfd, 3, 0)},
    [attempt(os.kill, 1, number) for number in (9, 15, 19, 11)],
])
"""
    refused, _ = await ask(box, code)
    assert set(refused.values()) <= {"EACCES", "EPERM"}, refused
    assert (await box.run(Command(argv=("true",)))).ok, "signals from inside do not reach it"


@by_number
@pytest.mark.parametrize(
    ("names", "code"),
    [
        ("namespaces", "[call(272, flag) for flag in (0x10000000, 0x20000, 0x40000000, 0x20000000, 0x8000000, 0x80)]"),
        ("cloned namespaces", "[call(56, flag | 17, 0, 0, 0, 0) for flag in (0x10000000, 0x20000, 0x40000000)]"),
        ("joined namespaces", "[call(308, os.open('/proc/self/ns/user', 0), 0)]"),
        ("mounts", "[call(165, b'none', b'/tmp', b'tmpfs', 0, 0), call(166, b'/tmp', 2), call(155, b'/', b'/tmp')]"),
        (
            "new mounts",
            "[call(428, -100, b'/', 1), call(429), call(430, b'tmpfs', 0), call(432), call(433), call(442)]",
        ),
        ("roots", "[call(161, b'/tmp')]"),
        ("keyrings", "[call(248, b'user', b'a', b'b', 1, -3), call(249, b'user', b'a', 0, 0), call(250, 0, -3, 0)]"),
        ("programs in the kernel", "[call(321, 0, 0, 0), call(298, 0, 0, -1, -1, 0)]"),
        ("page faults", "[call(323, 1), call(323, 0)]"),
        ("io_uring", "[call(425, 1, ctypes.create_string_buffer(256)), call(426, 3, 0, 0, 0), call(427, 3, 0, 0, 0)]"),
        ("file handles", "[call(303, -100, b'/', 0, 0, 0), call(304, 3, 0, 0), call(300, 0, 0)]"),
        ("the machine", "[call(169, 0, 0, 0, 0), call(246), call(175), call(313), call(163, 0), call(167, b'/x', 0)]"),
        (
            "clocks and names",
            "[call(227, 0, b'0' * 16), call(164, b'0' * 16, 0), call(170, b'x', 1), call(171, b'x', 1)]",
        ),
        ("the kernel's log", "[call(103, 3, ctypes.create_string_buffer(64), 64)]"),
        ("ports and segments", "[call(172, 3), call(173, 0, 1, 1), call(154, 1, b'0' * 16, 16)]"),
        ("huge pages", "[call(9, 0, 1 << 21, 3, 0x40022, -1, 0), call(319, b'x', 4), call(29, 0, 1 << 21, 0o5600)]"),
        ("secret memory", "[call(447, 0)]"),
        ("calls of tomorrow", "[call(463), call(467), call(600)]"),
    ],
)
async def test_the_kernel_refuses_what_no_program_of_a_task_needs(box: Sandbox, names: str, code: str) -> None:
    for said in await ask(box, f"answer({code})"):
        assert said in {"EPERM", "ENOSYS", "ENOMEM"}, names


async def test_sockets_are_of_four_families_and_reach_nobody(box: Sandbox) -> None:
    code = """
made = []
for family in range(64):
    for kind in (1, 2, 3, 5):
        try:
            socket.socket(family, kind).close()
            made.append([family, kind])
        except OSError:
            pass
links = [p for p in range(32) if attempt(lambda: socket.socket(16, 3, p).close()) == "ok"]
def reach(address):
    with socket.socket() as s:
        s.settimeout(2)
        s.connect(address)
answer([made, links, attempt(reach, ("192.0.2.1", 80)), attempt(reach, ("127.0.0.1", int(sys.argv[1])))])
"""
    with socket.create_server(("127.0.0.1", 0)) as server:
        made, links, outside, host = await ask(box, code, str(server.getsockname()[1]))
    assert {family for family, _ in made} == {socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK}
    assert not [kind for family, kind in made if kind == 3 and family in (socket.AF_INET, socket.AF_INET6)], "raw"
    assert links == [0]
    assert outside == "ENETUNREACH"
    assert host == "ECONNREFUSED"


async def test_an_abstract_socket_of_the_host_is_not_there(box: Sandbox) -> None:
    name = f"rollout-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"\0{name}")
        server.listen()
        code = 'answer(attempt(socket.socket(socket.AF_UNIX).connect, "\\0" + sys.argv[1]))'
        assert await ask(box, code, name) == "ECONNREFUSED"


async def test_a_crash_is_told_to_no_handler_of_the_host(box: Sandbox) -> None:
    """A limit of one byte (and no other) keeps the kernel from starting a handler that reads cores from a pipe."""
    assert await ask(box, "import resource; answer(resource.getrlimit(resource.RLIMIT_CORE))") == [1, 1]


# ---------------------------------------------------------------------- siblings

LEAVE = """
made = [call(29, 0x5151, 4096, 0o1666), call(68, 0x5151, 0o1666), call(64, 0x5151, 1, 0o1666)]
made.append(call(240, b"rollout", 0o102, 0o666, None))
open("/dev/shm/rollout", "w").write("x")
open("/tmp/rollout", "w").write("x")
here = open("/workspace/lock", "w")
fcntl.lockf(here, fcntl.LOCK_EX)
server = socket.socket(socket.AF_UNIX)
server.bind("\\0rollout")
server.listen()
if os.fork() == 0:
    for number in (0, 1, 2):
        os.close(number)
    import time
    time.sleep(60)
    os._exit(0)
answer(made)
"""
FIND = """
counts = {name: len(open(f"/proc/sysvipc/{name}").readlines()) - 1 for name in ("shm", "msg", "sem")}
answer([
    counts, [call(29, 0x5151, 4096, 0), call(68, 0x5151, 0), call(64, 0x5151, 1, 0)], call(240, b"rollout", 2, 0, None),
    os.listdir("/dev/shm"), os.listdir("/tmp"), open("/proc/locks").read() if os.path.exists("/proc/locks") else "",
    attempt(socket.socket(socket.AF_UNIX).connect, "\\0rollout"), open("/proc/net/unix").read().count("rollout"),
    [name for name in os.listdir("/proc") if name.isdigit()],
])
"""


@by_number
async def test_what_one_sandbox_leaves_for_all_is_found_by_itself_alone(box: Sandbox, sibling: Sandbox) -> None:
    *made, made_queue = await ask(box, LEAVE)
    assert all(isinstance(result, int) for result in made), made
    assert made_queue == "ENOSYS", "nobody could list it, and so remove it before the next tenant comes"
    counts, keys, queue, shared, scratch, locks, abstract, names, processes = await ask(sibling, FIND)
    assert counts == {"shm": 0, "msg": 0, "sem": 0}
    assert keys == ["ENOENT"] * 3
    assert queue == "ENOSYS"
    assert (shared, scratch, locks, names) == ([], [], "", 0)
    assert abstract == "ECONNREFUSED"
    assert len(processes) <= 3, "the agent, the one that asks, and (without cgroups) its keeper"
    counts, keys, _, shared, scratch, _, abstract, names, processes = await ask(box, FIND)
    assert counts == {"shm": 1, "msg": 1, "sem": 1}, "the probe sees what is there"
    assert (shared, scratch, abstract) == (["rollout"], ["rollout"], "ok")


# ---------------------------------------------------------------------- usual programs do not mind

USUAL = """
import concurrent.futures, multiprocessing, subprocess, tempfile, threading
named = threading.Thread(target=lambda: libc.prctl(15, b"named", 0, 0, 0), name="named")
named.start(); named.join()
def main():
    with multiprocessing.Pool(2) as pool:
        squares = pool.map(abs, [-1, -2, -3])
    with concurrent.futures.ProcessPoolExecutor(2) as pool:
        sums = list(pool.map(sum, [[1, 2], [3, 4]]))
    shell = subprocess.run(["bash", "-c", "ulimit -n; diff <(echo a) <(echo a); cat /dev/stdin <<< here; "
                            "echo err > /dev/stderr"], capture_output=True, text=True)
    with tempfile.TemporaryDirectory() as folder:
        open(f"{folder}/test_it.py", "w").write("def test_it(tmp_path): assert tmp_path.exists()")
        tests = subprocess.run(["pytest", "-q", folder], capture_output=True, text=True, cwd="/workspace")
    answer([squares, sums, shell.stdout.split(), shell.stderr, tests.returncode])
main()
"""


async def test_threads_pools_shells_and_test_runners_do_not_mind(box: Sandbox) -> None:
    squares, sums, shell, errors, status = await ask(box, USUAL)
    assert (squares, sums) == ([1, 2, 3], [3, 7])
    assert shell == ["256", "here"]
    assert errors == "err\n"
    assert status == 0
