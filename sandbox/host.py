"""The engine's sandboxes: one warden, one parent cgroup, one range of uids.

Owns: the state-directory slot, the warden, the numbers (and so the uids) and cgroup sets of live sandboxes.
Invariant: a number or set is given out again only after everything that used it is dead; leaving `start` leaves
no process, cgroup or mount behind.
"""

from __future__ import annotations

import heapq
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Self

import anyio
import msgspec

from sandbox.build import ensure_native
from sandbox.cgroup import files
from sandbox.cgroup.absent import AbsentBackend
from sandbox.cgroup.pool import SetPool
from sandbox.cgroup.probe import open_backend
from sandbox.cgroup.types import LIMIT_NAMES, Backend, CgroupSet
from sandbox.commands.kept import KeptStreams, Pace
from sandbox.commands.launch import MINIMAL_ENV
from sandbox.config import SandboxConfig as SandboxConfig
from sandbox.config import default_memory_bytes, default_pids
from sandbox.errors import CapabilityError, ConfigError, StartError
from sandbox.estate.audit import Audit
from sandbox.estate.stage import stage_filter, stage_native
from sandbox.estate.state import (
    UIDS_PER_ENGINE,
    Slot,
    claim_slot,
    default_state_dir,
    destroy_cgroup,
    open_state_dir,
    require_mapped,
)
from sandbox.estate.subuid import MORE_UIDS as MORE_SUBUIDS
from sandbox.estate.subuid import find_subordinate_ids, inner_uids, require_open
from sandbox.estate.uids import UidClaim, claim_uids, require_unused
from sandbox.files.pipes import survey_tree
from sandbox.health.capabilities import cgroup_remedy, controller_remedy, uid_capability, user_namespace_remedy
from sandbox.images.resolve import IMAGES, resolve_image
from sandbox.images.types import Image
from sandbox.jails.plan import JailPlan
from sandbox.jails.seccomp import build_filter
from sandbox.jails.start import start_items
from sandbox.jails.tools import JAILS, NO_NAMESPACES, make_plan
from sandbox.jails.views import why_shared
from sandbox.protocol.forks import Owner, disown_in_children
from sandbox.protocol.warden import Warden
from sandbox.protocol.wire import Item, Tag, number, text
from sandbox.release import take_back
from sandbox.sandbox import Sandbox
from sandbox.types import IMAGE_ISOLATION, JailName, Limits, SandboxSpec

_KEPT_TEMPLATES = 64
_CHORES = 4


