"""The store of layers in the state directory, and who uses which of them.

Owns: `layers/ID/` (the tree, its manifest, a lock, the idents of its bases) and this engine's pins. Invariant: a layer
that is pinned by a living engine, or is a base of another one, is never removed: a pin is a shared lock on the layer's
file, which the kernel drops with its last holder, so it survives no `kill -9`. Removing renames first, so that what has
a layer's name is whole. A layer that nobody keeps goes with the engine that made it, or when the next one looks.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import threading
from pathlib import Path

from sandbox.errors import LayerError
from sandbox.exhaustion import fault
from sandbox.layers.folder import (
    FOLDER,
    IDENT_BYTES,
    NEW,
    age_of,
    is_ident,
    is_kept,
    read_facts,
    registry_lock,
    remove_layer,
    remove_tree,
    require_own,
    sweep,
    unwritable,
    write_facts,
)
from sandbox.layers.manifest import Manifest, read_manifest, write_manifest
from sandbox.layers.nodes import Delta, Node, overlay
from sandbox.layers.types import Layer
from sandbox.layers.writing import TreeWriter


class _Pin:
    def __init__(self, lock_fd: int) -> None:
        self.lock_fd = lock_fd
        self.count = 0
        self.manifest: Manifest | None = None
        self.view: dict[bytes, Node] | None = None
        self.ordered: list[bytes] | None = None


class NewLayer:
    """A layer in the making: its directory, and the lock that keeps others from taking it for a leftover."""

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path = path
        self.lock_fd = lock_fd
        self.ident = path.name.removeprefix(NEW)
        self.writer = TreeWriter(path / "tree")


class LayerStore:
    """Args: the state directory. Every method blocks for file operations; any thread may call them."""

    def __init__(self, state_dir: Path) -> None:
        self.root = state_dir / FOLDER
        self._pins: dict[str, _Pin] = {}
        self._guard = threading.Lock()
        self._owned: dict[str, int] = {}  # how often `commit` and `find` gave it out, less `release`
        self._made = False

    # ------------------------------------------------------------------ making

    def create(self) -> NewLayer:
        """An empty place for a layer; `commit` or `discard` follows.

        Raises:
            LayerError: the store cannot be written.
            ExhaustedError: its disk is full.
        """
        try:
            self._open()
            path = self.root / f"{NEW}{secrets.token_hex(IDENT_BYTES)}"
            with registry_lock(self.root):
                path.mkdir(mode=0o700)
                lock_fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                fcntl.flock(lock_fd, fcntl.LOCK_SH)
            (path / "tree").mkdir(mode=0o700)
            return NewLayer(path, lock_fd)
        except OSError as error:
            raise unwritable(self.root, error) from None

    def commit(self, new: NewLayer, layer: Layer, delta: Delta) -> None:
        """Completes it, pinned once for the caller with its bases, which are pinned already.

        Raises:
            LayerError: the store cannot be written; `discard` follows.
        """
        try:
            new.writer.finish(delta)
            new.writer.close()
            write_facts(new.path / "facts", layer, delta)
            write_manifest(new.path / "manifest", layer, delta)
            new.path.rename(self.root / layer.ident)
        except OSError as error:
            raise unwritable(self.root, error) from None
        self._add(layer.ident, new.lock_fd)
        self.pin(layer.bases)
        self._own(layer.ident, 1)

    def discard(self, new: NewLayer) -> None:
        """Removes what was not completed; once."""
        new.writer.close()
        remove_tree(new.path)
        os.close(new.lock_fd)

    # ------------------------------------------------------------------ using

    def pin_again(self, idents: tuple[str, ...]) -> bool:
        """Pins layers that are pinned already, without any file operation; False (and nothing pinned) where one is
        not.
        """
        with self._guard:
            if not all(ident in self._pins for ident in idents):
                return False
            for ident in idents:
                self._pins[ident].count += 1
        return True

    def pin(self, idents: tuple[str, ...]) -> None:
        """Keeps those layers from being removed until `unpin`.

        Raises:
            LayerError: one of them is not there (any more); none is pinned.
        """
        for number, ident in enumerate(idents):
            try:
                if not self.pin_again((ident,)):
                    self._add(ident, self._lock(ident))
            except LayerError:
                self.unpin(idents[:number])
                raise

    def _add(self, ident: str, lock_fd: int) -> None:
        with self._guard:
            pin = self._pins.get(ident)
            if pin is None:
                pin = self._pins[ident] = _Pin(lock_fd)
            else:
                os.close(lock_fd)  # another thread was faster
            pin.count += 1

    def unpin(self, idents: tuple[str, ...]) -> tuple[str, ...]:
        """Lets go of them, by no more than closing files; those that are not in use here any more, for `retire`."""
        unused = []
        with self._guard:
            for ident in idents:
                pin = self._pins[ident]
                pin.count -= 1
                if pin.count == 0:
                    del self._pins[ident]
                    os.close(pin.lock_fd)
                    unused.append(ident)
        return tuple(unused)

    def _lock(self, ident: str) -> int:
        if not is_ident(ident):
            raise LayerError(f"{ident!r} is no layer's name")
        try:
            with registry_lock(self.root):
                lock_fd = os.open(self.root / ident / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                fcntl.flock(lock_fd, fcntl.LOCK_SH)
                os.utime(lock_fd)  # its last use
        except FileNotFoundError:
            raise LayerError(f"there is no layer {ident} (any more) in {self.root}") from None
        except OSError as error:
            raise fault(f"using layer {ident}", error.errno, LayerError) from None
        return lock_fd

    def tree(self, ident: str) -> Path:
        """Where the tree of a layer lies."""
        return self.root / ident / "tree"

    def manifest(self, ident: str) -> Manifest:
        """Of a pinned layer; remembered while it is.

        Raises:
            LayerError: it cannot be read.
        """
        pin = self._pins[ident]
        if pin.manifest is None:
            found = read_manifest(self.root / ident / "manifest")
            with self._guard:
                pin.manifest = pin.manifest or found  # one for all: views share its nodes
        return pin.manifest

    def view(self, layer: Layer) -> dict[bytes, Node]:
        """What is seen of a pinned layer and its bases; remembered while it is pinned, not to be changed."""
        pin = self._pins[layer.ident]
        if pin.view is None:
            view: dict[bytes, Node] = {}
            for ident in reversed(layer.chain):
                known = self._pins[ident].view
                view = known if known is not None else overlay(view, self.manifest(ident).delta())
            pin.view = view
        return pin.view

    def ordered(self, layer: Layer) -> list[bytes]:
        """The paths of that view, sorted; remembered like it."""
        pin = self._pins[layer.ident]
        if pin.ordered is None:
            pin.ordered = sorted(self.view(layer))
        return pin.ordered

    def find(self, ident: str) -> Layer:
        """The layer of that name, pinned with its bases until `release`.

        Raises:
            LayerError: there is none.
        """
        self.pin((ident,))
        try:
            layer = self.manifest(ident).layer
            self.pin(layer.bases)
        except BaseException:
            self.unpin((ident,))
            raise
        self._own(ident, 1)
        return layer

    # ------------------------------------------------------------------ ending

    def keep(self, layer: Layer) -> None:
        """Makes a layer outlive its engine, until `rollout gc` finds the store too large.

        Raises:
            LayerError: it is gone, or the store cannot be written.
        """
        try:
            (self.root / layer.ident / "kept").touch(mode=0o600)
            os.sync()  # the tree of a name that outlives a crash must have its bytes
        except OSError as error:
            raise unwritable(self.root / layer.ident, error) from None

    def release(self, layer: Layer) -> None:
        """Lets go of what `commit` or `find` pinned, and removes what nobody uses or keeps.

        Raises:
            LayerError: it was let go already.
        """
        self._own(layer.ident, -1)
        self.retire(self.unpin(layer.chain))

    def _own(self, ident: str, step: int) -> None:
        with self._guard:
            count = self._owned.get(ident, 0) + step
            if count < 0:
                raise LayerError(f"layer {ident} is not in use here (any more)")
            self._owned[ident] = count
            if count == 0:
                del self._owned[ident]

    def is_owned(self, ident: str) -> bool:
        """Was it given out here, and not released?"""
        with self._guard:
            return ident in self._owned

    def retire(self, idents: tuple[str, ...]) -> None:
        """Removes those of the layers that nobody uses or keeps, and of their bases.

        A base may have been let go by another thread while what lay over it was still there.
        """
        for ident in idents:
            facts = read_facts(self.root / ident)
            for candidate in (ident, *(facts.layer.bases if facts else ())):
                if not is_kept(self.root / candidate):
                    remove_layer(self.root, candidate)

    def aclose(self) -> None:
        """Lets go of everything, at the engine's end."""
        with self._guard:
            idents = sorted(self._pins, key=lambda ident: age_of(self.root / ident), reverse=True)
            for pin in self._pins.values():
                os.close(pin.lock_fd)
            self._pins.clear()
            self._owned.clear()
        self.retire(tuple(idents))

    def disown(self) -> list[int]:
        """See `sandbox.protocol.forks`."""
        return [pin.lock_fd for pin in self._pins.values()]

    def _open(self) -> None:
        """Makes the store at its first use, and removes what dead engines left in it."""
        if not self._made:
            self.root.mkdir(mode=0o700, exist_ok=True)
            require_own(self.root)
            sweep(self.root)
            self._made = True
