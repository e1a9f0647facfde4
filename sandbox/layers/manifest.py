"""A layer's manifest: what it holds, in one file beside its tree.

Invariant: a manifest under its final name is complete, and of a tree that is complete and never changed.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from sandbox.errors import LayerError
from sandbox.layers.nodes import Delta, Node
from sandbox.layers.types import Layer

VERSION = 1


class Manifest(msgspec.Struct, frozen=True, array_like=True):
    """The file's content."""

    version: int
    layer: Layer
    nodes: list[tuple[bytes, Node]]
    deleted: list[bytes]

    def delta(self) -> Delta:
        """What the layer says about its bases."""
        return Delta(dict(self.nodes), frozenset(self.deleted))


def write_manifest(path: Path, layer: Layer, delta: Delta) -> None:
    """Writes it (blocking)."""
    manifest = Manifest(VERSION, layer, list(delta.nodes.items()), sorted(delta.deleted))
    with open(path, "xb") as file:
        file.write(msgspec.msgpack.encode(manifest))
        file.flush()
        os.fsync(file.fileno())


def read_manifest(path: Path) -> Manifest:
    """Reads it (blocking).

    Raises:
        LayerError: there is none, or none of this version.
    """
    try:
        manifest = msgspec.msgpack.decode(path.read_bytes(), type=Manifest)
    except FileNotFoundError:
        raise LayerError(f"there is no layer {path.parent.name} (any more) in {path.parent.parent}") from None
    except (OSError, msgspec.DecodeError) as error:
        raise LayerError(f"{path} cannot be read as a layer's manifest ({error})") from None
    if manifest.version != VERSION:
        raise LayerError(f"{path} is of version {manifest.version}; this program reads {VERSION}")
    return manifest
