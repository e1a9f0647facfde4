"""The workspace of one sandbox, as something that can be compared with its base and sealed.

Owns: which base it has, and whether that lies under it or was copied into it. Invariant: what `seal` gives is complete,
and pinned for the caller before the workspace's own base may be let go.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Protocol

import anyio
import anyio.to_thread

from sandbox.errors import CapabilityError, LayerError, SandboxDiedError
from sandbox.files.caps import FullCaps
from sandbox.jail import Jail
from sandbox.layers.merging import merge
from sandbox.layers.nodes import Delta, differences, hidden, reachable
from sandbox.layers.reading import read_workspace
from sandbox.layers.store import LayerStore, NewLayer
from sandbox.layers.types import MAX_DEPTH, Change, Layer
from sandbox.layers.writing import TreeWriter
from sandbox.protocol.warden import Warden
from sandbox.types import Skipped


class Inhabitant(Protocol):
    """What a workspace asks of its sandbox."""

    @property
    def alive(self) -> bool: ...

    @property
    def frozen(self) -> bool: ...

    async def freeze(self) -> None: ...

    async def thaw(self) -> None: ...


@asynccontextmanager
async def standing_still(box: Inhabitant, busy: bool) -> AsyncIterator[None]:
    """Nothing in there runs meanwhile; where the host cannot freeze, it is enough that no command does.

    Args:
        busy: does one?

    Raises:
        LayerError: a command runs, and cannot be stopped.
    """
    if box.frozen:
        yield
        return
    try:
        await box.freeze()
    except CapabilityError as error:
        if busy:
            raise LayerError(f"a command runs in the sandbox, and cannot be made to stand still: {error}") from None
        yield
        return
    try:
        yield
    finally:
        with anyio.CancelScope(shield=True), suppress(SandboxDiedError):  # the end said why
            await box.thaw()


class Workspace:
    """Made by the host for each sandbox.

    Args:
        jail: whose it is.
        base: what it started from; pinned by the host for as long as this is used.
        copied: the base was copied in, so that the workspace holds everything itself.
        limiter: of the threads for file operations.
    """

    def __init__(
        self,
        store: LayerStore,
        warden: Warden,
        jail: Jail,
        base: Layer | None,
        *,
        copied: bool,
        limiter: anyio.CapacityLimiter,
    ) -> None:
        self.base = base
        self.copied = copied
        self._store = store
        self._warden = warden
        self._jail = jail
        self._limiter = limiter
        self._turn = anyio.Lock()

    async def diff(self, box: Inhabitant, caps: FullCaps, *, busy: bool) -> tuple[Change, ...]:
        """What is not as it was in the base (without one: in an empty workspace), by path.

        Everything stands still meanwhile, where this host can freeze. Only what changed is read, but where the base was
        copied. Cancelled: all goes on.

        Args:
            caps: of the content that is hashed, and the number of entries that are looked at.
            busy: a command runs.

        Raises:
            LayerError: over the caps, a path of more than 4,000 bytes or 256 levels, or changed while it was read.
            SandboxDiedError: the sandbox has ended.
        """
        async with self._holding_base():
            delta = await self._read(box, caps, None, busy)
            return await anyio.to_thread.run_sync(self._compare, delta, limiter=self._limiter)

    async def _read(self, box: Inhabitant, caps: FullCaps, writer: TreeWriter | None, busy: bool) -> Delta:
        async with self._turn:  # the warden reads for one at a time
            self._require_alive(box)
            async with standing_still(box, busy):
                delta = await read_workspace(self._warden, self._jail, caps, writer, self._limiter)
        self._require_alive(box)
        return delta

    def _require_alive(self, box: Inhabitant) -> None:
        """The jail of a lease that is over may serve another tenant, whose workspace that would be."""
        if not box.alive:
            raise SandboxDiedError("the sandbox ended while its workspace was read")

    @asynccontextmanager
    async def _holding_base(self) -> AsyncIterator[None]:
        """The base stays while it is needed, also when the sandbox ends meanwhile."""
        if self.base is None:
            yield
            return
        if not self._store.pin_again(self.base.chain):
            raise SandboxDiedError("the sandbox has ended, and with it the use of its base")
        try:
            yield
        finally:
            if unused := self._store.unpin(self.base.chain):
                with anyio.CancelScope(shield=True):
                    await anyio.to_thread.run_sync(self._store.retire, unused, limiter=self._limiter)

    def _compare(self, delta: Delta) -> tuple[Change, ...]:
        base = {} if self.base is None else self._store.view(self.base)
        if self.base is None or self.copied:
            gone = {path for path in base if path not in delta.nodes}
        else:
            gone = hidden(base, self._store.ordered(self.base), delta)
        return differences(base, delta.nodes, gone, delta.special)

    async def seal(self, box: Inhabitant, caps: FullCaps, *, busy: bool) -> Layer:
        """A layer of what the workspace holds now, in use until `SandboxHost.layers.release` or the host's end.

        The sandbox goes on as it was; meanwhile everything in it stands still, where this host can freeze. Hard links
        become files of their own, holes stay holes, modes and times are kept, but not set-user-id bits, attributes and
        owners; what is no file, directory or link is listed in `skipped`. Cancelled: nothing is left in the store.

        Args:
            caps: of the content (holes as zeros) and the number of entries that are not the base's.
            busy: a command runs.

        Raises:
            LayerError: over the caps, a path of more than 4,000 bytes or 256 levels, changed while it was read, or
                the store cannot be written.
            ExhaustedError: its disk is full.
            SandboxDiedError: the sandbox has ended.
        """
        async with self._holding_base():
            return await self._seal(box, caps, busy)

    async def _seal(self, box: Inhabitant, caps: FullCaps, busy: bool) -> Layer:
        new = await anyio.to_thread.run_sync(self._store.create, limiter=self._limiter)
        try:
            delta = await self._read(box, caps, new.writer, busy)
            with anyio.CancelScope(shield=True):  # moments: what was made is pinned, or removed
                layer = await anyio.to_thread.run_sync(self._commit, new, delta, limiter=self._limiter)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self._store.discard, new, limiter=self._limiter)
            raise
        return layer

    def _commit(self, new: NewLayer, delta: Delta) -> Layer:
        bases: tuple[str, ...] = ()
        deleted: frozenset[bytes] = frozenset()
        num_entries = len(delta.nodes)
        if self.base is not None and not self.copied:
            view = self._store.view(self.base)
            deleted = reachable(view, (*delta.deleted, *delta.special))
            num_new = sum(path not in view for path in delta.nodes)
            num_entries = len(view) + num_new - len(hidden(view, self._store.ordered(self.base), delta))
            bases = self.base.chain
        made = Delta(delta.nodes, deleted)
        if self.base is not None and len(bases) >= MAX_DEPTH:
            made, bases = merge(self._store, self.base, delta, new.writer), ()
        layer = Layer(
            ident=new.ident,
            bases=bases,
            mode=delta.nodes[b""].mode,
            num_entries=num_entries - 1,
            num_bytes=sum(node.size for node in made.nodes.values()),
            skipped=tuple(Skipped(path=os.fsdecode(path), kind=kind) for path, kind in delta.special.items()),
        )
        self._store.commit(new, layer, made)
        return layer
