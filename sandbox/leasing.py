"""How jails pass from lease to lease, and how they end.

Owns: the control groups of leases. Invariant: a jail is leased again only when everything of the last lease is proven
gone, and its mounts are new or proven to be as new ones are; a set of control groups serves again only when nobody is
in it, and it is thawed and emptied; whatever cannot be shown to be so is kept apart until the engine's end.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import anyio

from sandbox.cgroup import files
from sandbox.cgroup.pool import SetPool
from sandbox.cgroup.types import Backend, CgroupSet
from sandbox.commands.kept import KeptStreams, Pace
from sandbox.commands.launch import MINIMAL_ENV
from sandbox.errors import SandboxDiedError, SandboxError, StartError
from sandbox.files.tree import Survey
from sandbox.jail import Jail, MountSize, explain, uid_items
from sandbox.jails.start import renew_items
from sandbox.layers.bases import Bases
from sandbox.layers.types import Layer
from sandbox.protocol.warden import Warden
from sandbox.protocol.wire import Item, Tag, text
from sandbox.sandbox import Sandbox
from sandbox.types import MIB, Limits, SandboxSpec

_RESIDUE_BYTES = 32 * MIB
_TIMEOUT_S = 20.0
_EMPTY_TIMEOUT_S = 1.0
_EMPTY_PAUSE_S = 0.002


class Leasing:
    """Gives jails to tenants and takes them back.

    Args:
        chores: threads for what blocks.
        renew_timeout_s: longest wait for new mounts.
    """

    def __init__(
        self,
        warden: Warden,
        backend: Backend,
        chores: anyio.CapacityLimiter,
        renew_timeout_s: float,
        bases: Bases,
    ) -> None:
        self._warden = warden
        self._sets = SetPool(backend)
        self._chores = chores
        self._renew_timeout_s = renew_timeout_s
        self._bases = bases
        self._pace = Pace()

    async def lease(
        self,
        jail: Jail,
        spec: SandboxSpec,
        unenforced: Sequence[str],
        found: Survey | None,
        base: Layer | None = None,
    ) -> Sandbox:
        """Hands a ready jail out. After an exception it is usable where `Jail.ready` still holds, else to be ended.

        Args:
            unenforced: limits that this host does not enforce for it.
            found: what is copied into the workspace.
            base: what is to lie under it; where the host cannot do that it is copied in first.

        Raises:
            SandboxDiedError: its agent is dead or silent, or the warden has ended.
            StartError: it got no mounts of that size.
            ConfigError: the workspace cannot be copied, or the base is none, or must be copied and does not fit.
            LayerError: the base is gone.
        """
        size = MountSize.of(spec.limits)
        if size != jail.size or base != jail.base:
            await self.renew(jail, size, base, spec.limits)
        else:
            await jail.check()
        cgroups = await self._take_set(spec.limits)
        try:
            env = {**MINIMAL_ENV, **jail.env, **spec.env}
            box = Sandbox(jail, spec, env, cgroups, unenforced, KeptStreams(self._pace))
        except BaseException:
            await self._drop_set(cgroups)
            raise
        jail.clean = False
        jail.num_leases += 1
        jail.sandbox = box
        box.workspace = self._bases.workspace(jail, base)
        if base is not None and jail.base is None:
            await box.copy(self._bases, base)
        if found is not None:
            await box.fill(found)
        return box

    async def _take_set(self, limits: Limits) -> CgroupSet:
        cgroups = self._sets.take(limits)
        try:
            with files.vanishing():
                plan = cgroups.start_plan()
                if plan.make:
                    await anyio.to_thread.run_sync(files.carry_out, plan.make, plan.write, limiter=self._chores)
        except BaseException:
            await self._drop_set(cgroups)
            raise
        return cgroups

    async def _drop_set(self, cgroups: CgroupSet) -> None:
        """Removes a set that nobody has used; what does not go stays until the engine's end."""
        with anyio.CancelScope(shield=True):
            await self._remove(cgroups.remove_paths())

    async def _remove(self, directories: Sequence[str]) -> None:
        def remove() -> None:
            for directory in directories:
                try:
                    files.remove_tree(directory)
                except OSError:  # the kernel still holds somebody who is dead, or the warden was first
                    continue

        if directories:
            await anyio.to_thread.run_sync(remove, limiter=self._chores)

    async def renew(self, jail: Jail, size: MountSize, base: Layer | None = None, limits: Limits | None = None) -> None:
        """Makes the writable mounts anew, in that size. Failed or cancelled, the jail is not clean any more.

        Args:
            base: what lies under the new workspace, where this host can do that.
            limits: what the base must fit into where it is to be copied.

        Raises:
            StartError: they could not be made in time.
            SandboxDiedError: the jail or the warden has ended.
        """
        attachment = None if base is None else await self._bases.attach(base, limits or Limits())
        if base is not None:
            jail.pins.append(base)
        jail.clean = False
        try:
            with anyio.fail_after(self._renew_timeout_s):
                await self._warden.renew(jail.number, [*uid_items(jail.identity), *renew_items(*size, attachment)])
        except TimeoutError:
            raise StartError(f"no new mounts after {self._renew_timeout_s} s") from None
        jail.size = size
        jail.base = None if attachment is None else base
        jail.clean = True
        await self._unpin(jail, 0 if base is None else 1)

    async def _unpin(self, jail: Jail, num_kept: int) -> None:
        """Lets go of what lay under a jail's earlier workspaces."""
        while len(jail.pins) > num_kept:
            await self._bases.detach(jail.pins.pop(0))

    async def reset(self, box: Sandbox) -> bool:
        """Ends a lease, and makes its jail new: True when that is proven. False: `Jail.why_unclean` says why.

        Cancelled, the jail is not clean.
        """
        jail = box.jail
        box.end_lease()
        if jail.sandbox is not box:
            jail.why_unclean = "the lease had ended before"
            return False
        try:
            jail.why_unclean = await self._try_reset(box)
        except (SandboxError, OSError) as error:
            jail.why_unclean = str(error) or type(error).__name__
        jail.clean = not jail.why_unclean
        return jail.clean

    async def _try_reset(self, box: Sandbox) -> str:
        jail = box.jail
        if not jail.alive:
            return jail.why_died or "the sandbox was closed"
        residue = await jail.end_contents()
        if why := explain(residue):
            return why
        if not await self._give_back(box):
            return "somebody is still in its control groups"
        base = jail.base if jail.base is not None and self._bases.wanted(jail.base) else None
        if residue.touched or base is not jail.base:
            await self.renew(jail, jail.size, base)
        jail.sandbox = None
        return ""

    async def _give_back(self, box: Sandbox) -> bool:
        """Puts a set back whose tenants are dead; False where somebody is in it."""
        cgroups, limits = box.cgroups, box.spec.limits
        if not await _is_empty(cgroups):
            return False
        place = self._sets.promise(limits)
        if place is None:
            await self._remove(cgroups.remove_paths())
            box.holds_cgroups = False
            return True
        try:
            await self._remove(place)
            await self._clean(cgroups, box)
            box.holds_cgroups = False
        finally:
            if box.holds_cgroups:
                self._sets.forgo()
            else:
                self._sets.put(limits, cgroups)
        return True

    async def _clean(self, cgroups: CgroupSet, box: Sandbox) -> None:
        with files.vanishing():
            box.end_freeze()
            if cgroups.residue_bytes() > _RESIDUE_BYTES:
                await anyio.to_thread.run_sync(cgroups.empty, limiter=self._chores)

    async def end(self, jail: Jail, *, keep: bool) -> bool:
        """Ends a jail, with the lease that it may have, and everything in it; is its number free again?

        A number comes back only when the warden says that every process is gone; what fails is kept until the engine's
        end, and never raised.

        Args:
            keep: may its control groups serve again?
        """
        gone = await self._end(jail, keep)
        if gone:
            await self._unpin(jail, 0)
        return gone

    async def _end(self, jail: Jail, keep: bool) -> bool:
        box = jail.sandbox
        jail.close()
        if box is None or not box.holds_cgroups:
            return await self.end_number(jail.number)
        box.end_lease()
        cgroups, limits = box.cgroups, box.spec.limits
        items: list[Item] = []
        if (kill_file := cgroups.kill_file()) is not None:
            items.append(text(Tag.KILL, kill_file))
        place = self._sets.promise(limits) if keep else None
        items += [text(Tag.REMOVE, path) for path in (cgroups.remove_paths() if place is None else place)]
        gone = usable = False
        try:
            with anyio.move_on_after(_TIMEOUT_S):
                gone = await self._warden.release(jail.number, items)
                if gone and place is not None:
                    await self._clean(cgroups, box)
                    usable = True
        except (SandboxDiedError, OSError):
            pass  # the warden's end, or no descriptors to clean with: the host's own end does it
        if place is not None:
            if usable:
                self._sets.put(limits, cgroups)
            else:
                self._sets.forgo()
        return gone

    async def end_number(self, ident: int) -> bool:
        """The same for a number whose jail has no lease, or was never there."""
        gone = False
        with anyio.move_on_after(_TIMEOUT_S):
            try:
                gone = await self._warden.release(ident, [])
            except SandboxDiedError:
                return False  # the host's own end does it
        return gone


async def _is_empty(cgroups: CgroupSet) -> bool:
    """Waits shortly: what has been reaped may still be counted for a moment."""
    deadline_s = time.monotonic() + _EMPTY_TIMEOUT_S
    with files.vanishing():
        while not cgroups.is_empty():
            if time.monotonic() > deadline_s:
                return False
            await anyio.sleep(_EMPTY_PAUSE_S)
    return True
