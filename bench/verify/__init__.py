"""`bench verify`: see `benchmark`."""
