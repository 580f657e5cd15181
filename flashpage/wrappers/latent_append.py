"""Writing latent rows in fp8: new tokens are quantised as they are written to their pages."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch

from .. import jit, native
from ..base import checks, kv_view, tensor_memory
from ..base.dtypes import DType
from ..base.errors import RunError
from ..kernels import latent_formats
from ..kernels.latent_formats import check_format
from ..kernels.spec import KernelSpec
from ..run.checks import check_places, has_pages, rows_of_pages
from . import operators
from .append_places import AppendPlaces
from .quantised_append import WIDE
from .row_launches import launch_rows

_LARGEST = 448.0  # of e4m3
_EXPONENT_BIAS = 127  # of scales that are exponents


def refuse_to_quantise(name: str, cache: Any, rows: Any) -> None:
    """Refuses a cache in fp8 that would need its rows quantised."""
    are_tensors = isinstance(cache, torch.Tensor) and isinstance(rows, torch.Tensor)
    if are_tensors and cache.dtype is torch.float8_e5m2 and rows.dtype is not cache.dtype:
        raise RunError(
            f"{name} has dtype {cache.dtype}: latent rows are quantised to float8_e4m3fn alone; pass such a cache, "
            f"or rows of {cache.dtype}."
        )


class Scales(NamedTuple):
    """Scales of append_paged_mla_kv_cache."""

    ckv: Any
    ckv_of_tokens: Any
    kpe: Any


class LatentWrite(NamedTuple):
    """New rows in any type of 16 or 32 bits, and the cache that gets them."""

    ckv: torch.Tensor  # [nnz, head_dim_ckv]
    kpe: torch.Tensor | None  # [nnz, head_dim_kpe]
    caches: tuple[torch.Tensor, ...]  # [pages, page_size, columns]: of both parts, or of packed rows
    format: str

    def write(self, places: AppendPlaces, scales: Scales) -> None:
        ckv, device = self.ckv, self.ckv.device
        first, last = self.caches[0], self.caches[-1]
        views = kv_view.latent_views(first if first is last else (first, last), first.shape[2])
        k, v = rows_of_pages(views, latent_formats.packed(self.format), "ckv_cache")
        params = native.AppendLatentParams(
            ckv=ckv.data_ptr(),
            ckv_row_stride=ckv.stride(0),
            kpe=None if self.kpe is None else self.kpe.data_ptr(),
            kpe_row_stride=0 if self.kpe is None else self.kpe.stride(0),
            k=native.KvView(first.data_ptr(), k.page_stride, k.token_stride, 0),
            v=native.KvView(last.data_ptr(), v.page_stride, v.token_stride, 0),
            nnz=ckv.shape[0],
            page=native.make_fast_div(k.page_size),
            **places.addresses(),
        )
        kept = self._set_scales(params, scales, (k.num_pages, k.page_size))
        if not ckv.shape[0]:
            return
        if device.type == "cpu":
            self._write_here(places, scales, k)
            return
        if not has_pages(places.batch_indices, places.kv_indices):
            return
        kv_view.check_alignment((k.page_stride, k.token_stride), 1, 4 if len(self.caches) == 1 else 1, "ckv_cache")
        spec = KernelSpec(
            "append_latent",
            q_dtype=DType.of(ckv.dtype),
            head_dim_qk=ckv.shape[1] + (0 if self.kpe is None else self.kpe.shape[1]),
            head_dim_vo=ckv.shape[1],
            latent_format=self.format,
        )
        launch_rows(jit.get_kernel(spec, device), ctypes.addressof(params), ckv.shape[0], device)
        del kept

    def _set_scales(self, params: native.AppendLatentParams, scales: Scales, pages: tuple[int, int]) -> Any:
        """Sets the scales; those of tokens are written. Returns tensors that the launch reads."""
        params.shared_scale = params.tail_scale = 1.0
        for name, pointer, value in (("shared_scale", "k_scale", scales.ckv), ("tail_scale", "v_scale", scales.kpe)):
            caller = "ckv_scale" if name == "shared_scale" else "kpe_scale"
            if isinstance(value, torch.Tensor) and not value.is_cpu:
                checks.same_device(value, self.ckv.device, caller, RunError)
                if value.numel() != 1 or value.dtype != torch.float32:
                    raise RunError(f"{caller} has {value.numel()} entries of {value.dtype}: pass one float32.")
                setattr(params, pointer, tensor_memory.address(value, caller, RunError))
            elif value is not None and not (number := _number(value, caller)) > 0:
                raise RunError(f"{caller}={number}: pass a positive number.")
            elif value is not None:
                setattr(params, name, number)
        if scales.ckv_of_tokens is not None:
            array = checks.tensor(scales.ckv_of_tokens, "ckv_scale_arr", RunError)
            columns = self.ckv.shape[1]
            if columns % 128:
                raise RunError(f"ckv_scale_arr with {columns} columns: it needs a multiple of 128; pass ckv_scale.")
            wanted = (*pages, columns // 128)
            checks.same_device(array, self.ckv.device, "ckv_scale_arr", RunError)
            if array.shape != wanted or array.dtype != torch.float32 or not array.is_contiguous():
                raise RunError(
                    f"ckv_scale_arr has shape {tuple(array.shape)} and dtype {array.dtype}: "
                    f"pass contiguous float32 of {wanted}, which is written."
                )
            params.k_scale, params.k_scale_stride = tensor_memory.address(array, "ckv_scale_arr", RunError), 1
        return scales

    # ---------------------------------------------------------------- on the CPU

    def _write_here(self, places: AppendPlaces, scales: Scales, k: kv_view.View) -> None:
        given = (places.batch_indices >= 0).nonzero().squeeze(1)
        requests, positions = places.batch_indices[given], places.positions[given]
        check_places(requests, positions, places.kv_indices, places.kv_indptr, k)
        first = places.kv_indptr[:-1][requests].long()
        pages = places.kv_indices[first + torch.div(positions, k.page_size, rounding_mode="floor")].long()
        slots = (positions % k.page_size).long()
        rows = self.ckv[given].float()
        if self.kpe is not None:
            rows = torch.cat([rows, self.kpe[given].float()], 1)
        if self.format == latent_formats.SCALED:
            self._write_scaled(rows, pages, slots, scales)
        else:
            self._write_packed(rows, pages, slots)

    def _write_scaled(self, rows: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor, scales: Scales) -> None:
        columns = self.ckv.shape[1]
        shared, rest = rows[:, :columns], rows[:, columns:]
        if scales.ckv_of_tokens is None:
            stored = _quantised(shared / (1.0 if scales.ckv is None else _number(scales.ckv, "ckv_scale")))
        else:
            stored, found = _by_blocks(shared, 128)
            scales.ckv_of_tokens[pages, slots] = found
        self.caches[0].view(torch.uint8)[pages, slots] = stored
        if rest.shape[1]:
            scale = 1.0 if scales.kpe is None else _number(scales.kpe, "kpe_scale")
            self.caches[1].view(torch.uint8)[pages, slots] = _quantised(rest / scale)

    def _write_packed(self, rows: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
        memory, row_format = self.caches[0].view(torch.uint8), latent_formats.PACKED[self.format]
        stored, scales = _by_blocks(rows[:, : row_format.quantised], row_format.scale_columns)
        rest = _bytes_of(rows[:, row_format.quantised :])
        if self.format == "deepseek_v32":
            memory[pages, slots] = torch.cat([stored, scales.view(torch.uint8), rest], 1)
        elif self.format == "deepseek_v4":
            columns = torch.cat([stored, rest], 1)
            size, width = memory.shape[1], columns.shape[1]  # tokens of a page; bytes of a token without its scales
            flat = memory.as_strided((len(memory), size * row_format.row_bytes), (memory.stride(0), 1))
            flat[pages[:, None], slots[:, None] * width + torch.arange(width, device="cpu")] = columns
            first_scale = size * width + slots[:, None] * (row_format.row_bytes - width)
            exponents = (scales.log2() + _EXPONENT_BIAS).to(torch.uint8)
            flat[pages[:, None], first_scale + torch.arange(scales.shape[1], device="cpu")] = exponents
        else:
            raise AssertionError(f"rows of the format {self.format} are not written on the CPU")


def of_no_columns(part: Any) -> Any:
    """None for a tail without columns."""
    return None if isinstance(part, torch.Tensor) and part.dim() > 1 and part.shape[-1] == 0 else part


def latent_write(given: tuple[Any, Any], caches: tuple[Any, Any], scales: Scales, kv_row_format: Any) -> LatentWrite:
    """Checks new rows, their tails or None, and the caches that get them."""
    rows = [("append_ckv", given[0])] + ([] if given[1] is None else [("append_kpe", given[1])])
    written = [("ckv_cache", caches[0])] + ([] if caches[1] is None else [("kpe_cache", caches[1])])
    operators.check_plain(*rows, *written)
    nnz, device = len(checks.tensor(given[0], "append_ckv", RunError)), given[0].device
    for name, tensor in rows:
        if tensor.dim() != 2 or len(tensor) != nnz or tensor.dtype not in WIDE or tensor.dtype != given[0].dtype:
            raise RunError(
                f"{name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}: "
                "pass [nnz, dim] of float16, bfloat16 or float32, equal for both parts."
            )
        checks.same_device(tensor, device, name, RunError)
        checks.dense_last(tensor, name, RunError)
    dims = (given[0].shape[1], 0 if given[1] is None else given[1].shape[1])
    row_format, _ = check_format(kv_row_format, DType.FLOAT8_E4M3, dims)
    packed = latent_formats.packed(row_format)
    columns = dims if packed is None else (packed.row_bytes, 0)
    if packed is not None:
        checks.refuse_all(ckv_scale=scales.ckv, ckv_scale_arr=scales.ckv_of_tokens, kpe_scale=scales.kpe)
    if scales.ckv is not None and scales.ckv_of_tokens is not None:
        raise RunError("ckv_scale and ckv_scale_arr are both given: pass one of them.")
    if [size for size in columns if size] != [tensor.shape[-1] for _, tensor in written]:
        found = " and ".join(f"{name} of shape {tuple(tensor.shape)}" for name, tensor in written)
        raise RunError(
            f"{found}: pass [pages, page_size, columns] with {' and '.join(str(n) for n in columns if n)} columns."
        )
    types = (torch.float8_e4m3fn,) if packed is None else (torch.float8_e4m3fn, torch.uint8, torch.int8)
    for name, tensor in written:
        checks.same_device(tensor, device, name, RunError)
        tensor_memory.check_written(tensor, name, RunError)
        if tensor.dim() != 3 or tensor.dtype not in types:
            raise RunError(f"{name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}: pass 3-D {types[0]}.")
    if len(written) == 2 and caches[0].numel() and caches[0].data_ptr() == caches[1].data_ptr():
        raise RunError("ckv_cache begins where kpe_cache does, and both are written: pass two caches.")
    return LatentWrite(given[0], given[1], tuple(tensor for _, tensor in written), row_format)


def _number(value: Any, name: str) -> float:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    return checks.real(name, value, error=RunError)


def _quantised(rows: torch.Tensor) -> torch.Tensor:
    """As bytes of e4m3; numbers that are too large become the largest one."""
    return rows.clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)


def _by_blocks(rows: torch.Tensor, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of e4m3, and the scale of each block of columns: the least power of two by which it fits."""
    blocks = rows.reshape(len(rows), -1, columns)
    mantissa, exponent = torch.frexp(blocks.abs().amax(2) / _LARGEST)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(min=-126)
    exponent[mantissa == 0] = -126
    scales = torch.ldexp(torch.ones(exponent.shape, device="cpu"), exponent)
    return _quantised(blocks / scales[..., None]).flatten(1), scales


def _bytes_of(rows: torch.Tensor) -> torch.Tensor:
    return rows.bfloat16().contiguous().view(torch.uint8)
