"""Source of the programs that run inside sandboxes: standard library only, sent as text, never imported by the engine
beyond the codec. See `rollout.verify.bundle`."""
