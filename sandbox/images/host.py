"""The `host` image: this machine's read-only /usr and a minimal generated /etc.

Owns: `images/host-etc-<key>/` in the state directory. Invariant: nothing of the host's /etc but public package
data (the linker cache, alternatives, service names) enters a sandbox; never accounts, keys, host names or homes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

from sandbox.errors import ConfigError, SandboxError
from sandbox.exhaustion import exhausted_writing
from sandbox.images.types import Image, Mount

STANDARD_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_TOP_LEVEL = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_PUBLIC_FILES = ("ld.so.cache", "protocols", "services")
_ETC_VERSION = 1
DEFAULT_USER = 1000
_KNOWN_USERS = (0, DEFAULT_USER)
_ETC_FILES = {
    "passwd": "root:x:0:0:root:/workspace:/bin/sh\n"
    "sandbox:x:1000:1000:sandbox:/workspace:/bin/sh\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "group": "root:x:0:\nsandbox:x:1000:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "hostname": "sandbox\n",
    # Only files: a name look-up ends at once where there is no network, instead of asking a name server.
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\nservices: files\nprotocols: files\n",
}


def host_mounts(state_dir: Path, user: int = DEFAULT_USER) -> tuple[Mount, ...]:
    """Mounts of /usr, its companions (/bin, /lib …, links or directories as they are here) and /etc."""
    mounts = [Mount("/usr", "/usr")]
    for name in _TOP_LEVEL:
        path = Path("/", name)
        if path.is_symlink():
            mounts.append(Mount(os.readlink(path), str(path), "symlink"))
        elif path.is_dir():
            mounts.append(Mount(str(path), str(path)))
    mounts.append(Mount(str(build_etc(state_dir, user)), "/etc"))
    return tuple(mounts)


def host_image(state_dir: Path, user: int = DEFAULT_USER) -> Image:
    """The image named `host`; builds its /etc at the first call, later calls cost three `stat`s."""
    return Image("host", host_mounts(state_dir, user), STANDARD_PATH)


def _unwritable(state_dir: Path, error: OSError) -> SandboxError:
    remedy = f"cannot be written ({error.strerror}); choose another"
    return exhausted_writing(str(state_dir), error) or ConfigError("state_dir", str(state_dir), remedy)


def images_dir(state_dir: Path) -> Path:
    """`state_dir/images`, made when absent and passable for every uid; ConfigError when it cannot be."""
    path = state_dir / "images"
    try:
        if not path.is_dir():
            path.mkdir(parents=True, exist_ok=True)
            path.chmod(0o755)
    except OSError as error:
        raise _unwritable(state_dir, error) from None
    return path


def build_etc(state_dir: Path, user: int = DEFAULT_USER) -> Path:
    """The generated /etc of this host, which knows `user`; built when it is absent or the host's linker cache changed.

    Concurrent builders are harmless: each fills a private directory and the first rename wins.
    """
    stranger = None if user in _KNOWN_USERS else user
    target = images_dir(state_dir) / f"host-etc-{_etc_key()}{'' if stranger is None else f'-{stranger}'}"
    if target.is_dir():
        return target
    try:
        building = Path(tempfile.mkdtemp(prefix=".building-etc-", dir=target.parent))
    except OSError as error:
        raise _unwritable(state_dir, error) from None
    try:
        _fill_etc(building, stranger)
        building.chmod(0o755)
        building.rename(target)
    except FileExistsError:
        pass
    except OSError:
        if not target.is_dir():
            raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return target


def _fill_etc(building: Path, stranger: int | None) -> None:
    texts = dict(_ETC_FILES)
    if stranger is not None:
        texts["passwd"] += f"user{stranger}:x:{stranger}:{stranger}:user:/workspace:/bin/sh\n"
        texts["group"] += f"user{stranger}:x:{stranger}:\n"
    for name, text in texts.items():
        (building / name).write_text(text)
        (building / name).chmod(0o644)
    for name in _PUBLIC_FILES:
        source = Path("/etc", name)
        if source.is_file() and os.access(source, os.R_OK):
            shutil.copyfile(source, building / name)
            (building / name).chmod(0o644)
    _copy_alternatives(building / "alternatives")


def _copy_alternatives(target: Path) -> None:
    """Copy the links that commands such as `awk` and `cc` go through (not those of manual pages)."""
    source = Path("/etc/alternatives")
    if not source.is_dir():
        return
    target.mkdir()
    target.chmod(0o755)
    for link in source.iterdir():
        if link.is_symlink() and not link.name.endswith(".gz"):
            text = os.readlink(link)
            if text.startswith(("/usr/", "/bin/", "/lib")):
                (target / link.name).symlink_to(text)


def _etc_key() -> str:
    digest = hashlib.sha256(f"{_ETC_VERSION}".encode())
    for name in ("ld.so.cache", "alternatives"):
        try:
            stat = os.stat(f"/etc/{name}")
            digest.update(f"{name} {stat.st_mtime_ns} {stat.st_size}\n".encode())
        except FileNotFoundError:
            digest.update(f"{name} absent\n".encode())
    return digest.hexdigest()[:12]
