"""A model's weights as one flat buffer, the form in which they are published.

Invariant: parameters in the order of `named_parameters()` (tied ones once), float32, C order, end to
end; writer and reader agree because both walk the same module.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from rollout.lane.errors import WeightsFault

_ITEM_BYTES = 4


def flat_nbytes(model: nn.Module) -> int:
    """Bytes of the model's flat buffer."""
    return _ITEM_BYTES * sum(parameter.numel() for parameter in model.parameters())


@torch.no_grad()
def write_flat(model: nn.Module, view: memoryview) -> None:
    """Copies the weights into a writable view of exactly `flat_nbytes(model)` bytes."""
    _check_size(model, view)
    flat = torch.from_numpy(np.frombuffer(view, np.float32))
    at = 0
    for parameter in model.parameters():
        flat[at : at + parameter.numel()].copy_(parameter.detach().reshape(-1))
        at += parameter.numel()


@torch.no_grad()
def read_flat(model: nn.Module, view: memoryview) -> None:
    """Copies a view of exactly `flat_nbytes(model)` bytes into the weights, in place."""
    _check_size(model, view)
    values = np.frombuffer(view, np.float32)
    at = 0
    for parameter in model.parameters():
        # The copy is small and short-lived; torch refuses to look at read-only memory without a warning.
        piece = torch.from_numpy(values[at : at + parameter.numel()].copy())
        parameter.copy_(piece.view(parameter.shape))
        at += parameter.numel()


def _check_size(model: nn.Module, view: memoryview) -> None:
    if view.nbytes != flat_nbytes(model):
        raise WeightsFault(f"{view.nbytes} bytes of weights do not fit a model of {flat_nbytes(model)} bytes")
