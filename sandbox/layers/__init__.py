"""Sealed workspaces, and what is made of them: bases of other sandboxes, differences, files to carry away."""
