"""What a tenant may leave, and the look around by which the next one would find it.

Invariant: `LOOK` tells everything that code inside can read of its jail and that does not change by itself, so that two
looks are equal where nothing was left; every `Kind` shows in a look of the tenant who left it.
"""

from __future__ import annotations

from typing import NamedTuple

from tests.sandbox.jails.probes import PRELUDE

LOOK = (
    PRELUDE
    + """
import resource, time
MOUNTS = ("/workspace", "/tmp", "/dev/shm")
DEVICES = ("null", "zero", "full", "random", "urandom")
def read(path):
    try:
        return open(path).read()
    except OSError as error:
        return errno.errorcode[error.errno]
def entry(path):
    found = os.lstat(path)
    recent = all(abs(time.time() - at) < 600 for at in (found.st_mtime, found.st_ctime, found.st_atime))
    owner = [found.st_uid, found.st_gid]
    return [path, found.st_mode, found.st_nlink, owner, recent, os.listxattr(path, follow_symlinks=False)]
def walk():
    for mount in MOUNTS:
        yield entry(mount)
        for folder, folders, files in os.walk(mount):
            for name in sorted(folders + files):
                yield entry(os.path.join(folder, name))
def space(mount):
    found = os.statvfs(mount)
    return [found.f_blocks, found.f_bfree, found.f_files, found.f_ffree]
def device(name):
    found = os.stat(f"/dev/{name}")
    with open(f"/dev/{name}") as node:
        lock = attempt(fcntl.flock, node, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return [found.st_mode, found.st_rdev, found.st_mtime_ns, lock, attempt(os.utime, f"/dev/{name}")]
def image_lock():
    with open("/usr/bin/env") as program:
        return attempt(fcntl.flock, program, fcntl.LOCK_EX | fcntl.LOCK_NB)
def status():
    kept = ("Uid", "Gid", "Groups", "Umask", "SigBlk", "SigIgn", "SigCgt", "Cap", "NoNewPrivs", "Seccomp", "CoreDump")
    return [line for line in read("/proc/self/status").splitlines() if line.startswith(kept)]
def processes():
    others = [name for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]
    names = [read(f"/proc/{name}/comm").strip() for name in others]
    return sorted(name for name in names if not name.startswith("rollout-"))
def net(name):
    lines = read(f"/proc/net/{name}").splitlines()
    return len(lines)
def sockstat():
    return [line for line in read("/proc/net/sockstat").splitlines() if line.startswith(("sockets", "UDP", "RAW"))]
answer({
    "files": list(walk()),
    "space": [space(mount) for mount in MOUNTS],
    "devices": [device(name) for name in DEVICES],
    "image": image_lock(),
    "processes": processes(),
    "sysvipc": [read(f"/proc/sysvipc/{name}").count(chr(10)) for name in ("shm", "sem", "msg")],
    "keys": [call(248, b"user", b"name", b"x", 1, -3), call(250, 0, -3, 0)],
    "queues": call(240, b"rollout", 0o102, 0o666, None),
    "sockets": [[name, net(name)] for name in ("unix", "tcp", "tcp6", "udp", "udp6", "raw", "netlink")] + sockstat(),
    "abstract": attempt(socket.socket(socket.AF_UNIX).connect, chr(0) + "rollout"),
    "counters": [read(f"/proc/net/{name}") for name in ("dev", "snmp", "snmp6", "netstat")],
    "limits": [resource.getrlimit(number) for number in range(16)],
    "environment": dict(os.environ),
    "umask": os.umask(0),
    "cwd": os.getcwd(),
    "status": status(),
    "priority": [os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0), sorted(os.sched_getaffinity(0))],
    "scores": [read("/proc/self/oom_score_adj"), read("/proc/self/coredump_filter"), read("/proc/self/timerslack_ns")],
    "descriptors": sorted(os.listdir("/proc/self/fd"))[:3],
    "mounts": sorted(" ".join(line.split()[1:4]) for line in read("/proc/self/mounts").splitlines()),
    "file systems": len({line.split()[2] for line in read("/proc/self/mountinfo").splitlines()}),
    "host": os.uname()[1],
    "agent": [read("/proc/1/comm"), read("/proc/1/autogroup") and "there", read("/proc/1/oom_score_adj")],
})
"""
)
"""One program; its answer is a dict by kind of residue."""

DAEMON = """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for number in (0, 1, 2):
            os.close(number)
        import signal, time
        for number in (1, 2, 15):
            signal.signal(number, signal.SIG_IGN)
        {hold}
        open("/workspace/.ready", "w").close()
        while True:
            time.sleep(60)
    os._exit(0)
import time
while not os.path.exists("/workspace/.ready"):
    time.sleep(0.01)
"""


class Kind(NamedTuple):
    """Something to leave."""

    name: str
    plant: str
    """A program that leaves it, after the probes' prelude."""
    shows: tuple[str, ...]
    """Which parts of a look differ for the tenant itself; empty where its own later commands do not see it either."""


