"""The append of K and V of new tokens to their pages, as one launch or one call of the host library."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from .. import jit, native
from ..base import kv_view
from ..kernels import helpers
from ..kernels.spec import KernelSpec
from .append_places import AppendPlaces
from .row_launches import launch_rows


class AppendLaunch:
    """Kernel and parameters for tensors of one form: heads, columns, strides, types and device, which the caller has
    checked. Calls differ by addresses and by the number of tokens; one thread calls at a time.

    Args:
        key, value: [nnz, num_kv_heads, head_dim].
        cache: one tensor, or K and V.
    """

    def __init__(self, key: torch.Tensor, value: torch.Tensor, cache: Sequence[torch.Tensor], kv_layout: str) -> None:
        k, v = kv_view.paged_views((cache[0], cache[1]) if len(cache) == 2 else cache[0], kv_layout)
        self._size, self._device, self._num_kv_heads = key.element_size(), key.device, key.shape[1]
        self._value_offset = v.offset * self._size  # bytes
        self._params = native.AppendParams(
            key_row_stride=key.stride(0),
            key_head_stride=key.stride(1),
            value_row_stride=value.stride(0),
            value_head_stride=value.stride(1),
            k=native.KvView(None, k.page_stride, k.token_stride, k.head_stride),
            v=native.KvView(None, v.page_stride, v.token_stride, v.head_stride),
            num_kv_heads=key.shape[1],
            head_dim_qk=key.shape[2],
            head_dim_vo=value.shape[2],
            page=native.make_fast_div(k.page_size),
        )
        self._address = ctypes.addressof(self._params)
        spec = KernelSpec("append", kv_dtype=helpers.COPIED[self._size])
        self._kernel = None if key.is_cpu else jit.get_kernel(spec, key.device)

    def run(self, key: torch.Tensor, value: torch.Tensor, cache: Sequence[torch.Tensor], places: AppendPlaces) -> None:
        """Writes the rows; there is at least one."""
        params, nnz = self._params, key.shape[0]
        params.append_key, params.append_value, params.nnz = key.data_ptr(), value.data_ptr(), nnz
        params.k.data, params.v.data = cache[0].data_ptr(), cache[-1].data_ptr() + self._value_offset
        params.batch_indices, params.positions = places.batch_indices.data_ptr(), places.positions.data_ptr()
        params.kv_indices, params.kv_indptr = places.kv_indices.data_ptr(), places.kv_indptr.data_ptr()
        if self._kernel is None:
            native.check(native.load().fp_cpu_append(self._address, self._size))
        else:
            launch_rows(self._kernel, self._address, nnz * self._num_kv_heads, self._device)
