"""What an engine holds on this host while it lives: its slot, staged binaries, host uids, audit line."""
