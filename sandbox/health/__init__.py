"""What this host can do, what dead engines left on it, and the removal of that."""
