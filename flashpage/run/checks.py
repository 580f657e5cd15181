"""Tensors of a run: the signature that identifies them, and whether they fit the plan."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..base import checks, kv_view, tensor_memory
from ..base.dtypes import DType
from ..base.errors import RunError
from ..base.kv_view import Cache
from ..base.memory import is_capturing
from ..kernels import kv_formats
from ..kernels.latent_formats import LatentRowFormat
from ..kernels.options import Options


class Tensors(NamedTuple):
    """The tensors of a run. If K and V are two tensors, `cache` is a tuple; in formats with scales it is (K, V, scales
    of K, scales of V), and a side without scales has None."""

    q: torch.Tensor
    cache: Cache
    out: torch.Tensor | None
    lse: torch.Tensor | None


Scales = tuple[Any, ...]  # of q, K and V, and where it is given, in a fourth place, of the output
NO_SCALES: Scales = (None, None, None)


def scales_of(q_scale: Any, k_scale: Any, v_scale: Any, o_scale: Any) -> Scales:
    if o_scale is not None:
        return q_scale, k_scale, v_scale, o_scale
    if q_scale is None and k_scale is None and v_scale is None:
        return NO_SCALES  # compared by identity
    return q_scale, k_scale, v_scale


def as_cache(paged_kv_cache: Any) -> Any:
    """The cache with pairs as tuples."""
    return tuple(paged_kv_cache) if paged_kv_cache.__class__ is list else paged_kv_cache


def signature_of(
    values: tuple[Any, ...], q: torch.Tensor, cache: Any, out: torch.Tensor | None, lse: torch.Tensor | None
) -> tuple[Any, ...]:
    """Everything that decides how a run is bound, unchecked: a comparison of tuples, once a layer."""
    cache_parts: tuple[Any, ...]
    if cache.__class__ is tuple and len(cache) == 2:
        k, v = cache
        cache_parts = (k.shape, k.stride(), k.dtype, k.device, v.shape, v.stride(), v.dtype, v.device)
    elif cache.__class__ is tuple:
        cache_parts = tuple(
            part if part is None else (part.shape, part.stride(), part.dtype, part.device) for part in cache
        )
        cache_parts += starts_of(cache)
    else:
        cache_parts = (cache.shape, cache.stride(), cache.dtype, cache.device)
    return (
        values,
        q.shape,
        q.stride(),
        q.dtype,
        q.device,
        cache_parts,
        None if out is None else (out.shape, out.stride(), out.dtype, out.device),
        None if lse is None else (lse.shape, lse.stride(), lse.dtype, lse.device),
    )


def flat(tensors: Tensors) -> tuple[Any, ...]:
    cache = tensors.cache if isinstance(tensors.cache, tuple) else (tensors.cache,)
    return (tensors.q, *cache, tensors.out)


def geometry(tensor: torch.Tensor | None) -> Any:
    """The part of the signature that structs are bound to: all but the number of rows or pages."""
    return None if tensor is None else (tensor.shape[1:], tensor.shape[0] > 1, tensor.stride(), tensor.dtype)


def wait_for(tensors: Tensors) -> Tensors:
    """These tensors, with pending collectives waited for."""
    q, cache, *outputs = tensors
    waited = tensor_memory.waited
    found: Any = tuple(map(waited, cache)) if isinstance(cache, tuple) else waited(cache)
    return Tensors(waited(q), found, *map(waited, outputs))


def check_plain(tensors: Tensors) -> None:
    """Raises for the first argument that is no tensor, or whose memory kernels cannot use."""
    q, cache, out, lse = tensors
    if isinstance(cache, tuple) and len(cache) not in (2, 4):
        raise RunError(f"paged_kv_cache has {len(cache)} tensors: pass one tensor, or the pair (k_cache, v_cache).")
    read = {"q": q, **parts_of(cache)}
    written = {name: value for name, value in (("out", out), ("lse", lse)) if value is not None}
    for name, value in (read | written).items():
        tensor_memory.address(checks.tensor(value, name, RunError), name, RunError)
    for name, value in written.items():
        for other_name, other in read.items():
            tensor_memory.check_apart(value, name, other, other_name, RunError)
    if out is not None and lse is not None:
        tensor_memory.check_apart(lse, "lse", out, "out", RunError)


def check_run_tensors(tensors: Tensors, options: Options, device: torch.device) -> torch.Tensor:
    """Checks q and the devices of all tensors; returns q."""
    q, parts = tensors.q, parts_of(tensors.cache)
    for name, tensor in (("q", q), *parts.items()):
        checks.same_device(tensor, device, name, RunError)
    if q.dim() != 3 or q.shape[2] != options.head_dim_qk:
        raise RunError(
            f"q has shape {tuple(q.shape)} but the plan is for [rows, {options.num_q_heads}, {options.head_dim_qk}]: "
            "pass q as [rows, heads, head_dim]."
        )
    if q.dtype != options.q_dtype.torch:
        raise RunError(
            f"q has dtype {q.dtype} but the plan is for {options.q_dtype.torch}: {_fix('q_data_type', q.dtype)}."
        )
    if options.has_formats:
        _check_formats(tensors.cache, options)
        return q
    if has_scales(tensors.cache):
        raise RunError(
            f"kv_cache_sf is given but the plan is for {options.kv_dtype.torch}, which has no scales of its own: pass "
            "kv_data_type=torch.uint8 (nvfp4) or a kv_format to plan, or leave kv_cache_sf None."
        )
    for name, tensor in parts.items():
        if tensor.dtype != options.kv_dtype.torch:
            packed = options.latent_row_format
            if packed is not None:
                raise RunError(
                    f"{name} has dtype {tensor.dtype} but the plan is for rows of {packed.row_bytes} bytes: pass them "
                    "as uint8."
                )
            raise RunError(
                f"{name} has dtype {tensor.dtype} but the plan is for {options.kv_dtype.torch}: "
                f"{_fix('kv_data_type', tensor.dtype)}."
            )
    return q


def _fix(argument: str, dtype: torch.dtype) -> str:
    """Says how a tensor of another type than the plan's can be passed."""
    name = str(dtype).removeprefix("torch.")
    if name in (known := [each.value for each in DType.elements()]):
        return f"pass {argument}={dtype} to plan"
    stored = kv_formats.stored_as(dtype) if argument == "kv_data_type" else ""
    return f"pass kv_format={stored!r} to plan, and kv_cache_sf" if stored else f"pass one of {', '.join(known)}"


