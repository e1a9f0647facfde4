"""Tasks: the struct, its formats and the bundled families."""
