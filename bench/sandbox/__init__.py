"""`bench sandbox`: see `benchmark`."""
