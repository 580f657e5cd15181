"""Where new tokens go: the lists that appends take, as one record, and their checks."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from ..base import checks, env
from ..base.errors import RunError
from ..plan.lengths import batch_of


@dataclasses.dataclass(kw_only=True, slots=True)
class AppendPlaces:
    """The request of each new token, its position there, and the requests' pages: contiguous int32 on the device of
    the cache."""

    batch_indices: torch.Tensor  # [nnz]; negative: the token is skipped
    positions: torch.Tensor  # [nnz]
    kv_indices: torch.Tensor  # page numbers of all requests
    kv_indptr: torch.Tensor  # [batch + 1], where each request's begin

    def addresses(self) -> dict[str, int]:
        """By the names of the fields, which those of the kernels' parameters are, too."""
        return {
            "batch_indices": self.batch_indices.data_ptr(),
            "positions": self.positions.data_ptr(),
            "kv_indices": self.kv_indices.data_ptr(),
            "kv_indptr": self.kv_indptr.data_ptr(),
        }


def checked_places(given: AppendPlaces, kv_last_page_len: Any, nnz: int, device: torch.device) -> AppendPlaces:
    """The caller's lists for `nnz` tokens, checked and as a launch reads them."""
    batch = batch_of(given.kv_indptr, "kv_indptr")
    places = AppendPlaces(
        batch_indices=as_index(given.batch_indices, "batch_indices", nnz, device),
        positions=as_index(given.positions, "positions", nnz, device),
        kv_indices=as_index(given.kv_indices, "kv_indices", None, device),
        kv_indptr=as_index(given.kv_indptr, "kv_indptr", None, device),
    )
    _check_last_page_len(kv_last_page_len, batch, device)
    return places


def _check_last_page_len(kv_last_page_len: Any, batch: int, device: torch.device) -> None:
    """Only its length is used."""
    if as_index(kv_last_page_len, "kv_last_page_len", None, device).shape[0] != batch:
        raise RunError(
            f"kv_last_page_len has {kv_last_page_len.shape[0]} entries but kv_indptr has {batch} requests: "
            "pass one entry for each."
        )


def as_index(tensor: torch.Tensor, name: str, length: int | None, device: torch.device) -> torch.Tensor:
    """The tensor as contiguous int32."""
    checks.tensor(tensor, name, RunError)
    checks.same_device(tensor, device, name, RunError)
    if tensor.dim() != 1 or tensor.dtype not in (torch.int32, torch.int64):
        raise RunError(
            f"{name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}: pass int32 or int64, one dimension."
        )
    if length is not None and tensor.shape[0] != length:
        raise RunError(f"{name} has {tensor.shape[0]} entries but {length} are expected: pass as many.")
    if tensor.dtype is torch.int64 and not is_dynamo_compiling():
        tensor = _narrowed(tensor, name)
    return tensor.to(torch.int32).contiguous().resolve_neg()


def _narrowed(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Checks for 32 bits. A card cannot report errors: larger numbers become the largest one, and are out of range."""
    within = tensor.clamp(-(2**31), 2**31 - 1)
    if tensor.is_cpu or (env.is_on("FLASHPAGE_CHECK_INDICES") and not torch.cuda.is_current_stream_capturing()):
        wrong = (within != tensor).nonzero()
        if len(wrong):
            i = int(wrong[0])
            raise RunError(f"{name}[{i}]={int(tensor[i])} is beyond 32 bits: pass numbers of this batch and cache.")
    return within
