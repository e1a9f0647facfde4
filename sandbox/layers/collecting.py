"""Which layers go when the store is cleaned: those that nobody has a use for, then the longest unused over a size.

Owns: the order. Invariant: a layer that a living engine holds, or that lies under one that stays, stays.
"""

from __future__ import annotations

from pathlib import Path

from sandbox.layers.folder import (
    FOLDER,
    bases_in,
    idents_in,
    is_kept,
    leftovers_in,
    read_facts,
    remove_layer,
    sweep,
    unused_in,
)


def stale_layers(state_dir: Path) -> list[Path]:
    """What dead engines left: half-made layers, and those that were not to outlive them. Changes nothing."""
    root = state_dir / FOLDER
    return [*leftovers_in(root), *(root / ident for ident in unused_in(root))]


def collect_layers(state_dir: Path, max_bytes: int) -> list[Path]:
    """Removes those, and of the layers that were kept the longest unused, until all take at most `max_bytes`
    (blocking).

    What is in use counts, and stays, however much it is. Returns what was removed.
    """
    root = state_dir / FOLDER
    if not root.is_dir():
        return []
    removed = sweep(root)
    while _disk_bytes(root) > max_bytes:
        bases = bases_in(root)
        kept = [ident for ident in idents_in(root) if is_kept(root / ident) and ident not in bases]
        kept.sort(key=lambda ident: _last_use(root / ident))
        gone = next((ident for ident in kept if remove_layer(root, ident)), None)
        if gone is None:
            break
        removed += [root / gone, *sweep(root)]  # with what lay under it alone
    return removed


def _disk_bytes(root: Path) -> int:
    return sum(facts.disk_bytes for ident in idents_in(root) if (facts := read_facts(root / ident)))


def _last_use(path: Path) -> float:
    try:
        return (path / "lock").stat().st_mtime
    except FileNotFoundError:
        return 0.0
