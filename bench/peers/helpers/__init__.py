"""Programs that serve batches to `bench.peers.helper`, some by other interpreters; they import little."""
