"""`bench pool`: see `benchmark`."""