def parts_of(cache: Any) -> dict[str, torch.Tensor]:
    """The tensors of a cache by the caller's names."""
    if not isinstance(cache, tuple):
        return {"paged_kv_cache": cache}
    names = ("k", "v", "kv_cache_sf[0]", "kv_cache_sf[1]")
    return {name: part for name, part in zip(names, cache, strict=False) if part is not None or len(name) == 1}


def cache_of(parts: list[torch.Tensor], options: Options) -> Any:
    """The cache whose tensors these are, without the None of sides that have no scales."""
    if len(parts) == 3:
        has_first = not options.formats[0].is_plain
        return (*parts[:2], parts[2] if has_first else None, None if has_first else parts[2])
    return parts[0] if len(parts) == 1 else tuple(parts)


def has_scales(cache: Any) -> bool:
    return isinstance(cache, tuple) and len(cache) == 4


def starts_of(cache: Any) -> tuple[int, int]:
    """Bytes from a multiple of 16 to the start of K and of V, which decide the kernel that reads them where scales may
    follow their rows; 0 elsewhere."""
    return (cache[0].data_ptr() % 16, cache[1].data_ptr() % 16) if has_scales(cache) else (0, 0)


def _check_formats(cache: Any, options: Options) -> None:
    """Checks element types of rows and scales, and that there are scales where a format has them."""
    is_pair = isinstance(cache, tuple)
    halves = cache[:2] if is_pair else (cache, cache)
    scales = cache[2:] if has_scales(cache) else (None, None)
    for i, (side, half, scale) in enumerate(zip(options.formats, halves, scales, strict=True)):
        name = ("k", "v")[i] if is_pair else "paged_kv_cache"
        if _name_of(half) not in side.stored:
            raise RunError(
                f"{name} has dtype {half.dtype} but the plan's kv_format {side.name} is stored as {side.stored[0]}: "
                "pass such a tensor, or plan with another kv_format."
            )
        if side.is_plain and scale is not None:
            raise RunError(f"kv_cache_sf[{i}] is given but {side.name} has no scales of its own: pass None there.")
        if not side.is_plain and scale is None:
            raise RunError(
                f"kv_cache_sf has no scales of {'KV'[i]} but the plan's kv_format is {side.name}: pass "
                f"kv_cache_sf=(k_sf, v_sf), of {side.scales[0]}."
            )
        if scale is not None and _name_of(scale) not in side.scales:
            raise RunError(
                f"kv_cache_sf[{i}] has dtype {scale.dtype} but {side.name} has scales of {side.scales[0]}: pass those."
            )