def daemon(hold: str = "pass") -> str:
    """A program that leaves a background process, which does something before it sleeps for ever."""
    return DAEMON.format(hold=hold)


KINDS = (
    Kind(
        "files and metadata in every writable mount",
        """
for place in ("/workspace", "/tmp", "/dev/shm"):
    os.makedirs(f"{place}/deep/.hidden")
    open(f"{place}/deep/.hidden/file", "w").write("secret" * 1000)
    os.symlink("/etc", f"{place}/link")
    os.link(f"{place}/deep/.hidden/file", f"{place}/twin")
    os.mkfifo(f"{place}/fifo")
    socket.socket(socket.AF_UNIX).bind(f"{place}/socket")
    attempt(os.setxattr, f"{place}/twin", "user.note", b"x")
    os.chmod(f"{place}/deep/.hidden", 0)
    os.chmod(f"{place}/twin", 0o4777)
    os.utime(f"{place}/twin", (0, 0))
    os.utime(place, (0, 0))
    os.chmod(place, 0o700)
""",
        ("files", "space"),
    ),
    Kind(
        "a workspace that nobody may enter",
        'os.mkdir("/workspace/d"); os.chmod("/workspace/d", 0); os.chmod("/workspace", 0); os.chmod("/tmp", 0)',
        (),
    ),
    Kind(
        "a full disk and no free inode",
        """
def fill():
    with open("/tmp/full", "wb") as full:
        while full.write(b"x" * 2**20):
            pass
attempt(fill)
try:
    for number in range(10**6):
        open(f"/workspace/{number}", "w").close()
except OSError:
    pass
""",
        ("space",),
    ),
    Kind("a process that went into the background and ignores signals", daemon(), ("processes", "files")),
    Kind(
        "a stopped process", daemon("import signal; os.fork() or os.kill(os.getpid(), signal.SIGSTOP)"), ("processes",)
    ),
    Kind(
        "a fork storm",
        """
if os.fork() == 0:
    os.setsid()
    for number in (0, 1, 2):
        os.close(number)
    while True:
        try:
            if os.fork() == 0:
                os.setsid()
        except OSError:
            pass
""",
        (),
    ),
    Kind(
        "System V objects that nobody may read, one attached",
        daemon("libc.shmat(call(29, 0x51, 4096, 0o1600), None, 0)")
        + "made = [call(29, 0x5151, 4096, 0o1000), call(64, 0x5151, 3, 0o1000), call(68, 0x5151, 0o1000)]\n"
        + "assert all(isinstance(one, int) for one in made), made",
        ("sysvipc",),
    ),
    Kind(
        "POSIX shared memory and semaphores",
        """
from multiprocessing import shared_memory, resource_tracker
made = shared_memory.SharedMemory("rollout", create=True, size=4096)
resource_tracker.unregister(made._name, "shared_memory")
open("/dev/shm/sem.rollout", "w").write("x")
""",
        ("files",),
    ),
    Kind(
        "keys and message queues",
        'call(248, b"user", b"name", b"x", 1, -3); call(240, b"rollout", 0o102, 0o666, None)',
        (),
    ),
    Kind(
        "an abstract socket, and a descriptor under way in one",
        daemon(
            'server = socket.socket(socket.AF_UNIX); server.bind(chr(0) + "rollout"); server.listen()\n'
            "        pair = socket.socketpair(); socket.send_fds(pair[0], [b'x'], [pair[0].fileno(), pair[1].fileno()])"
        ),
        ("abstract", "sockets"),
    ),
    Kind(
        "listeners on the loopback that nobody has used",
        daemon(
            "kept = [socket.create_server(('127.0.0.1', 8000))]\n"
            "        kept.append(socket.create_server(('::1', 8000), family=socket.AF_INET6))\n"
            "        kept.append(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)); kept[-1].bind(('127.0.0.1', 9000))"
        ),
        ("sockets",),
    ),
    Kind(
        "resource limits, environment, umask, directory and priority",
        """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20)); resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
os.environ["ROLLOUT"] = "x"; os.putenv("LD_PRELOAD", "/workspace/x"); os.umask(0o777); os.chdir("/tmp"); os.nice(19)
import signal; signal.signal(15, signal.SIG_IGN); signal.pthread_sigmask(signal.SIG_BLOCK, {1, 2, 15})
""",
        (),
    ),
    Kind(
        "locks on devices and on the image, and times of a device",
        'attempt(os.utime, "/dev/null", (0, 0)); attempt(os.utime, "/dev/null")\n'
        + daemon(
            "kept = [open(path) for path in ('/dev/null', '/dev/zero', '/usr/bin/env')]\n"
            "        for one in kept: fcntl.flock(one, fcntl.LOCK_EX)"
        ),
        ("devices", "image"),
    ),
)