class SandboxHost:
    """Gives out sandboxes. Made by `start`; one per engine process."""

    def __init__(self, config: SandboxConfig, state_dir: Path, slot: Slot) -> None:
        self.config = config
        self.state_dir = state_dir
        self._slot = slot
        self._root = os.geteuid() == 0
        self._uids: range | None = None
        self._claim: UidClaim | None = None
        self.shared_uid = ""
        """Why sandboxes share one host uid; empty where each has its own."""
        self._warden = Warden(self._on_died, self._on_warden_end)
        self._places = anyio.Semaphore(config.max_sandboxes)
        self._building = anyio.Semaphore(config.max_starting or 4 * (os.cpu_count() or 1))
        self._live: dict[int, Sandbox] = {}
        self._free_idents: list[int] = []
        self._next_ident = 0
        self._templates: dict[tuple[str, JailName, Limits, int], tuple[Image, list[Item]]] = {}
        self._plans: dict[JailName, JailPlan] = {}
        self._resolved: set[tuple[str, int]] = set()  # named images and users
        self._chores = anyio.CapacityLimiter(_CHORES)  # threads that no caller's source can use up
        self._pace = Pace()
        self._warden_gone = False
        self._closing = False
        self._disowned = False
        self._sockets: set[socket.socket] = set()  # of sandboxes that are being made
        self.backend: Backend = AbsentBackend()
        self.backend_reasons: dict[str, str] = {}
        """For each cgroup backend that was tried and does not work here, or not for every limit: why."""
        self.image_shared = ""
        """Why the latest sandbox without `image_isolation` had to go without."""
        self._sets: SetPool
        self._native: Path
        self._filter: Path

    # ------------------------------------------------------------------ life

    @classmethod
    @asynccontextmanager
    async def start(cls, config: SandboxConfig | None = None) -> AsyncIterator[Self]:
        """Starts the warden and yields the host; leaving ends every sandbox.

        Raises:
            ConfigError: the state directory cannot be used, or root's range of uids is somebody else's.
            CapabilityError: no compiler or binary, no jail tool at all, a named cgroup backend does not work, or other
                engines have all of root's uids.
        """
        config = config or SandboxConfig()
        chosen = Path(config.state_dir) if config.state_dir is not None else default_state_dir()
        state_dir = await anyio.to_thread.run_sync(open_state_dir, chosen)
        slot = await anyio.to_thread.run_sync(claim_slot, state_dir, config.uid_count // UIDS_PER_ENGINE)
        host = cls(config, state_dir, slot)
        disown_in_children(host)
        try:
            native = await anyio.to_thread.run_sync(host._prepare)
            try:
                await host._open_warden(native)
                await anyio.to_thread.run_sync(host._open_cgroups)
                yield host
            finally:
                with anyio.CancelScope(shield=True):
                    await host._end()
        finally:
            if host._claim is not None:
                host._claim.close()
            slot.close()

    def _prepare(self) -> Path:
        """Claims root's uids and stages the binaries (blocking)."""
        if self._root:
            base, count = self.config.uid_base, self.config.uid_count
            require_unused(base, count)
            self._claim = claim_uids(base, count, UIDS_PER_ENGINE, self._slot.number)
            self._uids = self._claim.uids
            require_mapped(Path("/proc/self/uid_map").read_text(), self._uids.start, UIDS_PER_ENGINE)
        native = stage_native(self.state_dir, ensure_native())
        self._native = native
        try:
            self._plan("bubblewrap")
        except CapabilityError as missing:
            with suppress(CapabilityError):
                self._plan("nsjail")
            if not self._plans:
                raise missing
        self._filter = stage_filter(self.state_dir, build_filter())
        return native

    def _open_cgroups(self) -> None:
        """Makes the parent cgroups (blocking), each after its name is known to the warden and on record."""
        config = self.config
        self.backend, self.backend_reasons = open_backend(
            config.cgroup_backend,
            f"{self._slot.number}-{os.getpid()}",
            config.memory_bytes or default_memory_bytes(),
            config.pids or default_pids(),
            self._record,
        )
        self._sets = SetPool(self.backend)

    def _record(self, roots: tuple[str, ...]) -> None:
        anyio.from_thread.run(self._own, roots)
        self._slot.record(roots)

    async def _own(self, roots: tuple[str, ...]) -> None:
        items = [text(Tag.DIR, root) for root in roots]
        items.append(text(Tag.PATH, str(self._slot.record_path)))
        await self._warden.own(items, () if self._claim is None else (self._claim.lock_fd,))

    def _plan(self, jail: JailName) -> JailPlan:
        """The plan of that jail, its tool found and staged at first use (blocking)."""
        if jail not in self._plans:
            tool = self.config.bwrap if jail == "bubblewrap" else self.config.nsjail
            self._plans[jail] = make_plan(jail, self.state_dir, self._native, tool)
        return self._plans[jail]

    async def _open_warden(self, native: Path) -> None:
        """Starts the warden; an unprivileged one with its user's subordinate ids, where there are any for us."""
        lock_fd = self._slot.lock_fd
        if not self._root:
            try:
                ids = await anyio.to_thread.run_sync(find_subordinate_ids)
                wanted = (ids.first_uid, ids.count, UIDS_PER_ENGINE, self._slot.number, MORE_SUBUIDS)
                self._claim = await anyio.to_thread.run_sync(claim_uids, *wanted)
                self._uids = inner_uids(ids, self._claim.block, UIDS_PER_ENGINE)
                require_open(self.state_dir / "bin")
                await self._warden.open(native, lock_fd, ids)
                return
            except CapabilityError as error:
                if self._claim is not None:
                    self._claim.close()  # other engines of this user may have that block
                self._uids = self._claim = None
                self.shared_uid = str(error)
        await self._warden.open(native, lock_fd)

    def disown(self) -> list[int]:
        """In a forked child: these sandboxes are the parent's. See `sandbox.protocol.forks`."""
        self._disowned = self._warden_gone = self._closing = True
        parts: list[Owner] = [self._slot, self._warden, *self._live.values()]
        parts += [] if self._claim is None else [self._claim]
        fds = [fd for part in parts for fd in part.disown()]
        return fds + [one.fileno() for one in self._sockets if one.fileno() >= 0]

    async def _end(self) -> None:
        if self._disowned:
            return
        self._closing = True
        for box in list(self._live.values()):
            box.close("its host was closed")
        await self._warden.aclose()
        for root in self.backend.roots:  # the warden has removed them, unless it was killed
            await anyio.to_thread.run_sync(destroy_cgroup, root)
        self._slot.forget()

    def _on_died(self, ident: int) -> None:
        if ident in self._live:
            self._live[ident].mark_dead("the sandbox has died (its first process ended)")

    def _on_warden_end(self) -> None:
        """The warden is gone: nothing can be cleaned up but by ending everything."""
        self._warden_gone = True
        for box in list(self._live.values()):
            box.mark_dead("the warden has ended")
        if not self._closing:
            for root in self.backend.roots[:1]:
                with suppress(FileNotFoundError):  # emptied and removed meanwhile
                    files.kill_tree(root)

    # ------------------------------------------------------------------ sandboxes

    @property
    def unenforced(self) -> tuple[str, ...]:
        """Limits that this host cannot enforce."""
        return tuple(name for name in LIMIT_NAMES if not self.backend.enforced[name])

    @property
    def num_live(self) -> int:
        """Sandboxes that exist now."""
        return len(self._live)

    @asynccontextmanager
    async def acquire(self, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        """A fresh sandbox, ended (and awaited) when the context is left.

        Raises:
            ConfigError: unknown image or name in `insist`, or a workspace that cannot be read or is too large.
            CapabilityError: the host cannot enforce what the spec insists on, lacks the jail tool that it names, or
                cannot isolate at all.
            StartError: the jail did not come up.
            SandboxDiedError: the warden has ended.
        """
        self._check_insist(spec)
        asked_s = time.monotonic()
        found = await survey_tree(spec)
        async with self._places:
            ident = self._take_ident()
            cgroups = self._sets.take(spec.limits)
            box: Sandbox | None = None
            try:
                async with self._building:
                    box = await self._create(ident, spec, cgroups)
                self._live[ident] = box
                audit = Audit(ident, self._host_uid(ident), spec, time.monotonic() - asked_s)
                if found is not None:
                    await box.fill(found)
                yield box
            finally:
                self._live.pop(ident, None)
                if box is not None:
                    box.close("its context was left")
                with anyio.CancelScope(shield=True):
                    await self._release(ident, spec.limits, cgroups, box)
                if box is not None and not self._disowned:
                    audit.end(box.unenforced, box.num_commands, box.why_died)

    def _host_uid(self, ident: int) -> int:
        return os.geteuid() if self._claim is None or self._uids is None else self._claim.uids[ident]

    def _check_insist(self, spec: SandboxSpec) -> None:
        for name in spec.insist:
            if name not in (*LIMIT_NAMES, IMAGE_ISOLATION):
                raise ConfigError("spec.insist", name, f"must be one of {', '.join((*LIMIT_NAMES, IMAGE_ISOLATION))}")
            if name in self.unenforced:
                why = "; ".join(self.backend_reasons.values()) or "the cgroup backend is 'none'"
                remedy = cgroup_remedy() if self.backend.name == "none" else controller_remedy((name,))
                raise CapabilityError(f"this host cannot enforce the limit {name} ({why})", f"{remedy}; or drop it")

    def _take_ident(self) -> int:
        if self._free_idents:
            return heapq.heappop(self._free_idents)
        self._next_ident += 1
        return self._next_ident - 1

    async def _create(self, ident: int, spec: SandboxSpec, cgroups: CgroupSet) -> Sandbox:
        image = await self._resolve(spec)
        if spec.jail not in self._plans:
            await anyio.to_thread.run_sync(self._plan, spec.jail)
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            raise StartError(f"no socket for a sandbox: {error.strerror}") from error
        self._sockets |= {ours, theirs}
        try:
            with theirs:
                items = [*self._own_items(ident, cgroups), *self._template(image, spec)]
                with anyio.fail_after(self.config.start_timeout_s):
                    shared = await self._warden.start(ident, items, [theirs.fileno()])
            env = {**MINIMAL_ENV, "PATH": image.path, **image.env, **spec.env}
            kept = KeptStreams(self._pace)
            return Sandbox(ours, spec, env, cgroups, self._unenforced_by(shared, image, spec), kept)
        except TimeoutError:
            ours.close()
            raise StartError(f"the jail was not ready after {self.config.start_timeout_s} s") from None
        except StartError as error:
            ours.close()
            why = JAILS[spec.jail].explain(str(error))
            if any(words in why for words in NO_NAMESPACES):
                fake_root = uid_capability()
                remedy = fake_root.remedy if fake_root.required and not fake_root.ok else user_namespace_remedy()
                raise CapabilityError(f"this host does not let a jail be built: {why}", remedy) from error
            raise StartError(why) from error
        except BaseException:
            ours.close()
            raise
        finally:
            self._sockets -= {ours, theirs}

    async def _resolve(self, spec: SandboxSpec) -> Image:
        """On the loop only where it costs a few `stat`s: a named image that was resolved before."""
        foreign, key = self._uids is not None, (spec.image, spec.user)
        if key in self._resolved:
            return resolve_image(spec.image, self.state_dir, foreign=foreign, user=spec.user)
        resolve = partial(resolve_image, spec.image, self.state_dir, foreign=foreign, user=spec.user)
        image = await anyio.to_thread.run_sync(resolve, limiter=self._chores)
        if spec.image in IMAGES and len(self._resolved) < _KEPT_TEMPLATES:
            self._resolved.add(key)
        return image

    def _unenforced_by(self, error: int, image: Image, spec: SandboxSpec) -> tuple[str, ...]:
        """What a sandbox goes without, whose image could not be covered for that errno (0: it is covered)."""
        if error == 0:
            return self.unenforced
        self.image_shared = why_shared(error, image, Path("/proc/self/mountinfo").read_text())
        if IMAGE_ISOLATION in spec.insist:
            remedy = "use Linux 5.11 or later and a directory image without mounts below it, or drop it from `insist`"
            raise CapabilityError(f"siblings would share the image's inodes: {self.image_shared}", remedy)
        return (*self.unenforced, IMAGE_ISOLATION)

    def _own_items(self, ident: int, cgroups: CgroupSet) -> list[Item]:
        """What is this sandbox's alone; comes first, for the cgroups are joined before the uid changes."""
        with files.vanishing():
            plan = cgroups.start_plan()
        items = [text(Tag.DIR, path) for path in plan.make]
        items += [text(Tag.SET, path, value) for path, value in plan.write]
        items += [text(Tag.JOIN, path) for path in plan.join]
        if self._uids is not None:
            if ident >= len(self._uids):
                raise StartError(f"all {len(self._uids)} host uids of this engine are in use, or were not given back")
            uid = self._uids[ident]
            items.append(number(Tag.IDS, uid, uid))
        return items

    def _template(self, image: Image, spec: SandboxSpec) -> list[Item]:
        """What every sandbox of that image, jail, limits and user shares; remembered while the image stays the same."""
        limits = spec.limits
        key = (image.name, spec.jail, limits, spec.user)
        known = self._templates.get(key)
        if known is not None and known[0] == image:
            return known[1]
        plan = msgspec.structs.replace(self._plans[spec.jail], user=spec.user)
        items = start_items(JAILS[spec.jail], plan, image, limits, self._filter)
        while len(self._templates) >= _KEPT_TEMPLATES:
            del self._templates[next(iter(self._templates))]
        self._templates[key] = (image, items)
        return items

    async def _release(self, ident: int, limits: Limits, cgroups: CgroupSet, box: Sandbox | None) -> None:
        """Ends a jail; keeps its cgroups for the next one unless they may be half made (there is no `box`)."""
        if self._warden_gone:
            return  # numbers and sets are not given out any more
        pool = None if box is None or self._closing else self._sets
        if await take_back(self._warden, ident, limits, cgroups, box, pool, self._chores):
            heapq.heappush(self._free_idents, ident)
