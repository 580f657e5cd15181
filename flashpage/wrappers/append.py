"""Functions on paged KV caches other than attention: appending tokens, and the index arithmetic for it."""

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from ..base import checks, kv_view, tensor_memory
from ..base.errors import FlashpageError, RunError
from ..kernels import kv_formats
from ..plan.lengths import batch_of
from . import operators
from .append_places import AppendPlaces, as_index, checked_places
from .latent_append import Scales, latent_write, of_no_columns, refuse_to_quantise
from .quantised_append import QuantisedWrite


def append_paged_kv_cache(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: Any,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    kv_layout: str = "NHD",
    *,
    kv_format: Any = None,
    kv_cache_sf: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
) -> None:
    """Writes keys and values of new tokens to their pages, in one launch.

    Args:
        append_key, append_value: [nnz, num_kv_heads, head_dim], of the cache's type, last dimension contiguous. If
            kv_format is given: float16, bfloat16 or float32.
        batch_indices, positions: [nnz], the request of each token and its position there (get_batch_indices_positions).
        paged_kv_cache: as in the wrappers' run; written.
        kv_indices, kv_indptr: page numbers, and where each request's begin, [batch + 1]. A card's are not checked: a
            page beyond the cache is an illegal address.
        kv_last_page_len: [batch]; only its length is checked, as positions determine the rest.
        kv_layout: "NHD" or "HND".
        kv_format: how the cache stores rows, as plan takes it: rows are quantised to it as they are written.
        kv_cache_sf: with kv_format, the scales of the cache's rows, as run takes them; written.
        k_scale, v_scale: with kv_format, by which elements are divided before (None: 1).
    """
    checks.layout(kv_layout, RunError)
    if kv_format is not None:
        write = QuantisedWrite((append_key, append_value), paged_kv_cache, kv_cache_sf, kv_format, kv_layout)
        places = AppendPlaces(
            batch_indices=batch_indices, positions=positions, kv_indices=kv_indices, kv_indptr=kv_indptr
        )
        write.write(checked_places(places, kv_last_page_len, write.nnz, write.device), k_scale, v_scale)
        return
    if not (kv_cache_sf is k_scale is v_scale is None):
        raise RunError("kv_cache_sf, k_scale and v_scale need kv_format: pass it, or leave them None.")
    cache = list(paged_kv_cache) if isinstance(paged_kv_cache, (tuple, list)) else [paged_kv_cache]
    caches = [("paged_kv_cache", part) for part in cache]
    operators.check_plain(("append_key", append_key), ("append_value", append_value), *caches)
    for name, tensor in (("append_key", append_key), ("append_value", append_value)):
        checks.tensor(tensor, name, RunError)
        if tensor.dim() != 3:
            raise RunError(f"{name} has shape {tuple(tensor.shape)}: pass [nnz, num_kv_heads, head_dim].")
        checks.dense_last(tensor, name, RunError)
    views = kv_view.paged_views(tuple(cache) if len(cache) == 2 else cache[0], kv_layout)
    nnz, device = append_key.shape[0], append_key.device
    for name, tensor, view in (("append_key", append_key, views[0]), ("append_value", append_value, views[1])):
        if tensor.shape != (nnz, view.num_heads, view.head_dim) or tensor.dtype != cache[0].dtype:
            name_of_format = kv_formats.stored_as(cache[0].dtype)
            quantised = f"; to quantise as it is written pass kv_format, such as {name_of_format!r}, and kv_cache_sf"
            raise RunError(
                f"{name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}. "
                f"paged_kv_cache takes {(nnz, view.num_heads, view.head_dim)} of {cache[0].dtype}, with the rows of "
                f"append_key: convert it first{quantised if name_of_format else ''}."
            )
    for tensor in cache:
        tensor_memory.check_written(tensor, "paged_kv_cache", RunError)
    if len(cache) == 2 and cache[0].numel() and cache[0].data_ptr() == cache[1].data_ptr():
        raise RunError("paged_kv_cache[0] begins where paged_kv_cache[1] does, and both are written: pass two caches.")
    for name, tensor in (("append_value", append_value), *(("paged_kv_cache", t) for t in cache)):
        checks.same_device(tensor, device, name, RunError)
        if tensor.dtype != cache[0].dtype:
            raise RunError(
                f"{name} has dtype {tensor.dtype} but another part of the cache has {cache[0].dtype}: pass equal types."
            )
    places = AppendPlaces(batch_indices=batch_indices, positions=positions, kv_indices=kv_indices, kv_indptr=kv_indptr)
    places = checked_places(places, kv_last_page_len, nnz, device)
    lists = (places.batch_indices, places.positions, places.kv_indices, places.kv_indptr)
    operators.call("append_paged_kv_cache", append_key, append_value, *lists, cache, kv_layout)


