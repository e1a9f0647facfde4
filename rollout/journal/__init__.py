"""The durable record of a run: append-only, checksummed, group-committed."""
