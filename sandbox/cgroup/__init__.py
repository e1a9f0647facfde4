"""Control groups: which limits this host can enforce, and the files that do it."""
