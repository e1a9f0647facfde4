"""Faults of the shared-memory lane, as both ends see them.

Invariant: all are `LearnerFault`s, so the engine handles them in one place; the learner treats every
one as the end of its process.
"""

from __future__ import annotations

from rollout.errors import LearnerFault


class LaneFault(LearnerFault):
    """The lane broke its own rules: a bad message, a wrong size, a wait that took too long."""


class PeerGone(LaneFault):
    """The process at the other end died or closed its socket."""


class FrameDamaged(LaneFault):
    """A frame's header, order or checksum is wrong; its content must not be trained on."""


class WeightsFault(LaneFault):
    """Weights could not be published, or arrived damaged, or the other end refused them."""
