"""Numbers from the host to a device, in one copy that neither waits nor makes the host wait."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


def room_on_host(count: int, device: torch.device) -> torch.Tensor:
    """Memory for [count] int32 that are copied to or from `device`; pinned for a card, because the host would have to
    wait for copies of other memory. torch reuses it when these copies have ended."""
    return torch.empty(count, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")


def on_host(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """The values, int32, in such memory."""
    numbers = room_on_host(len(values), device)
    numbers.numpy()[:] = values
    return numbers


def joined(parts: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The parts one after the other; in memory of room_on_host if they are int32 on the host. A single part is returned
    as it is: make it by on_host."""
    if len(parts) == 1:
        return parts[0]
    if not all(part.is_cpu and part.dtype is torch.int32 for part in parts):
        return torch.cat(list(parts))
    return torch.cat(list(parts), out=room_on_host(sum(map(len, parts)), device))


def moved(parts: Sequence[torch.Tensor], device: torch.device) -> Sequence[torch.Tensor]:
    """The parts on `device`. A copy to the host is complete on return."""
    on_device = joined(parts, device).to(device, non_blocking=device.type != "cpu")
    return on_device.split([len(part) for part in parts])
