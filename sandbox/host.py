"""The engine's sandboxes: one warden, one parent cgroup, one range of uids.

Owns: the state-directory slot, the warden, and the numbers (and so the uids) of live jails. Invariant: a number is
given out again only after everything that used it is dead; leaving `start` leaves no process, cgroup or mount behind.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Self

import anyio

from sandbox.build import ensure_native
from sandbox.builder import JailBuilder
from sandbox.cgroup import files
from sandbox.cgroup.absent import AbsentBackend
from sandbox.cgroup.cores import Cores
from sandbox.cgroup.hierarchies import own_hierarchies
from sandbox.cgroup.probe import open_backend
from sandbox.cgroup.types import Backend
from sandbox.config import SandboxConfig as SandboxConfig
from sandbox.config import default_memory_bytes, default_pids
from sandbox.errors import CapabilityError, ConfigError, SandboxDiedError
from sandbox.estate.audit import Audit
from sandbox.estate.numbers import Numbers
from sandbox.estate.stage import stage_native
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
from sandbox.files.tree import Survey
from sandbox.insist import check_insist, unenforced_by, unenforced_in
from sandbox.jail import Identity, Jail, JailKey, MountSize
from sandbox.layers.bases import Bases
from sandbox.layers.forking import fork
from sandbox.layers.types import Layer
from sandbox.leasing import Leasing
from sandbox.protocol.forks import Owner, disown_in_children
from sandbox.protocol.warden import Warden
from sandbox.protocol.wire import Tag, text
from sandbox.sandbox import Sandbox
from sandbox.types import MIB, JailName, Limits, SandboxSpec

_CHORES = 4
_AGENTS_BYTES = 64 * MIB
_AGENT_BYTES = 2 * MIB
"""What all agents may take of the memory cap: for a few jails that are being built, and for each that lives."""


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
        self.layers = Bases(state_dir, self._warden)
        self._places = anyio.Semaphore(config.max_sandboxes)
        self._live: dict[int, Jail] = {}
        self._audits: dict[Sandbox, Audit] = {}
        self._numbers = Numbers()
        self._chores = anyio.CapacityLimiter(_CHORES)  # threads that no caller's source can use up
        self._warden_gone = False
        self.lost = anyio.Event()
        """Set when the warden has ended unasked: nothing can be built, leased or ended any more."""
        self._closing = False
        self._disowned = False
        self.backend: Backend = AbsentBackend()
        self.backend_reasons: dict[str, str] = {}
        """For each cgroup backend that was tried and does not work here, or not for every limit: why."""
        self.unpinned = ""
        """Why code may leave `cpu_set`, or not have the `cpu_weight`; empty where what was asked for holds."""
        self._cores = Cores()
        self.image_shared = ""
        """Why the latest sandbox without `image_isolation` had to go without."""
        self._builder = JailBuilder(config, state_dir, self._warden, self._chores)
        self._native: Path
        self._leasing: Leasing

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
                if host._uids is not None and host._claim is not None:
                    host._builder.foreign = True
                    host._numbers.map(host._uids, host._claim.uids)
                limit_s = config.start_timeout_s
                host._leasing = Leasing(host._warden, host.backend, host._chores, limit_s, host.layers)
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
        self._builder.prepare(native)
        return native

    def _open_cgroups(self) -> None:
        """Makes the parent cgroups (blocking), each after its name is known to the warden and on record."""
        config = self.config
        memory_bytes = config.memory_bytes or default_memory_bytes()
        engine = f"{self._slot.number}-{os.getpid()}"
        self._cores = Cores(config.cpus(), config.cpu_weight, own_hierarchies(), engine)
        self.backend, self.backend_reasons = open_backend(
            config.cgroup_backend,
            engine,
            memory_bytes,
            config.pids or default_pids(),
            min(memory_bytes, _AGENTS_BYTES + config.max_sandboxes * _AGENT_BYTES),
            self._record,
        )
        self.unpinned = self._cores.open(self.backend.roots, self._warden.pid)

    def _record(self, roots: tuple[str, ...]) -> None:
        roots = (*roots, *self._cores.roots)
        anyio.from_thread.run(self._own, roots)
        self._slot.record(roots)

    async def _own(self, roots: tuple[str, ...]) -> None:
        items = [text(Tag.DIR, root) for root in roots]
        items.append(text(Tag.PATH, str(self._slot.record_path)))
        await self._warden.own(items, () if self._claim is None else (self._claim.lock_fd,))

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
        parts: list[Owner] = [self._slot, self._warden, self._builder, *self._live.values()]
        parts += [] if self._claim is None else [self._claim]
        return [fd for part in (*parts, self.layers.store) for fd in part.disown()]

    async def _end(self) -> None:
        if self._disowned:
            return
        self._closing = True
        for jail in list(self._live.values()):
            _close(jail, "its host was closed")
        await self._warden.aclose()
        for root in (*self.backend.roots, *self._cores.roots):  # the warden has removed them, unless it was killed
            await anyio.to_thread.run_sync(destroy_cgroup, root)
        await self.layers.aclose()
        self._slot.forget()

    def _on_died(self, ident: int) -> None:
        if ident in self._live:
            self._live[ident].mark_dead("the sandbox has died (its first process ended)")

    def _on_warden_end(self) -> None:
        """The warden is gone: nothing can be cleaned up but by ending everything."""
        self._warden_gone = True
        self.lost.set()
        for jail in list(self._live.values()):
            jail.mark_dead("the warden has ended")
        if not self._closing:
            for root in self.backend.roots[:1]:
                with suppress(FileNotFoundError):  # emptied and removed meanwhile
                    files.kill_tree(root)

    # ------------------------------------------------------------------ sandboxes

    @property
    def unenforced(self) -> tuple[str, ...]:
        """Limits that this host cannot enforce."""
        return unenforced_by(self.backend)

    @property
    def num_live(self) -> int:
        """Jails that exist now, leased or not."""
        return len(self._live)

    @asynccontextmanager
    async def acquire(self, spec: SandboxSpec, base: Layer | None = None) -> AsyncIterator[Sandbox]:
        """A fresh sandbox in a jail of its own, its workspace over `base`; ended (and awaited) when the context is
        left.

        Raises:
            ConfigError: unknown image or name in `insist`, or a workspace that cannot be read or is too large.
            LayerError: the base is gone.
            CapabilityError: the host cannot enforce what the spec insists on, lacks the jail tool that it names, or
                cannot isolate at all.
            StartError: the jail did not come up.
            SandboxDiedError: the warden has ended.
        """
        check_insist(spec, self.backend, self.backend_reasons)
        asked_s = time.monotonic()
        found = await survey_tree(spec)
        jail = await self.build(spec.image, spec.jail, spec.user, spec.limits)
        try:
            yield await self._lease(jail, spec, found, asked_s, base)
        finally:
            await self.destroy(jail)

    def fork(self, parent: Sandbox) -> AbstractAsyncContextManager[Sandbox]:
        """Another sandbox, from the files of a live one as they are now; see `sandbox.layers.forking.fork`."""
        return fork(self, parent)

    async def build(
        self, image: str = "host", jail: JailName = "bubblewrap", user: int = 1000, limits: Limits | None = None
    ) -> Jail:
        """A new jail, ready to be leased; `destroy` must follow. Cancelled, nothing of it is left.

        It waits for a place among `max_sandboxes`, and for a turn among `max_starting`. A lease must ask for the same
        image, jail and user.

        Args:
            limits: the disk size and inodes of its writable mounts; a lease with equal ones needs no new mounts.

        Raises:
            ConfigError: there is no such image, or its path cannot be told to the jail tool.
            CapabilityError: the host lacks the jail tool, or cannot isolate at all.
            StartError: it did not come up.
            SandboxDiedError: the warden has ended.
        """
        key, size = JailKey(image, jail, user), MountSize.of(limits or Limits())
        await self._places.acquire()
        ident = self._numbers.take()
        try:
            who = Identity(ident, *self._numbers.uids(ident))
            built = await self._builder.build(key, size, who, (*self._cores.join, *self.backend.agents))
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._end_number(ident, None)
            raise
        self._live[ident] = built
        return built

    async def lease(
        self, jail: Jail, spec: SandboxSpec, base: Layer | None = None, *, waited_s: float = 0.0
    ) -> Sandbox:
        """Hands a jail out that is `ready`: its agent answers, its mounts have the spec's size, its control groups the
        spec's limits, and `spec.workspace` is copied in.

        A spec with the disk size and inodes of the lease before, and its base, costs one question to the agent (none,
        where it answered within 0.2 s), another one new mounts. After an exception, or cancelled, the jail serves on
        where it is `ready` still; else `destroy` it.

        Args:
            base: what lies under the workspace, until `reset` or `destroy`.
            waited_s: seconds that the tenant has waited, for the audit.

        Raises:
            ConfigError: the spec asks for another image, jail tool or user, or for a workspace that cannot be read.
            CapabilityError: the host cannot enforce what the spec insists on.
            LayerError: the base is gone.
            StartError: it got no new mounts.
            SandboxDiedError: the jail is not ready, its agent is dead or does not answer, or the warden has ended.
        """
        check_insist(spec, self.backend, self.backend_reasons)
        if JailKey.of(spec) != jail.key:
            raise ConfigError("spec", JailKey.of(spec), f"this jail serves {jail.key} alone")
        asked_s = time.monotonic() - waited_s
        found = await survey_tree(spec)
        return await self._lease(jail, spec, found, asked_s, base)

    async def _lease(
        self, jail: Jail, spec: SandboxSpec, found: Survey | None, asked_s: float, base: Layer | None
    ) -> Sandbox:
        if not jail.ready:
            raise SandboxDiedError(jail.why_died or "the jail is not ready for a lease")
        self.image_shared = jail.why_shared or self.image_shared
        unenforced = unenforced_in(jail, spec, self.backend)
        box = await self._leasing.lease(jail, spec, unenforced, found, base)
        self._audits[box] = Audit(jail.number, jail.host_uid, spec, time.monotonic() - asked_s)
        return box

    async def reset(self, sandbox: Sandbox) -> bool:
        """Ends a lease and makes its jail new for the next one: processes, IPC, mounts, control groups.

        What still runs of its commands gets the outcome `killed`; later calls raise `SandboxDiedError`.

        Returns:
            True: nothing of the lease is left, as far as the kernel tells, and the jail is `ready`. False: that could
            not be proven (`Jail.why_unclean`), and `destroy` must follow. Cancelled, it must too.
        """
        clean = await self._leasing.reset(sandbox)
        if clean:
            self._end_audit(sandbox)
        return clean

    async def destroy(self, jail: Jail) -> bool:
        """Ends a jail, with its lease if it has one, and waits until nothing of it is left; idempotent.

        Returns:
            True: its number, and so its uid, is free again. False: something does not end within 20 s; number, uid and
            control groups are set aside until the engine's end. Cancellation waits for it.
        """
        if jail.ending is not None:
            await jail.ending.wait()
            return jail.gone
        jail.ending = anyio.Event()
        box = jail.sandbox
        _close(jail, "its context was left")
        try:
            with anyio.CancelScope(shield=True):
                self._live.pop(jail.number, None)
                jail.gone = await self._end_number(jail.number, jail)
        finally:
            jail.ending.set()
        if box is not None:
            self._end_audit(box)
        return jail.gone

    async def _end_number(self, ident: int, jail: Jail | None) -> bool:
        """Ends what a number stands for; its place is free in any case, it itself where nothing is left."""
        try:
            if self._warden_gone:
                return False  # numbers and control groups are not given out any more
            if jail is None:
                gone = await self._leasing.end_number(ident)
            else:
                gone = await self._leasing.end(jail, keep=not self._closing)
            if gone:
                self._numbers.put(ident)
            return gone
        finally:
            self._places.release()

    def _end_audit(self, box: Sandbox) -> None:
        audit = self._audits.pop(box, None)
        if audit is not None and not self._disowned:
            audit.end(box.unenforced, box.num_commands, box.why_died)


def _close(jail: Jail, why: str) -> None:
    if jail.sandbox is not None:
        jail.sandbox.close(why)
    jail.close()
