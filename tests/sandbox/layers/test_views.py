"""What is seen through layers, and what differs, whichever way it is computed."""

from __future__ import annotations

import random

from sandbox.layers.nodes import Delta, Node, View, differences, hidden, overlay, parent_of

NAMES = (b"a", b"b", b"a-", b"a.", b"a0", b"ab")


def random_view(rng: random.Random) -> dict[bytes, Node]:
    """A tree of some files and directories with names that sort closely."""
    view = {b"": Node("directory", 0o755)}
    for _ in range(rng.randrange(40)):
        above = rng.choice([path for path, node in view.items() if node.kind == "directory"])
        path = (above + b"/" if above else b"") + rng.choice(NAMES)
        view.setdefault(path, random_node(rng))
    return view


def random_node(rng: random.Random) -> Node:
    """One of few, so that equal ones occur."""
    if rng.random() < 0.5:
        return Node("directory", rng.choice((0o700, 0o755)))
    return Node("file", 0o644, rng.randrange(2), 1, bytes([rng.randrange(3)]) * 32)


def random_delta(rng: random.Random, base: View) -> Delta:
    """Edits, deletions, replaced and opaque directories, as an overlay writes them."""
    nodes: dict[bytes, Node] = {b"": base[b""]}
    deleted, special = set(), {}
    for _ in range(rng.randrange(12)):
        known = [path for path, node in nodes.items() if node.kind == "directory"]
        above = rng.choice(known)
        path = (above + b"/" if above else b"") + rng.choice(NAMES)
        if path in nodes or path in deleted or path in special:
            continue
        act = rng.randrange(5)
        if act == 0:
            deleted.add(path)
        elif act == 1:
            special[path] = "fifo"
        elif act == 2 and path in base and base[path].kind == "directory":
            nodes[path] = Node("directory", 0o755, opaque=rng.random() < 0.5)
        else:
            nodes[path] = random_node(rng)
    return Delta(nodes, frozenset(deleted), special)  # type: ignore[arg-type]


def seen_by_hand(base: View, delta: Delta) -> dict[bytes, Node]:
    """The same as `overlay`, path by path from the top."""
    seen = dict(delta.nodes)
    for path, node in base.items():
        if path in seen or path in delta.deleted or path in delta.special:
            continue
        above = path
        while above:
            above = parent_of(above)
            over = delta.nodes.get(above)
            if above in delta.deleted or above in delta.special:
                break
            if over is not None and (over.opaque or over.kind != "directory"):
                break
        else:
            seen[path] = node
    return seen


def test_views_and_differences_agree_with_the_rules_applied_by_hand() -> None:
    rng = random.Random(7)
    for _ in range(3000):
        base = random_view(rng)
        delta = random_delta(rng, base)
        seen = seen_by_hand(base, delta)
        assert overlay(base, delta) == seen
        gone = hidden(base, sorted(base), delta)
        assert gone == {path for path in base if path not in seen}
        short = differences(base, delta.nodes, gone, delta.special)
        whole = differences(base, seen, [path for path in base if path not in seen], delta.special)
        assert short == whole
        assert {parent_of(path) for path in seen if path} <= {p for p, n in seen.items() if n.kind == "directory"}