def nvfp4_quantize_append_paged_kv_cache(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: Any,
    kv_cache_sf: Any,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    k_scale: Any,
    v_scale: Any,
    kv_layout: str = "NHD",
) -> None:
    """append_paged_kv_cache(kv_format="nvfp4") under FlashInfer's name.

    Args:
        append_key, append_value: [nnz, num_kv_heads, head_dim] of 16 or 32 bits.
        paged_kv_cache: uint8, as in the wrappers' run, with head_dim / 2 columns; written.
        kv_cache_sf: float8_e4m3fn, with head_dim / 16 columns; written.
        k_scale, v_scale: positive numbers, the scales of the tensors: an element is a number times its group's scale
            times this.

    The other arguments are those of append_paged_kv_cache.
    """
    checks.layout(kv_layout, RunError)
    write = QuantisedWrite((append_key, append_value), paged_kv_cache, kv_cache_sf, "nvfp4", kv_layout)
    places = AppendPlaces(batch_indices=batch_indices, positions=positions, kv_indices=kv_indices, kv_indptr=kv_indptr)
    write.write(checked_places(places, kv_last_page_len, write.nnz, write.device), k_scale, v_scale)


def nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    slot_mapping: torch.Tensor,
    paged_kv_cache: Any,
    kv_cache_sf: Any,
    k_scale: Any,
    v_scale: Any,
    kv_layout: str = "NHD",
    nvfp4_4over6: Any = None,
    *,
    kv_format: Any = "nvfp4",
) -> None:
    """Writes keys and values of new tokens, quantised, to slots of the cache.

    Args:
        append_key, append_value: [rows, num_kv_heads, head_dim] of 16 or 32 bits; rows past the end of slot_mapping are
            ignored.
        slot_mapping: [nnz] int32 or int64, page * page_size + token in the page; negative: the row is skipped.
        k_scale, v_scale: positive numbers, or float32 tensors of one entry.
        nvfp4_4over6: another choice of scales, and refused.
        kv_format: another format than FlashInfer's, as append_paged_kv_cache takes it.

    The other arguments are those of nvfp4_quantize_append_paged_kv_cache.
    """
    checks.refuse_all(nvfp4_4over6=nvfp4_4over6)
    checks.layout(kv_layout, RunError)
    write = QuantisedWrite((append_key, append_value), paged_kv_cache, kv_cache_sf, kv_format, kv_layout)
    slots = as_index(slot_mapping, "slot_mapping", None, write.device)
    if len(slots) > write.nnz:
        raise RunError(
            f"slot_mapping has {len(slots)} entries but append_key has {write.nnz} rows: pass a slot for each row."
        )
    write.waits_for_scales = True  # as FlashInfer
    write.check_slots(slots)
    write.write(slots, k_scale, v_scale)


