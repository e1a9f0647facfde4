"""How a jail is built: from an image's name to an agent that answers.

Owns: the plans of the jail tools, what is known of images, and whose turn it is. Invariant: a jail that did not come
up is told to the warden's `release` by the caller, whatever happened here; nothing of it is given out.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import anyio
import msgspec

from sandbox.config import SandboxConfig
from sandbox.errors import CapabilityError, StartError
from sandbox.estate.stage import stage_filter
from sandbox.exhaustion import fault, fault_in
from sandbox.health.capabilities import uid_capability, user_namespace_remedy
from sandbox.images.resolve import IMAGES, resolve_image
from sandbox.images.types import Image
from sandbox.jail import Identity, Jail, JailKey, MountSize, uid_items
from sandbox.jails.plan import JailPlan
from sandbox.jails.seccomp import build_filter
from sandbox.jails.start import start_items
from sandbox.jails.tools import JAILS, NO_NAMESPACES, make_plan
from sandbox.jails.views import why_shared
from sandbox.protocol.warden import Warden
from sandbox.protocol.wire import Item, Tag, text
from sandbox.turns import Turns
from sandbox.types import JailName

_KEPT_TEMPLATES = 64


class JailBuilder:
    """Builds jails of one engine.

    Args:
        chores: threads that no caller's source can use up.
    """

    def __init__(self, config: SandboxConfig, state_dir: Path, warden: Warden, chores: anyio.CapacityLimiter) -> None:
        self._config = config
        self._state_dir = state_dir
        self._warden = warden
        self._chores = chores
        self._native: Path
        self._filter: Path
        self._turns = Turns(config.max_starting or 4 * (os.cpu_count() or 1))
        self._templates: dict[tuple[JailKey, MountSize], tuple[Image, list[Item]]] = {}
        self._plans: dict[JailName, JailPlan] = {}
        self._resolved: set[tuple[str, int]] = set()  # named images and users
        self._sockets: set[socket.socket] = set()  # of jails that are being made
        self.foreign = False
        """Do sandboxes run under other uids than the engine's?"""

    def prepare(self, native: Path) -> None:
        """Finds and stages a jail tool and the system-call filter (blocking).

        Args:
            native: the staged helper.

        Raises:
            CapabilityError: there is no jail tool at all, or no filter for this machine.
        """
        self._native = native
        try:
            self._plan("bubblewrap")
        except CapabilityError as missing:
            with suppress(CapabilityError):
                self._plan("nsjail")
            if not self._plans:
                raise missing
        self._filter = stage_filter(self._state_dir, build_filter())

    def _plan(self, jail: JailName) -> JailPlan:
        """The plan of that jail tool, which is found and staged at first use (blocking)."""
        if jail not in self._plans:
            tool = self._config.bwrap if jail == "bubblewrap" else self._config.nsjail
            self._plans[jail] = make_plan(jail, self._state_dir, self._native, tool)
        return self._plans[jail]

    async def build(self, key: JailKey, size: MountSize, who: Identity, joins: Sequence[str]) -> Jail:
        """A new jail. Whatever happens, the warden's `release` of that number must follow at its end.

        Args:
            joins: `cgroup.procs` files that its first process joins.

        Raises:
            ConfigError: there is no such image.
            CapabilityError: the jail tool is absent, or the host lets no jail be built.
            StartError: it did not come up.
            SandboxDiedError: the warden has ended.
        """
        async with self._turns.turn():
            image = await self._resolve(key)
            if key.jail not in self._plans:
                await anyio.to_thread.run_sync(self._plan, key.jail)
            try:
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            except OSError as error:
                raise fault("no socket for a sandbox", error.errno, StartError) from error
            self._sockets |= {ours, theirs}
            own = [text(Tag.JOIN, path) for path in joins]  # first: they are root's
            own += uid_items(who)
            try:
                with theirs:
                    shared = await self._start(key, image, size, who.number, own, theirs)
                why = _why_shared(shared, image) if shared else ""
                env = {"PATH": image.path, **image.env}
                return Jail(ours, key, identity=who, env=env, why_shared=why, size=size)
            except BaseException:
                ours.close()
                raise
            finally:
                self._sockets -= {ours, theirs}

    async def _start(
        self, key: JailKey, image: Image, size: MountSize, number: int, own: Sequence[Item], theirs: socket.socket
    ) -> int:
        limit_s = self._config.start_timeout_s
        try:
            with anyio.fail_after(limit_s):
                items = [*own, *self._template(key, image, size)]
                return await self._warden.start(number, items, [theirs.fileno()])
        except TimeoutError:
            raise StartError(f"the jail was not ready after {limit_s} s") from None
        except StartError as error:
            why = JAILS[key.jail].explain(str(error))
            if any(words in why for words in NO_NAMESPACES):
                fake_root = uid_capability()
                remedy = fake_root.remedy if fake_root.required and not fake_root.ok else user_namespace_remedy()
                raise CapabilityError(f"this host does not let a jail be built: {why}", remedy) from error
            raise fault_in(why, StartError) from error

    async def _resolve(self, key: JailKey) -> Image:
        """On the loop only where it costs a few `stat`s: a named image that was resolved before."""
        known = (key.image, key.user)
        resolve = partial(resolve_image, key.image, self._state_dir, foreign=self.foreign, user=key.user)
        if known in self._resolved:
            return resolve()
        image = await anyio.to_thread.run_sync(resolve, limiter=self._chores)
        if key.image in IMAGES and len(self._resolved) < _KEPT_TEMPLATES:
            self._resolved.add(known)
        return image

    def _template(self, key: JailKey, image: Image, size: MountSize) -> list[Item]:
        """What every jail of that key and size shares; remembered while the image stays the same."""
        known = self._templates.get((key, size))
        if known is not None and known[0] == image:
            return known[1]
        plan = msgspec.structs.replace(self._plans[key.jail], user=key.user)
        items = start_items(JAILS[key.jail], plan, image, *size, self._filter)
        while len(self._templates) >= _KEPT_TEMPLATES:
            del self._templates[next(iter(self._templates))]
        self._templates[key, size] = (image, items)
        return items

    def disown(self) -> list[int]:
        """See `sandbox.protocol.forks`."""
        return [one.fileno() for one in self._sockets if one.fileno() >= 0]


def _why_shared(error: int, image: Image) -> str:
    return why_shared(error, image, Path("/proc/self/mountinfo").read_text())
