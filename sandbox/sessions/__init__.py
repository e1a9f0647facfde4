"""A persistent shell in a sandbox: one command after another in the same shell, with boundaries out of band."""
