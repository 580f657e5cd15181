"""Launches of the kernels that give each row a warp: merges of states, and appends."""

from __future__ import annotations

import ctypes

import torch

from .. import jit, native
from ..base.dtypes import DType
from ..base.errors import CapabilityError, RunError
from ..kernels import helpers
from ..kernels.spec import KernelSpec
from ..plan.session import current_stream

_ROWS_PER_CTA = 8
_CONTIGUOUS = torch.contiguous_format


def launch_merge(params: native.MergeStatesParams, v: torch.Tensor) -> None:
    """Sets the parameters that all merges share, and launches."""
    if params.rows * params.num_heads * params.head_dim == 0:
        return
    address = ctypes.addressof(params)
    if v.device.type == "cpu":
        native.check(native.load().fp_cpu_merge_states(address, DType.of(v.dtype).host_code))
        return
    if params.head_dim % 4:
        raise CapabilityError(
            f"head_dim={params.head_dim} is not a multiple of 4: the merge kernel reads four at a time."
        )
    if params.out % (4 * v.element_size()):
        raise RunError(
            f"the output starts at {params.out:#x}: the merge kernel writes four elements at a time. "
            f"Pass memory that starts on {4 * v.element_size()} bytes."
        )
    kernel = jit.get_kernel(KernelSpec("merge_states", q_dtype=DType.of(v.dtype)), v.device)
    launch_rows(kernel, address, params.rows * params.num_heads, v.device)


def launch_rows(kernel: jit.LoadedKernel, address: int, warps: int, device: torch.device) -> None:
    grid = min(-(-warps // _ROWS_PER_CTA), helpers.MOST_CTAS)
    native.check(native.load().fp_launch(kernel.handle, address, grid, current_stream(device.index), 0))


def rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, contiguous in its last dimension."""
    return tensor if tensor.shape[-1] <= 1 or tensor.stride(-1) == 1 else tensor.contiguous()


def vector_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy, with rows that begin on four elements, which the kernel on a card loads at once."""
    at_four, strides = 4 * tensor.element_size(), tensor.stride()[:-1]
    is_aligned = not any(stride * tensor.element_size() % at_four for stride in strides)
    return tensor if is_aligned and tensor.data_ptr() % at_four == 0 else tensor.clone(memory_format=_CONTIGUOUS)
