"""Importers of task sets in their authors' formats: each module turns one row into one `Task`.

An importer raises `ConfigError` naming file, line and field for a row that is wrong, and `Unsupported` for a sound
row of a kind that cannot be judged here.
"""


class Unsupported(Exception):
    """A sound row that cannot become a task here; the text says which and why."""
