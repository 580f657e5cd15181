"""flashpage under PyTorch's flash operators, for tests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch.nn import attention

from flashpage import torch_attention


@contextlib.contextmanager
def under_operators(device: str) -> Iterator[None]:
    """Registered for the CPU, where torch has no such kernels; activated on a card."""
    if device == "cpu":
        registration = torch_attention.register("CPU")
        yield
        registration.remove()
    else:
        attention.activate_flash_attention_impl("flashpage")
        yield
        attention.restore_flash_attention_impl()
