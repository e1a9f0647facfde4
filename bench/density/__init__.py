"""`bench density`: see `benchmark`."""
