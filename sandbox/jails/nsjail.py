"""The nsjail jail: from a plan of a root file system to an argument list.

Owns: the same namespaces and nodes as the bubblewrap jail, in nsjail's words, and what the warden adds where
nsjail falls short. Invariant: `argv` is a pure function; nothing in the jail is writable before the warden mounts
the writable directories, and its first process is the agent, which installs the system-call filter itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from sandbox.errors import ConfigError
from sandbox.images.types import Image, Mount
from sandbox.jails.plan import (
    AGENT_FD,
    AGENT_PATH,
    DEVICE_LINKS,
    DEVICES,
    FILTER_FD,
    HOSTNAME,
    STAGING_PATH,
    WRITABLE,
    JailPlan,
)
from sandbox.jails.views import sources
from sandbox.protocol.wire import Item, Tag, text

WORK_DIR = "/run"
"""Where nsjail builds its root (in /run/user, which it makes there): the warden gives it an empty one of its own."""
START_ITEMS: tuple[Item, ...] = (
    text(Tag.COVER, WORK_DIR),
    text(Tag.SEAL, "/"),
    *(text(Tag.DEVICE, path) for path in DEVICES),
)
"""What the warden does for every jail of this tool, beside running it."""
_LOG_PREFIX = re.compile(r"^\[[A-Z]\]\[[^]]*\]\[\d+\] \w+\(\):\d+ ", re.MULTILINE)


def explain(words: str) -> str:
    """What nsjail said about a failure, in one line and without its times and places; the cause comes first."""
    return "; ".join(line for line in _LOG_PREFIX.sub("", words).splitlines() if line)


def _pair(source: str, target: str) -> str:
    """Two paths in one word, as nsjail splits it: there is no escape for its separator."""
    for path in (source, target):
        if ":" in path:
            raise ConfigError("image", path, "nsjail cannot mount a path with a colon; rename it, or use bubblewrap")
    return f"{source}:{target}"


def _visible(path: str) -> str:
    """A path of the host that the tool must still find once `WORK_DIR` is covered."""
    if f"{path}/".startswith(f"{WORK_DIR}/"):
        raise ConfigError("path", path, f"nsjail finds nothing below {WORK_DIR}; move it, or use bubblewrap")
    return path


def _mount(mount: Mount) -> tuple[str, str]:
    if mount.kind == "symlink":
        return "--symlink", _pair(mount.source, mount.target)
    return "--bindmount_ro", _pair(_visible(mount.source), mount.target)


def _flatten(groups: Iterable[tuple[str, str]]) -> Iterable[str]:
    return (word for group in groups for word in group)


def argv(plan: JailPlan, image: Image) -> tuple[str, ...]:
    """The command that builds a jail of that image and becomes the supervisor of its agent.

    It expects the agent's socket at descriptor `AGENT_FD` and the system-call filter at `FILTER_FD`. Namespaces,
    no new privileges, dropped capabilities, an empty environment and loopback are nsjail's defaults.

    Raises:
        ConfigError: a path with a colon, which nsjail cannot be told, or below `WORK_DIR`, where it sees nothing.
    """
    return (
        *(_visible(plan.tool), "-Mo", "--quiet", "--hostname", HOSTNAME, "--cwd", "/"),
        *("--user", str(plan.user), "--group", str(plan.user)),
        # The warden sets limits and priorities. One session: it kills supervisor and agent as one process group.
        *("--time_limit", "0", "--disable_rlimits", "--nice_level", str(plan.nice), "--skip_setsid"),
        *("--pass_fd", str(AGENT_FD), "--pass_fd", str(FILTER_FD)),
        *_flatten(map(_mount, image.mounts)),
        *_flatten(("--bindmount_ro", _pair(_visible(source), path)) for source, path in sources(image)),
        *("--disable_proc", "--mount", "none:/proc:proc"),
        # Read-only holds for files, not for what is written to a device.
        *_flatten(("--bindmount_ro", path) for path in DEVICES),
        *_flatten(("--symlink", f"{source}:{path}") for source, path in DEVICE_LINKS),
        # nsjail makes no empty directory, but the parents of a link; the warden's mounts hide the link.
        *_flatten(("--symlink", f".:{path}/.hidden") for path in (*WRITABLE, STAGING_PATH)),
        *("--bindmount_ro", _pair(_visible(plan.agent), AGENT_PATH)),
        *("--", AGENT_PATH, "agent", str(AGENT_FD), str(FILTER_FD)),
    )
