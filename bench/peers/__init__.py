"""Other ways to run a program, and our own, as peers that several benchmarks share."""
