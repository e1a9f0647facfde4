"""The `python` image: the host image and a relocated, world-readable CPython at /opt/python.

Owns: `images/python-<key>/` (the copies), `images/python` (a link to the current one) and `images/python.lock`.
Invariant: a directory of that name is complete, since it is checked and renamed into place under the lock; the key
covers the interpreter and the package versions, so that a changed interpreter gives another directory.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sandbox.errors import ConfigError, SandboxError, StartError
from sandbox.estate.stage import writing_below
from sandbox.images.elf import replace_run_path
from sandbox.images.host import DEFAULT_USER, STANDARD_PATH, host_mounts, images_dir
from sandbox.images.interpreter import Interpreter, find_interpreter
from sandbox.images.packages import PACKAGES, add_packages, package_versions
from sandbox.images.types import Image, Mount

PREFIX = "/opt/python"
BUILD_REMEDY = "run `rollout image build python`"
_LAYOUT_VERSION = 3
_LOCK_TIMEOUT_S = 600.0
_SKIPPED_DIRECTORIES = frozenset(
    ("__pycache__", "test", "tests", "idlelib", "tkinter", "turtledemo", "ensurepip", "site-packages", "dist-packages")
)
_SKIPPED_PREFIXES = ("config-", "_tkinter.", "_test", "_xxtestfuzz", "_ctypes_test", "xxlimited", "sitecustomize")
_PYTEST_SCRIPT = f"#!{PREFIX}/bin/python3\nimport sys\n\nimport pytest\n\nsys.exit(pytest.main())\n"
_CHECK = "import sys, ssl, sqlite3, ctypes, numpy.testing, pytest; print(sys.prefix)"
# A numeric library would start a thread for every core of a large host and meet the process limit.
_ENV = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def python_image(state_dir: Path, user: int = DEFAULT_USER) -> Image:
    """The image named `python`; ConfigError (field `image`) when it has not been built."""
    link = state_dir / "images" / "python"
    try:
        root = link.resolve(strict=True)
    except OSError:
        raise ConfigError("image", "python", f"has not been built in {state_dir}; {BUILD_REMEDY}") from None
    env = dict(_ENV)
    if (root / "needs-library-path").exists():
        env["LD_LIBRARY_PATH"] = f"{PREFIX}/lib"
    mounts = (*host_mounts(state_dir, user), Mount(str(root), PREFIX))
    return Image("python", mounts, f"{PREFIX}/bin:{STANDARD_PATH}", env)


def build_python_image(
    state_dir: Path, source_prefix: Path | None = None, progress: Callable[[str], None] | None = None
) -> Path:
    """Build the toolchain image unless this very one exists; blocks for seconds the first time.

    Args:
        state_dir: the directory whose `images/` receives it.
        source_prefix: installation to copy (`/usr/local`, say); by default the one that runs us.
        progress: called with a line of text before each phase.

    Returns the image's directory. Raises ConfigError for an unusable prefix or state directory, CapabilityError when
    packages cannot be had, StartError when the copy does not run. Concurrent builders wait for one another; a
    killed one leaves only a hidden directory that the next removes.
    """
    say = progress or (lambda line: None)
    interpreter = find_interpreter(source_prefix)
    images = images_dir(state_dir)
    target = images / f"python-{_key(interpreter)}"
    with writing_below(state_dir), _locked(images / "python.lock"):
        for stale in images.glob(".building-python-*"):
            shutil.rmtree(stale, ignore_errors=True)
        if not target.is_dir():
            building = Path(tempfile.mkdtemp(prefix=".building-python-", dir=images))
            try:
                _build(interpreter, building, say)
                building.rename(target)
            finally:
                shutil.rmtree(building, ignore_errors=True)
        _point(images / "python", target.name)
    return target


def _build(interpreter: Interpreter, root: Path, say: Callable[[str], None]) -> None:
    say(f"copying Python {interpreter.version} from {interpreter.executable}")
    stdlib = root / "lib" / f"python{interpreter.version}"
    _copy_tree(interpreter.stdlib, stdlib)
    _copy_binaries(interpreter, root)
    python = root / "bin" / "python3"
    say(f"adding {', '.join(PACKAGES[:2])}")
    add_packages(interpreter, _site_packages(python, interpreter.version, root))
    _make_readable(root)
    say("compiling")
    _run(
        python,
        "-I",
        *("-m", "compileall", "-q", "-j", "2", "--invalidation-mode", "unchecked-hash", "-s", str(root), "-p", PREFIX),
        str(root / "lib"),
    )
    _make_readable(root)
    say("checking")
    if _run(python, "-I", "-c", _CHECK).strip() != str(root):
        raise StartError(f"the copy of {interpreter.executable} does not take {root} as its prefix")


def _copy_tree(source: Path, target: Path) -> None:
    def skipped(directory: str, names: list[str]) -> set[str]:
        gone = {name for name in names if name in _SKIPPED_DIRECTORIES or name.startswith(_SKIPPED_PREFIXES)}
        return gone | {name for name in names if name.endswith((".a", ".pyc"))}

    try:
        shutil.copytree(source, target, ignore=skipped, copy_function=shutil.copyfile)
    except OSError as error:
        # An error of a whole tree lists every file; the first says enough.
        reason = error.args[0][0][2] if isinstance(error, shutil.Error) else error
        raise StartError(f"the standard library {source} cannot be copied to {target}: {reason}") from error


def _copy_binaries(interpreter: Interpreter, root: Path) -> None:
    name = f"python{interpreter.version}"
    (root / "bin").mkdir()
    executable = root / "bin" / name
    data = bytearray(interpreter.executable.read_bytes())
    relocated = replace_run_path(data)
    executable.write_bytes(data)
    executable.chmod(0o755)
    for alias in ("python3", "python"):
        (root / "bin" / alias).symlink_to(name)
    script = root / "bin" / "pytest"
    script.write_text(_PYTEST_SCRIPT)
    script.chmod(0o755)
    if interpreter.shared_library is not None:
        shutil.copyfile(interpreter.shared_library, root / "lib" / interpreter.shared_library.name)
        if not relocated:
            (root / "needs-library-path").touch()


def _site_packages(python: Path, version: str, root: Path) -> Path:
    """The image's package directory: always `lib/pythonX.Y/site-packages`, whatever the interpreter looks for itself.

    Where that is another place (Debian's `dist-packages`), a link there leads to it: programs that start without
    `site` can then rely on one path.
    """
    packages = root / "lib" / f"python{version}" / "site-packages"
    packages.mkdir(parents=True, exist_ok=True)
    code = "import site; print('\\n'.join(site.getsitepackages()))"
    own = [Path(line) for line in _run(python, "-I", "-c", code).splitlines() if Path(line).is_relative_to(root)]
    if not own:
        raise StartError(f"{python} has no package directory under {root}")
    if packages not in own:
        own[0].parent.mkdir(parents=True, exist_ok=True)
        own[0].symlink_to(os.path.relpath(packages, own[0].parent))
    return packages


def _run(python: Path, *arguments: str) -> str:
    library_path = str(python.parent.parent / "lib")
    env = {"PATH": STANDARD_PATH, "LANG": "C.UTF-8"}
    if (python.parent.parent / "needs-library-path").exists():
        env["LD_LIBRARY_PATH"] = library_path
    try:
        done = subprocess.run(
            [str(python), *arguments], env=env, cwd="/", capture_output=True, timeout=300, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise StartError(f"the copied interpreter does not run: {error}") from error
    if done.returncode != 0:
        words = (done.stderr or done.stdout).decode("utf-8", "replace").strip()
        raise StartError(f"the copied interpreter fails at {arguments[1:3]}: {words[-2000:]}")
    return done.stdout.decode("utf-8", "replace")


def _make_readable(root: Path) -> None:
    """Give every uid read access (and execution where the owner has it), whatever umask copied it."""
    root.chmod(0o755)
    for directory, names, files in os.walk(root):
        for name in names:
            os.chmod(os.path.join(directory, name), 0o755)
        for name in files:
            path = os.path.join(directory, name)
            if not os.path.islink(path):
                os.chmod(path, 0o755 if os.stat(path).st_mode & 0o100 else 0o644)


def _key(interpreter: Interpreter) -> str:
    digest = hashlib.sha256(f"{_LAYOUT_VERSION} {interpreter.full_version} {interpreter.stdlib}\n".encode())
    for path in (interpreter.executable, interpreter.shared_library):
        if path is not None:
            stat = path.stat()
            digest.update(f"{path} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    for name, version in sorted(package_versions(interpreter).items()):
        digest.update(f"{name} {version}\n".encode())
    return digest.hexdigest()[:12]


def _point(link: Path, name: str) -> None:
    """Make `link` name `name`, in one step for whoever resolves it meanwhile."""
    if link.is_symlink() and os.readlink(link) == name:
        return
    fresh = link.with_name(f".python-link-{os.getpid()}")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(name)
    fresh.replace(link)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ConfigError("state_dir", str(path.parent), f"cannot be written ({error.strerror})") from None
    try:
        deadline = time.monotonic() + _LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise SandboxError(f"another build holds {path} since {_LOCK_TIMEOUT_S:.0f} s") from None
                time.sleep(0.1)
        yield
    finally:
        os.close(descriptor)