def _name_of(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def views_of(cache: Cache, options: Options, kv_layout: str) -> tuple[kv_view.View, kv_view.View]:
    """The two parts of a cache, K and V or those of latent rows, by strides."""
    if options.is_latent:
        views = kv_view.latent_views(cache, options.half_dims[0])
        return rows_of_pages(views, options.latent_row_format, "kv_cache")
    if options.is_paged:
        return kv_view.paged_views(cache[:2] if has_scales(cache) else cache, kv_layout)
    k, v, *_ = cache
    return kv_view.ragged_view(k, kv_layout, "k"), kv_view.ragged_view(v, kv_layout, "v")


def scale_views(
    cache: Any, views: tuple[kv_view.View, kv_view.View], options: Options, kv_layout: str
) -> tuple[kv_view.View | None, kv_view.View | None]:
    """The scales of K and V by strides in bytes; None where a side has none."""
    if not has_scales(cache):
        return None, None
    found: list[kv_view.View | None] = []
    dims = (options.head_dim_qk, options.head_dim_vo)
    for i, (side, rows, dim) in enumerate(zip(options.formats, views, dims, strict=True)):
        if side.is_plain:
            found.append(None)
            continue
        name, tensor = f"kv_cache_sf[{i}]", cache[2 + i]
        view = kv_view.scales_view(tensor, cache[i].dim(), kv_layout, options.is_paged, name)
        if view[:4] != (*rows[:3], side.row_scales(dim)):
            raise RunError(
                f"{name} has shape {tuple(tensor.shape)}, which does not fit {'kv'[i]} of shape "
                f"{tuple(cache[i].shape)}: pass {side.scales_shape(cache[i].shape, dim)}."
            )
        found.append(kv_view.in_bytes(view, side.scale_size))
    return found[0], found[1]


def rows_of_pages(
    views: tuple[kv_view.View, kv_view.View], packed: LatentRowFormat | None, name: str
) -> tuple[kv_view.View, kv_view.View]:
    """Views of a cache of that name without the distance of tokens, if the format of its rows has another one."""
    rows = views[0]
    if packed is None or not packed.by_page:
        return views
    if rows.page_size > 1 and rows.token_stride != packed.row_bytes:
        raise RunError(f"{name} has tokens {rows.token_stride} bytes apart: pass pages of {packed.row_bytes} a token.")
    return rows._replace(token_stride=0), views[1]._replace(token_stride=0)


def check_cache(
    cache: Cache, options: Options, kv_layout: str, max_page: int, kv_end: int, names: tuple[str, str]
) -> int:
    """Checks K and V against the plan, whose page numbers reach `max_page` (ragged: whose tokens end at `kv_end`);
    returns their heads. `names`: the caller's for indptr and page numbers."""
    k, v = views_of(cache, options, kv_layout)
    if options.is_paged:
        name = "ckv_cache" if options.is_latent else "paged_kv_cache"
        if k.page_size != options.page_size:
            layout = "" if options.is_latent else f" ({kv_layout})"
            raise RunError(
                f"{name} has pages of {k.page_size} tokens{layout} but the plan has "
                f"page_size={options.page_size}: pass page_size={k.page_size} to plan."
            )
        if options.is_selected and k.num_pages == 0:
            raise RunError(f"{name} has 0 pages: pass a cache of at least one.")
        if max_page >= k.num_pages:
            raise RunError(
                f"{name} has {k.num_pages} pages but the plan's {names[1]} reach {max_page}. "
                "Pass the cache that they index, or plan with its own."
            )
    else:
        if k.num_pages != v.num_pages or k.num_heads != v.num_heads:
            raise RunError(
                f"k has shape {tuple(cache[0].shape)} and v {tuple(cache[1].shape)}: "
                "they must have the same tokens and heads."
            )
        if k.num_pages < kv_end:
            raise RunError(f"k has {k.num_pages} tokens but the plan's {names[0]} ends at {kv_end}: pass all of them.")
    if options.is_latent:
        _check_columns(isinstance(cache, tuple), (k, v), options)
    cache_name = "paged_kv_cache's " if options.kv_source == "paged" else ""
    for i, (name, view, dim) in enumerate(zip(options.halves, (k, v), options.half_dims, strict=True)):
        if view.head_dim != dim:
            side, head_dim = options.formats[i], (options.head_dim_qk, options.head_dim_vo)[i]
            if options.has_formats and dim != head_dim:
                raise RunError(
                    f"{cache_name}{name} has rows of {view.head_dim} {side.stored[0]} but head_dim {head_dim} in "
                    f"{side.name} takes {dim} (two numbers a byte): pass packed rows."
                )
            raise RunError(
                f"{cache_name}{name} has a head dimension of {view.head_dim} but the plan is for {dim}: plan with it."
            )
    if options.has_formats:
        scale_views(cache, (k, v), options, kv_layout)
    return k.num_heads


def _check_columns(is_pair: bool, views: tuple[kv_view.View, kv_view.View], options: Options) -> None:
    """The columns, or the bytes, of latent rows."""
    rows = [
        (name, view.head_dim, dim) for name, view, dim in zip(options.halves, views, options.half_dims, strict=True)
    ]
    if not is_pair:
        rows = [("kv_cache", rows[0][1] + rows[1][1], rows[0][2] + rows[1][2])]
    unit = "columns" if options.latent_row_format is None else "bytes"
    for name, columns, planned in rows:
        if columns != planned:
            raise RunError(
                f"{name} has rows of {columns} {unit} but the plan is for {planned}: plan with its head_dim_ckv, "
                "head_dim_kpe and kv_row_format."
            )


def check_run_heads(num_q_heads: int, num_kv_heads: int, options: Options) -> tuple[int, int]:
    """A plan for more heads than a layer has serves it, through a derived plan; a plan for fewer heads does not."""
    if options.is_latent and num_q_heads > options.num_q_heads:
        raise RunError(
            f"q has {num_q_heads} heads but the plan is for num_heads={options.num_q_heads}: "
            "plan with the largest head count of all layers."
        )
    if num_q_heads > options.num_q_heads or num_kv_heads > options.num_kv_heads:
        raise RunError(
            f"q has {num_q_heads} heads and the cache {num_kv_heads} but the plan is for "
            f"num_qo_heads={options.num_q_heads}, num_kv_heads={options.num_kv_heads}: "
            "plan with the largest head counts of all layers."
        )
    if num_q_heads < 1:
        raise RunError(f"q has 0 heads but the plan is for {options.num_q_heads}: pass q as [rows, heads, head_dim].")
    if num_kv_heads < 1 or num_q_heads % num_kv_heads:
        raise RunError(f"q has {num_q_heads} heads and the cache {num_kv_heads}: pass a multiple of the cache's heads.")
    return num_q_heads, num_kv_heads


def check_output(
    found: torch.Tensor, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    checks.same_device(found, device, name, RunError)
    if tuple(found.shape) != shape or found.dtype != dtype:
        raise RunError(
            f"{name} has shape {tuple(found.shape)} and dtype {found.dtype} but this run writes {shape} of {dtype}: "
            f"allocate it so, or leave {name}=None."
        )
    if name == "lse" and not found.is_contiguous():
        raise RunError(f"lse has strides {tuple(found.stride())}: pass a contiguous tensor.")


def has_pages(batch_indices: torch.Tensor, kv_indices: torch.Tensor) -> bool:
    """Whether there are page numbers; without any, tokens are refused, unless they are padding or a graph captures."""
    if kv_indices.numel():
        return True
    if not is_capturing(kv_indices.device) and bool((batch_indices >= 0).any()):
        raise RunError("kv_indices is empty but there are tokens to write: pass the page numbers of each request.")
    return False


def check_places(
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    k: kv_view.View,
) -> None:
    """Refuses places outside the pages on the CPU. On a card the caller must ensure that device tensors fit."""
    batch = kv_indptr.shape[0] - 1
    requests, places = batch_indices, positions
    if bool((requests >= batch).any()):
        raise RunError(
            f"batch_indices reaches {int(requests.max())} but the batch has {batch} requests: number them from 0."
        )
    first, end = kv_indptr[:-1][requests].long(), kv_indptr[1:][requests]
    pages = first + torch.div(places, k.page_size, rounding_mode="floor")
    wrong = (places < 0) | (first < 0) | (pages >= end) | (pages >= kv_indices.shape[0])
    if bool(wrong.any()):
        i = int(wrong.nonzero()[0])
        raise RunError(
            f"positions: {int(places[i])} of request {int(requests[i])} lies outside the pages in kv_indptr and "
            f"kv_indices ({kv_indices.shape[0]} entries). "
            "Allocate its pages before appending."
        )
    used = kv_indices[pages]
    if bool(((used < 0) | (used >= k.num_pages)).any()):
        raise RunError(
            f"kv_indices reaches {int(used.max())} (least {int(used.min())}) but paged_kv_cache has "
            f"{k.num_pages} pages: pass numbers of its pages."
        )
