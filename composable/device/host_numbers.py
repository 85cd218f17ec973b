"""Numbers that the host has, on their way to a device without a wait; knows not what they mean."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def numbers_for(numbers: Sequence[float], device: torch.device, dtype: torch.dtype) -> Tensor:
    """A 1-D tensor of `numbers`. From memory that is not pinned the host would have to wait for everything launched before."""
    with torch.inference_mode(False):
        on_host = torch.tensor(numbers, dtype=dtype, pin_memory=device.type not in ("cpu", "meta"))
        return on_host.to(device, non_blocking=True)