def append_paged_mla_kv_cache(
    append_ckv: torch.Tensor,
    append_kpe: torch.Tensor | None,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor | None,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    *,
    ckv_scale: Any = None,
    ckv_scale_arr: torch.Tensor | None = None,
    kpe_scale: Any = None,
    kv_row_format: str | None = None,
) -> None:
    """Writes latent rows and rotated keys of new tokens to their pages, in one launch.

    Args:
        append_ckv, append_kpe: [nnz, ckv_dim] and [nnz, kpe_dim], last dimension contiguous, of the caches' type, or
            of 16 or 32 bits for caches in fp8, which they are quantised to.
        ckv_cache, kpe_cache: [pages, page_size, ckv_dim] and [pages, page_size, kpe_dim], any strides; written. Rows
            without rotated keys: append_kpe and kpe_cache are None, or have no columns.
        ckv_scale, kpe_scale: caches of float8_e4m3fn: elements are divided by them (None: 1).
        ckv_scale_arr: in place of ckv_scale, float32 [pages, page_size, ckv_dim / 128], written: each 128 columns of a
            token get the least power of two by which they fit.
        kv_row_format: "deepseek_v32" or "deepseek_v4": ckv_cache is the cache of bytes, and kpe_cache None. For V4
            append_ckv has all 512 columns, and append_kpe is None.

    The other arguments are those of append_paged_kv_cache.
    """
    append_kpe, kpe_cache = of_no_columns(append_kpe), of_no_columns(kpe_cache)
    is_e4m3 = isinstance(ckv_cache, torch.Tensor) and ckv_cache.dtype is torch.float8_e4m3fn
    is_given = isinstance(append_ckv, torch.Tensor) and append_ckv.dtype is torch.float8_e4m3fn
    if kv_row_format is not None or (is_e4m3 and not is_given):
        scales = Scales(ckv_scale, ckv_scale_arr, kpe_scale)
        write = latent_write((append_ckv, append_kpe), (ckv_cache, kpe_cache), scales, kv_row_format)
        lists = AppendPlaces(
            batch_indices=batch_indices, positions=positions, kv_indices=kv_indices, kv_indptr=kv_indptr
        )
        write.write(checked_places(lists, kv_last_page_len, len(write.ckv), write.ckv.device), scales)
        torch.autograd.graph.increment_version(write.caches)
        return
    checks.refuse_all(ckv_scale=ckv_scale, ckv_scale_arr=ckv_scale_arr, kpe_scale=kpe_scale)
    refuse_to_quantise("ckv_cache", ckv_cache, append_ckv)
    refuse_to_quantise("kpe_cache", kpe_cache, append_kpe)
    if append_kpe is None and kpe_cache is None:
        append_kpe, kpe_cache = (
            checks.tensor(t, n, RunError)[..., :0] for n, t in (("append_ckv", append_ckv), ("ckv_cache", ckv_cache))
        )
    append_kpe = checks.tensor(append_kpe, "append_kpe", RunError)
    kpe_cache = checks.tensor(kpe_cache, "kpe_cache", RunError)
    caches_given = (("ckv_cache", ckv_cache), ("kpe_cache", kpe_cache))
    for dims, shape, given in (
        (2, "[nnz, dim]", (("append_ckv", append_ckv), ("append_kpe", append_kpe))),
        (3, "[pages, page_size, dim]", caches_given),
    ):
        for name, tensor in given:
            if checks.tensor(tensor, name, RunError).dim() != dims:
                raise RunError(f"{name} has shape {tuple(tensor.shape)}: pass {shape}.")
    cache = (ckv_cache.unsqueeze(2), kpe_cache.unsqueeze(2))
    places = (batch_indices, positions, cache, kv_indices, kv_indptr, kv_last_page_len)
    try:
        append_paged_kv_cache(append_ckv.unsqueeze(1), append_kpe.unsqueeze(1), *places)
    except FlashpageError as error:
        names = {"paged_kv_cache": "ckv_cache and kpe_cache", "append_key": "append_ckv", "append_value": "append_kpe"}
        error.use_names(names | {"paged_kv_cache[0]": "ckv_cache", "paged_kv_cache[1]": "kpe_cache"})
        raise


