"""What a sandbox goes without on this host, and what a spec insists on.

Owns: nothing. Invariant: a spec that insists on what is not there is refused before anything is handed out.
"""

from __future__ import annotations

from collections.abc import Mapping

from sandbox.cgroup.types import LIMIT_NAMES, Backend
from sandbox.errors import CapabilityError, ConfigError
from sandbox.health.capabilities import cgroup_remedy, controller_remedy
from sandbox.jail import Jail
from sandbox.types import IMAGE_ISOLATION, SandboxSpec


def unenforced_by(backend: Backend) -> tuple[str, ...]:
    """Limits that nothing enforces."""
    return tuple(name for name in LIMIT_NAMES if not backend.enforced[name])


def check_insist(spec: SandboxSpec, backend: Backend, reasons: Mapping[str, str]) -> None:
    """Raises ConfigError for a name that there is not, CapabilityError for a limit that is not enforced.

    Args:
        reasons: for each backend that does not work here: why.
    """
    for name in spec.insist:
        if name not in (*LIMIT_NAMES, IMAGE_ISOLATION):
            raise ConfigError("spec.insist", name, f"must be one of {', '.join((*LIMIT_NAMES, IMAGE_ISOLATION))}")
        if name in unenforced_by(backend):
            why = "; ".join(reasons.values()) or "the cgroup backend is 'none'"
            remedy = cgroup_remedy() if backend.name == "none" else controller_remedy((name,))
            raise CapabilityError(f"this host cannot enforce the limit {name} ({why})", f"{remedy}; or drop it")


def unenforced_in(jail: Jail, spec: SandboxSpec, backend: Backend) -> tuple[str, ...]:
    """What a lease of that jail goes without.

    Raises:
        CapabilityError: the spec insists on an image of its own, and the jail shares it.
    """
    if not jail.why_shared:
        return unenforced_by(backend)
    if IMAGE_ISOLATION in spec.insist:
        remedy = "use Linux 5.11 or later and a directory image without mounts below it, or drop it from `insist`"
        raise CapabilityError(f"siblings would share the image's inodes: {jail.why_shared}", remedy)
    return (*unenforced_by(backend), IMAGE_ISOLATION)
