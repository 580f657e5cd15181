"""The two workspaces of a wrapper: for partial results of split requests, and for plans."""

from __future__ import annotations

from typing import Any

import torch

from ..base import checks, tensor_memory
from ..base.errors import PlanError
from ..base.memory import empty

INT_WORKSPACE_BYTES = 8 << 20


class Workspaces:
    """The two buffers and their sizes in bytes."""

    __slots__ = ("device", "float_buffer", "float_bytes", "int_buffer", "int_bytes")

    def __init__(self, device: torch.device, float_buffer: torch.Tensor) -> None:
        self.device = device
        self.use_float_buffer(float_buffer)
        self.use_int_buffer(empty(INT_WORKSPACE_BYTES, torch.uint8, device))

    def use_float_buffer(self, buffer: torch.Tensor) -> None:
        self._check(buffer, "float_workspace_buffer")
        self.float_buffer, self.float_bytes = buffer, buffer.numel() * buffer.element_size()

    def use_int_buffer(self, buffer: torch.Tensor) -> None:
        self._check(buffer, "int_workspace_buffer")
        self.int_buffer, self.int_bytes = buffer, buffer.numel() * buffer.element_size()

    def partial_rows(self, head_dim_vo: int) -> int:
        """Number of partial rows that fit the float workspace."""
        return self.float_bytes // partial_bytes(4, head_dim_vo) * 4

    def partials(self, head_dim_vo: int) -> tuple[int, int]:
        """Addresses of partial outputs and LSEs; they are the same for every plan, as captured graphs hold them."""
        base = self.float_buffer.data_ptr()
        return base, base + self.partial_rows(head_dim_vo) * head_dim_vo * 4

    def _check(self, buffer: Any, name: str) -> None:
        checks.tensor(buffer, name, PlanError)
        checks.same_device(buffer, self.device, name, PlanError)
        tensor_memory.address(buffer, name, PlanError)
        if not buffer.is_contiguous() or buffer.data_ptr() % 16:
            raise PlanError(
                f"{name} starts at {buffer.data_ptr():#x} with strides {tuple(buffer.stride())}: "
                "pass a contiguous tensor that starts on 16 bytes."
            )


def partial_bytes(rows: int, head_dim_vo: int) -> int:
    """Bytes of partial outputs and their LSEs, fp32, with padding so that the LSEs start on 16 bytes."""
    return -(-rows // 4) * 4 * (head_dim_vo + 1) * 4
