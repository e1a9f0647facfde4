"""The policy server: token ids in, sampled token ids with logprobs and weight versions out, over HTTP.

    protocol ─► app (event loop) ─► worker (one thread) ─► engine ─► sampling
                                        ▲ weights, pause, abort, between two decode steps

Run it with `python -m learner.serve`; the API is the part of vLLM's that the rollout engine uses.
"""
