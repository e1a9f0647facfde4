"""`bench lane`: see `benchmark`."""
