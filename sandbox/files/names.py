"""Which names may stand in a tree, whoever made it.

Owns: the names seen so far. Invariant: a name is relative, stays below its root, and is a directory wherever another
name lies below it.
"""

from __future__ import annotations

from typing import Literal

from sandbox.files.records import MAX_NAME_BYTES, MAX_PATH_BYTES

NodeKind = Literal["file", "directory"]


class Names:
    """The names of one tree.

    Args:
        max_entries: how many names there may be, directories that are only named by what lies in them included.
    """

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._kinds: dict[str, NodeKind] = {}

    def clean(self, name: str) -> str | None:
        """The name without empty parts and `.`; None for what is not a relative path inside; '' for the root itself."""
        parts = [part for part in name.split("/") if part not in ("", ".")]
        if name.startswith("/") or ".." in parts or "\0" in name:
            return None
        return "/".join(parts)

    def add(self, name: str, kind: NodeKind) -> str | None:
        """Notes a clean name; what is wrong with it, or None."""
        if len(name.encode("utf-8", "surrogateescape")) > MAX_PATH_BYTES:
            return f"its path is longer than {MAX_PATH_BYTES} bytes"
        if not self._note_parents(name):
            return "it lies below a file"
        if len(name[name.rfind("/") + 1 :].encode("utf-8", "surrogateescape")) > MAX_NAME_BYTES:
            return f"its name is longer than {MAX_NAME_BYTES} bytes"
        if self._kinds.setdefault(name, kind) != kind:
            return "it is a file and a directory"
        if len(self._kinds) > self._max_entries:
            return f"there are more than {self._max_entries} files and directories"
        return None

    def _note_parents(self, name: str) -> bool:
        """Notes the directories above a name, from below: one that is known has all of its own noted already."""
        end = name.rfind("/")
        while end > 0:
            parent = name[:end]
            known = self._kinds.get(parent)
            if known is not None:
                return known == "directory"
            self._kinds[parent] = "directory"
            end = name.rfind("/", 0, end)
        return True
