"""The scales of q, K, V and the output that runs are given: numbers, and tensors that the kernel reads."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..base import checks, tensor_memory
from ..base.dtypes import DType
from ..base.errors import RunError

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Scale(NamedTuple):
    """A number, or 1 and where a kernel finds fp32 scales."""

    number: float = 1.0
    address: int | None = None
    head_stride: int = 0  # elements; 0: one value for all heads
    request_stride: int = 0


ScaleMarks = tuple[float | tuple[int] | None, ...]


def marks_of(scales: tuple[Any, ...], device: torch.device) -> ScaleMarks | None:
    """What tells whether a run's scales are those of the run before: numbers, those of tensors on the CPU too, and the
    addresses of tensors of one value on the device. None: there are others, which each run checks."""
    found: list[float | tuple[int] | None] = []
    for value in scales:
        if value is None or value.__class__ is float:
            found.append(value)
            continue
        is_usual = value.__class__ in _PLAIN and value.dtype is torch.float32 and not value.requires_grad
        if not is_usual or value.numel() != 1 or value.dim() > 2:
            return None
        if value.is_cpu:
            if not value.untyped_storage().nbytes():
                return None
            found.append(value.item())
        elif value.get_device() == device.index and not value.is_neg() and (address := value.data_ptr()):
            found.append((address,))
        else:
            return None
    return tuple(found)


def scale_of(value: Any, name: str, heads: int, device: torch.device, requests: int = 0) -> Scale:
    """A scale of one value, of [heads] or, if there may be one for each of `requests`, of [requests, heads] or
    [requests, 1]."""
    if value is None:
        return Scale()
    if not isinstance(value, torch.Tensor):
        return Scale(checks.real(name, value, error=RunError))
    checks.tensor(value, name, RunError)
    if value.numel() == 1 and value.is_cpu:
        return Scale(checks.real(name, value.item(), error=RunError))
    checks.same_device(value, device, name, RunError)
    of_requests = requests > 0 and value.dim() == 2 and len(value) > 1 and value.shape[1] in (1, heads)
    if of_requests and (value.numel() != heads or len(value) == requests):
        return _of_requests(value, name, requests)
    if value.numel() not in (1, heads):
        shapes = f", or [{heads}] (one a head)" if heads > 1 else ""
        shapes += f", or for each request [{requests}, {heads}] or [{requests}, 1]" if requests else ""
        raise RunError(f"{name} has shape {tuple(value.shape)}: pass one entry{shapes}.")
    _check_dense(value, name, value.is_contiguous())
    return Scale(1.0, tensor_memory.address(value, name, RunError), int(value.numel() > 1))


def out_scale_of(value: Any, out_dtype: DType, device: torch.device) -> Scale:
    """The scale that fp8 outputs are divided by, one value."""
    if value is None:
        return Scale()
    if not out_dtype.is_fp8:
        raise RunError(
            f"o_scale={checks.shown(value)} but the plan's outputs are {out_dtype.value} and need no scale: pass "
            "o_data_type=torch.float8_e4m3fn to plan, or leave it None."
        )
    found = scale_of(value, "o_scale", 1, device)
    if not found.number > 0:
        raise RunError(f"o_scale={found.number}: pass a positive number.")
    return found


def _check_dense(value: torch.Tensor, name: str, is_dense: bool) -> None:
    if value.dtype != torch.float32:
        raise RunError(f"{name} has dtype {value.dtype}: pass float32, {name}.float().")
    if not is_dense:
        raise RunError(f"{name} has strides {tuple(value.stride())}: pass {name}.contiguous().")


def _of_requests(value: torch.Tensor, name: str, requests: int) -> Scale:
    if len(value) < requests:
        raise RunError(
            f"{name} has shape {tuple(value.shape)} but the plan has {requests} requests: "
            f"pass [{requests}, {value.shape[1]}]."
        )
    by_head = value.shape[1] > 1
    _check_dense(value, name, not by_head or value.stride(1) == 1)
    if (requests - 1) * value.stride(0) + value.shape[1] > 2**31:
        raise RunError(
            f"{name} has {value.stride(0)} elements from one request's scales to the next: pass {name}.contiguous()."
        )
    return Scale(1.0, tensor_memory.address(value, name, RunError), int(by_head), value.stride(0))


def token_scales(value: torch.Tensor, wanted: tuple[int, ...], columns: int, device: torch.device) -> Scale:
    """Scales of latent rows, one for each token and 128 shared columns."""
    checks.same_device(value, device, "ckv_scale_arr", RunError)
    if columns % 128 or value.shape != wanted or value.dtype != torch.float32 or not value.is_contiguous():
        raise RunError(
            f"ckv_scale_arr has shape {tuple(value.shape)} and dtype {value.dtype}: "
            f"pass contiguous float32 of {wanted}, one scale for 128 columns of a token."
        )
    address = tensor_memory.address(value, "ckv_scale_arr", RunError)
    if address % 16:
        raise RunError(f"ckv_scale_arr starts at {address:#x}: pass a tensor that starts on 16 bytes, such as a clone.")
    return Scale(1.0, address, 1)
