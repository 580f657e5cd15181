"""Numbers from the host to a device, in one copy that neither waits nor makes the host wait."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def numbers_on_host(count: int, device: torch.device) -> torch.Tensor:
    """Memory for [count] int32 that are copied to `device`; pinned for a card, because the host would have to wait for
    a copy from other memory. torch reuses it once the copies that were made from it have ended."""
    return torch.empty(count, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")


def joined(parts: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The parts, int32 on the host or all on one device, one after the other where a copy to `device` can begin."""
    if not all(part.is_cpu and part.dtype is torch.int32 for part in parts):
        return torch.cat(list(parts))
    return torch.cat(list(parts), out=numbers_on_host(sum(map(len, parts)), device))


def moved(parts: Sequence[torch.Tensor], device: torch.device) -> Sequence[torch.Tensor]:
    """The parts on `device`. A copy to the host is complete on return."""
    on_device = joined(parts, device).to(device, non_blocking=device.type != "cpu")
    return on_device.split([len(part) for part in parts])