def get_batch_indices_positions(
    append_indptr: torch.Tensor,
    seq_lens: torch.Tensor,
    nnz: int,
    batch_indices: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The request of each new token, and its position there.

    Args:
        append_indptr: [batch + 1], where each request's new tokens begin.
        seq_lens: [batch], tokens of each request, the new ones included.
        nnz: entries, of all new tokens and of others: those before append_indptr[0] and from append_indptr[-1] on get
            -1, which append_paged_kv_cache skips.
        batch_indices, positions: [nnz] int32, written in place; None: allocated.

    Returns:
        batch_indices and positions, int32, [nnz].
    """
    batch = batch_of(append_indptr, "append_indptr")
    if checks.tensor(seq_lens, "seq_lens", RunError).shape != (batch,):
        raise RunError(
            f"seq_lens has shape {tuple(seq_lens.shape)} but append_indptr has {batch} requests: "
            f"pass one length for each, [{batch}]."
        )
    checks.same_device(seq_lens, append_indptr.device, "seq_lens", RunError)
    for name, tensor in (("append_indptr", append_indptr), ("seq_lens", seq_lens)):
        if tensor.dtype not in (torch.int32, torch.int64):
            raise RunError(f"{name} has dtype {tensor.dtype}: pass int32 or int64.")
    if not is_dynamo_compiling():
        checks.whole("nnz", nnz, 0, error=RunError)
        if append_indptr.is_cpu:
            _check_indptr(append_indptr)
    token = torch.arange(nnz, device=append_indptr.device, dtype=append_indptr.dtype)
    request = torch.searchsorted(append_indptr[1:].contiguous(), token, right=True)
    if batch > 0:
        inside = (token >= append_indptr[0]) & (request < batch)
        request.clamp_(max=batch - 1)
        # A request's last new token is at its last position.
        position = token - append_indptr[1:][request] + seq_lens[request]
        request, position = torch.where(inside, request, -1), torch.where(inside, position, -1)
    else:
        request, position = torch.full_like(token, -1), torch.full_like(token, -1)
    return _into(batch_indices, request, "batch_indices"), _into(positions, position, "positions")


def get_seq_lens(kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, page_size: int) -> torch.Tensor:
    """Tokens of each request, [batch], from its pages: kv_indptr [batch + 1] and kv_last_page_len [batch]."""
    batch = batch_of(kv_indptr, "kv_indptr")
    if checks.tensor(kv_last_page_len, "kv_last_page_len", RunError).shape != (batch,):
        raise RunError(
            f"kv_last_page_len has shape {tuple(kv_last_page_len.shape)} but kv_indptr has {batch} requests: "
            f"pass one entry for each, [{batch}]."
        )
    checks.same_device(kv_last_page_len, kv_indptr.device, "kv_last_page_len", RunError)
    for name, tensor in (("kv_indptr", kv_indptr), ("kv_last_page_len", kv_last_page_len)):
        if tensor.dim() != 1 or tensor.dtype not in (torch.int32, torch.int64):
            raise RunError(f"{name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}: pass int32 or int64.")
    page_size = checks.whole("page_size", page_size, 1, error=RunError)
    pages = kv_indptr[1:] - kv_indptr[:-1]
    return torch.where(pages > 0, (pages - 1) * page_size + kv_last_page_len, 0)


def _check_indptr(append_indptr: torch.Tensor) -> None:
    """Checks numbers on the host only: a card would have to be waited for."""
    falls = (append_indptr.diff() < 0).nonzero()
    if len(falls):
        i = int(falls[0]) + 1
        found = f"append_indptr[{i}]={int(append_indptr[i])}"
        raise RunError(f"{found} is smaller than the entry before it: an indptr never decreases.")


def _into(given: torch.Tensor | None, values: torch.Tensor, name: str) -> torch.Tensor:
    if given is None:
        return values.to(torch.int32)
    if checks.tensor(given, name, RunError).shape != values.shape or given.dtype != torch.int32:
        raise RunError(
            f"{name} has shape {tuple(given.shape)} and dtype {given.dtype}: "
            f"pass int32 of {tuple(values.shape)}, or None."
        )
    return given.copy_(values)
