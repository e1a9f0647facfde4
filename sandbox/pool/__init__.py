"""Warm sandboxes: a fair queue for who asks, jails that are used again, and their growth and shrinking by demand."""
