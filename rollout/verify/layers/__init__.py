"""Verification layers: each small module says what it judges; `cases` and `code` say how."""
