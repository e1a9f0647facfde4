"""Root file systems of sandboxes, resolved to read-only mounts."""
