"""The tensors and scales of a run over latent rows, in the forms that callers have."""

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from ..base import checks
from ..base.dtypes import DType
from ..base.errors import FlashpageError, PlanError, RunError
from ..kernels import latent_formats
from ..kernels.options import Options
from ..run.checks import NO_SCALES

# The callers' names for the inner interface's cache.
_CACHES = {"k": "ckv_cache", "v": "kpe_cache", "paged_kv_cache": "ckv_cache"}
_QUERIES, _SPLIT_CACHES = ("q_nope", "q_pe"), ("ckv_cache", "kpe_cache")
_PAIRS = (tuple, list)


def use_run_names(error: FlashpageError, query: Any, kv_cache: Any) -> None:
    """Puts the caller's names into an error of a run in place of the inner interface's."""
    error.use_names({"q": "q_nope and q_pe" if query is None else "query"})
    if kv_cache is None:
        error.use_names(_CACHES)
    else:
        first, second = ("kv_cache[0]", "kv_cache[1]") if kv_cache.__class__ in _PAIRS else ("kv_cache", "kv_cache")
        error.use_names({"k": first, "v": second, "paged_kv_cache": first, "ckv_cache": first, "kpe_cache": second})
    error.use_names({"k_scale": "ckv_scale", "v_scale": "kpe_scale"})


def joined_query(options: Options | None, query: Any, q_nope: Any, q_pe: Any) -> torch.Tensor:
    """The queries of a run as one tensor; `options` None: nothing is planned."""
    parts = _pair("query", _QUERIES, query, q_nope, q_pe)
    if len(parts) == 2 and options is not None and parts[0].shape[2] != options.head_dim_vo:
        name = "q_nope" if query is None else "query[0]"
        raise RunError(
            f"{name} has {parts[0].shape[2]} columns but the plan has head_dim_ckv={options.head_dim_vo}: "
            "pass q_nope and q_pe in this order."
        )
    return _joined(parts)


def check_scale_mode(scale_mode: Any, kv_data_type: Any, kv_row_format: Any) -> None:
    """Scales of "kv-per-tensor" are those that runs of rows in e4m3 take in any case."""
    if scale_mode in ("bmm-scalar", "bmm-tensor"):
        checks.refuse("scale_mode", scale_mode)
    if checks.choice("scale_mode", scale_mode, ("default", "kv-per-tensor")) == "default":
        return
    is_e4m3 = kv_data_type is not None and checks.dtype("kv_data_type", kv_data_type) is DType.FLOAT8_E4M3
    if not is_e4m3 or kv_row_format is not None:
        raise PlanError(
            "scale_mode='kv-per-tensor' is for rows of kv_data_type float8_e4m3fn without a kv_row_format: pass "
            "'default', as other rows take no scales at run."
        )


def scales_of(options: Options | None, ckv: Any, ckv_of_tokens: Any, kpe: Any) -> tuple[Any, Any, Any]:
    """The scales of fp8 rows, as those of q, K and V."""
    if ckv is None and ckv_of_tokens is None and kpe is None:
        return NO_SCALES
    if options is None or options.latent_format != latent_formats.SCALED:
        checks.refuse_all(ckv_scale=ckv, ckv_scale_arr=ckv_of_tokens, kpe_scale=kpe)
    if ckv is not None and ckv_of_tokens is not None:
        raise RunError("ckv_scale and ckv_scale_arr are both given: pass one of them.")
    if ckv_of_tokens is not None and checks.tensor(ckv_of_tokens, "ckv_scale_arr", RunError).dim() != 3:
        shape = tuple(ckv_of_tokens.shape)
        raise RunError(f"ckv_scale_arr has shape {shape}: pass [pages, page_size, head_dim_ckv / 128].")
    return None, ckv if ckv_of_tokens is None else ckv_of_tokens, kpe


def caches_of(options: Options | None, whole: Any, ckv: Any, kpe: Any) -> tuple[torch.Tensor, ...]:
    """One cache, or two of which the second has columns."""
    packed = None if options is None else options.latent_row_format
    if packed is None:
        return _pair("kv_cache", _SPLIT_CACHES, whole, ckv, kpe)
    if kpe is not None or (whole is not None and ckv is not None) or whole.__class__ in _PAIRS:
        raise RunError(f"rows of {packed.row_bytes} bytes are one cache: pass kv_cache alone.")
    rows = checks.tensor(ckv if whole is None else whole, "kv_cache", RunError)
    return (rows.view(torch.float8_e4m3fn) if rows.dtype in (torch.uint8, torch.int8) else rows,)


def _pair(
    name: str, part_names: tuple[str, str], whole: Any, first: Any, second: Any
) -> tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor]:
    """One tensor, or two of which the second has columns."""
    names = part_names
    if whole is not None:
        if first is not None or second is not None:
            raise RunError(f"{name} and {' and '.join(names)} are both given: pass one tensor, or two.")
        whole = _one_form(name, whole) if whole.__class__ in _PAIRS else whole
        if whole.__class__ not in _PAIRS:
            return (whole,)
        first, second = whole
        names = f"{name}[0]", f"{name}[1]"
    elif first is None or second is None:
        missing = names[0] if first is None else names[1]
        raise RunError(f"{missing}=None: pass {' and '.join(names)}, or {name} alone.")
    checks.tensor(first, names[0], RunError)
    checks.tensor(second, names[1], RunError)
    shape, other = first.shape, second.shape
    if len(shape) != 3 or len(other) != 3 or shape[0] != other[0] or shape[1] != other[1]:
        said = name if whole is not None else " and ".join(names)
        raise RunError(f"{said} have shapes {tuple(shape)} and {tuple(other)}: pass equal leading sizes.")
    if first.dtype != second.dtype:
        said = name if whole is not None else " and ".join(names)
        raise RunError(f"{said} have dtypes {first.dtype} and {second.dtype}: pass equal types.")
    return (first, second) if other[2] else (first,)


def _one_form(name: str, given: Any) -> Any:
    """The pair, or the tensor if it is given with the pair of its parts."""
    if len(given) != 2:
        raise RunError(f"{name} has {len(given)} entries: pass one tensor, or the pair of its parts.")
    for form, other in (given, given[::-1]):
        if form.__class__ in _PAIRS:
            return checks.tensor(other, name, RunError)
    return given


def _joined(parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The parts side by side: in place if their memory is, otherwise copied."""
    if len(parts) == 1:
        return parts[0]
    first, second = parts
    shape, strides = first.shape, first.stride()
    is_one = (
        not is_dynamo_compiling()
        and strides == second.stride()
        and first.storage_offset() + shape[2] == second.storage_offset()
        and first.untyped_storage()._cdata == second.untyped_storage()._cdata
        and first.is_neg() == second.is_neg()
    )
    return first.as_strided((*shape[:2], shape[2] + second.shape[2]), strides) if is_one else torch.cat(parts, -1)
