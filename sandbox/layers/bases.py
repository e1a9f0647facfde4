"""The engine's layers: the store, and how a sandbox gets one of them under its workspace.

Owns: the store, and what was found out about this host. Invariant: a base is pinned from before its sandbox is built
until after that one has ended; where it cannot lie under the workspace it is copied in, and `why_copied` says why.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import anyio
import anyio.to_thread

from sandbox.errors import ConfigError
from sandbox.files.caps import Caps, FullCaps
from sandbox.files.pipes import send_tree, time_for
from sandbox.health.capabilities import try_namespaces
from sandbox.jail import Jail
from sandbox.layers.carrying import read_tar, write_tar
from sandbox.layers.copying import copy_records, require_room
from sandbox.layers.store import LayerStore
from sandbox.layers.types import Attachment, Layer
from sandbox.layers.workspace import Workspace
from sandbox.protocol.requests import Requests
from sandbox.protocol.warden import Warden
from sandbox.types import GIB, Limits

_THREADS = 4
MAX_BYTES = 16 * GIB
MAX_ENTRIES = 1_000_000
"""Of a layer that is brought in, unless its caller says otherwise."""
_T = TypeVar("_T")


class Bases:
    """Args: the state directory, and the warden that reads workspaces."""

    def __init__(self, state_dir: Path, warden: Warden) -> None:
        self.store = LayerStore(state_dir)
        self.why_copied: str | None = None
        """Why bases are copied into workspaces on this host; empty where they are not, None as long as nobody asked."""
        self._state_dir = state_dir
        self._warden = warden
        self._threads = anyio.CapacityLimiter(_THREADS)
        self._look = anyio.Lock()

    async def lie_under(self) -> bool:
        """Can a base lie under a workspace here? Tried once, in a throw-away process."""
        async with self._look:
            if self.why_copied is None and os.geteuid() != 0:
                self.why_copied = "id-mapped mounts take the host's root"
            if self.why_copied is None:
                answer = await anyio.to_thread.run_sync(try_namespaces, self._state_dir)
                self.why_copied = answer.layers or ""
        return not self.why_copied

    async def attach(self, base: Layer, limits: Limits) -> Attachment | None:
        """Pins a base until `detach`; gives what the warden needs to put it under a workspace, None where it is copied.

        Raises:
            ConfigError: it is no layer, or must be copied and does not fit into the limits.
            LayerError: it is gone.
        """
        if not isinstance(base, Layer):
            raise ConfigError("base", type(base).__name__, "must be a Layer, as `Sandbox.seal` gives it")
        under = await self.lie_under()
        if not self.store.pin_again(base.chain):
            await self._call(self.store.pin, base.chain)
        if under:
            return Attachment(tuple(str(self.store.tree(ident)) for ident in base.chain), base.mode)
        try:
            await self._call(self._require_room, base, limits)
        except BaseException:
            await self.detach(base)
            raise
        return None

    def _require_room(self, base: Layer, limits: Limits) -> None:
        require_room(self.store.view(base), limits)

    def wanted(self, base: Layer) -> bool:
        """Does its owner in this engine still have a use for it?"""
        return self.store.is_owned(base.ident)

    async def detach(self, base: Layer) -> None:
        """Says that no workspace lies over it any more; cancellation waits."""
        if unused := self.store.unpin(base.chain):
            with anyio.CancelScope(shield=True):
                await self._call(self.store.retire, unused)

    def workspace(self, jail: Jail, base: Layer | None) -> Workspace:
        """That of a jail which was just leased, over that base."""
        copied = bool(self.why_copied)
        return Workspace(self.store, self._warden, jail, base, copied=copied, limiter=self._threads)

    async def copy(self, requests: Requests, base: Layer, limits: Limits) -> None:
        """Copies a base into an empty workspace.

        Raises:
            TransferError: the inside cannot write it.
            LayerError: the store has been damaged.
        """
        timeout_s = time_for(limits.disk_bytes)
        await send_tree(requests, "/workspace", lambda: copy_records(self.store, base), timeout_s, self._threads)

    # ------------------------------------------------------------------ what callers have layers for

    async def find(self, ident: str) -> Layer:
        """A kept layer of an earlier engine, in use here until `release`.

        Raises:
            LayerError: there is none of that name.
        """
        return await self._call(self.store.find, ident)

    async def keep(self, layer: Layer) -> None:
        """Makes a layer outlive this engine; `rollout gc` removes it once the store is too large.

        Raises:
            LayerError: it is gone, or the store cannot be written.
        """
        await self._call(self.store.keep, layer)

    async def release(self, layer: Layer) -> None:
        """Says that it will not be asked for any more: it goes with the last sandbox that is over it, unless it is
        kept.
        """
        with anyio.CancelScope(shield=True):
            await self._call(self.store.release, layer)

    async def export(self, layer: Layer, target: str | Path) -> None:
        """Writes a layer with all that lies under it to a plain tar, whole or not at all.

        Raises:
            LayerError: it is gone, or the file cannot be written.
            ExhaustedError: its disk is full.
        """
        await self._call(self.store.pin, layer.chain)
        try:
            await self._call(write_tar, self.store, layer, Path(target))
        finally:
            await self.detach(layer)

    async def bring_in(
        self, source: str | Path, *, max_bytes: int = MAX_BYTES, max_entries: int = MAX_ENTRIES
    ) -> Layer:
        """A layer of a plain tar of files, directories and symbolic links, as `export` and others write it; in use here
        until `release`. Owners, attributes and set-user-id bits are left out.

        Args:
            max_bytes, max_entries: of all of it.

        Raises:
            LayerError: the tar has something else, or too much, or cannot be read; names it. Nothing is left.
        """
        caps = Caps(max_bytes, max_entries).within(Limits())
        return await self._call(self._bring_in, Path(source), caps)

    def _bring_in(self, source: Path, caps: FullCaps) -> Layer:
        new = self.store.create()
        try:
            delta = read_tar(source, caps, new.writer)
            num_bytes = sum(node.size for node in delta.nodes.values())
            mode, num_entries = delta.nodes[b""].mode, len(delta.nodes) - 1
            layer = Layer(ident=new.ident, mode=mode, num_entries=num_entries, num_bytes=num_bytes)
            self.store.commit(new, layer, delta)
        except BaseException:
            self.store.discard(new)
            raise
        return layer

    async def aclose(self) -> None:
        """Ends the use of every layer, when no sandbox is left; those that nobody keeps go."""
        await self._call(self.store.aclose)

    async def _call(self, function: Callable[..., _T], *args: object) -> _T:
        return await anyio.to_thread.run_sync(function, *args, limiter=self._threads)
