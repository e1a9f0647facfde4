"""Frames between the engine, its warden and its agents, and who answers which."""
