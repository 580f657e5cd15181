"""The tensors and scales of a run over latent rows, in the forms that callers have."""

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from ..base import checks, tensor_memory
from ..base.dtypes import DType
from ..base.errors import FlashpageError, PlanError, RunError
from ..base.kv_view import Cache
from ..kernels import latent_formats
from ..kernels.options import Options
from ..run.checks import NO_SCALES
from .operators import is_traced

QUERIES, CACHES = ("q_nope", "q_pe"), ("ckv_cache", "kpe_cache")
# The caller's names for the inner interface's cache.
_INNER = {"k": "ckv_cache", "v": "kpe_cache", "paged_kv_cache": "ckv_cache"}
_PAIRS = (tuple, list)


def use_run_names(error: FlashpageError, query: Any, kv_cache: Any) -> None:
    """Puts the caller's names into an error of a run in place of the inner interface's."""
    if query is None:
        error.use_names({"q": "q_nope and q_pe", "q has": "q_nope and q_pe have", "q is": "q_nope and q_pe are"})
    else:
        error.use_names({"q": "query", "q_nope": "query[0]", "q_pe": "query[1]"})
    if kv_cache is None:
        error.use_names(_INNER)
    else:
        first, second = ("kv_cache[0]", "kv_cache[1]") if kv_cache.__class__ in _PAIRS else ("kv_cache", "kv_cache")
        error.use_names({"k": first, "v": second, "paged_kv_cache": first, "ckv_cache": first, "kpe_cache": second})
    error.use_names({"k_scale": "ckv_scale", "v_scale": "kpe_scale"})


def one_form(name: str, whole: Any, part_names: tuple[str, str], *parts: Any) -> Any:
    """The argument of a run as one tensor or as a pair: `whole` (`query` or `kv_cache`), or the two parts."""
    if whole is None:
        return parts
    if not parts[0] is parts[1] is None:
        raise RunError(f"{name} and {' and '.join(part_names)} are both given: pass one tensor, or two.")
    if whole.__class__ not in _PAIRS:
        return whole
    if len(whole) != 2 or whole[0] is None or whole[1] is None:
        found = "None" if len(whole) == 2 else f"{len(whole)} entries"
        raise RunError(f"{name} has {found}: pass one tensor, or the pair of its parts.")
    for form, other in (whole, whole[::-1]):  # FlashInfer's pair of both forms
        if form.__class__ in _PAIRS:
            return checks.tensor(other, name, RunError)
    return tuple(whole)


def joined_query(options: Options | None, q: Any) -> torch.Tensor:
    """The queries of a run, one tensor or a pair, as one tensor; `options` None: nothing is planned."""
    parts = _pair("query", QUERIES, q)
    if len(parts) == 2 and options is not None and parts[0].shape[2] != options.head_dim_vo:
        raise RunError(
            f"q_nope has {parts[0].shape[2]} columns but the plan has head_dim_ckv={options.head_dim_vo}: "
            "pass the head_dim_ckv columns first, then those of head_dim_kpe."
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
    """The scales of fp8 rows, as those of q, K and V. Rows of float8_e4m3fn must have them, as in FlashInfer."""
    if options is None or options.latent_format != latent_formats.SCALED:
        checks.refuse_all(ckv_scale=ckv, ckv_scale_arr=ckv_of_tokens, kpe_scale=kpe)
        return NO_SCALES
    if ckv is not None and ckv_of_tokens is not None:
        raise RunError("ckv_scale and ckv_scale_arr are both given: pass one of them.")
    if ckv is None and ckv_of_tokens is None:
        raise RunError(
            "ckv_scale=None and ckv_scale_arr=None but the plan has rows of float8_e4m3fn: pass one of them, such as "
            "ckv_scale=1.0."
        )
    if kpe is None and options.head_dim_qk > options.head_dim_vo:
        raise RunError("kpe_scale=None but the plan has rows of float8_e4m3fn: pass it, such as kpe_scale=1.0.")
    if ckv_of_tokens is not None and checks.tensor(ckv_of_tokens, "ckv_scale_arr", RunError).dim() != 3:
        shape = tuple(ckv_of_tokens.shape)
        raise RunError(f"ckv_scale_arr has shape {shape}: pass [pages, page_size, head_dim_ckv / 128].")
    return None, ckv if ckv_of_tokens is None else ckv_of_tokens, kpe


def latent_cache_of(options: Options | None, cache: Any) -> Cache:
    """One cache, or two of which the second has columns."""
    packed = None if options is None else options.latent_row_format
    if packed is None:
        parts = _pair("kv_cache", CACHES, cache)
        return cache if len(parts) == 2 else parts[0]
    rows = cache
    if cache.__class__ is tuple:
        if cache[1] is not None:
            raise RunError(f"rows of {packed.row_bytes} bytes are one cache: pass kv_cache alone.")
        rows = cache[0]
    rows = checks.tensor(rows, "kv_cache", RunError)
    return rows.view(torch.float8_e4m3fn) if rows.dtype in (torch.uint8, torch.int8) else rows


def _pair(whole: str, names: tuple[str, str], given: Any) -> tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor]:
    """One tensor, or two of which the second has columns."""
    if given.__class__ is not tuple:
        return (checks.tensor(given, whole, RunError),)
    first, second = given
    if first is None or second is None:
        missing = names[0 if first is None else 1]
        raise RunError(f"{missing}=None: pass {' and '.join(names)}, or {whole} alone.")
    checks.tensor(first, names[0], RunError)
    checks.tensor(second, names[1], RunError)
    shape, other = first.shape, second.shape
    if len(shape) != 3 or len(other) != 3 or shape[0] != other[0] or shape[1] != other[1]:
        raise RunError(
            f"{' and '.join(names)} have shapes {tuple(shape)} and {tuple(other)}: pass equal leading sizes."
        )
    if first.dtype != second.dtype:
        raise RunError(f"{' and '.join(names)} have dtypes {first.dtype} and {second.dtype}: pass equal types.")
    return (first, second) if other[2] else (first,)


def lie_side_by_side(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors of three dimensions are views of one, whose last columns the second one has."""
    return (
        first.stride() == second.stride()
        and first.storage_offset() + first.shape[2] == second.storage_offset()
        and first.untyped_storage()._cdata == second.untyped_storage()._cdata
        and first.is_neg() == second.is_neg()
    )


def _joined(parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The parts side by side: in place if their memory is, otherwise copied."""
    if len(parts) == 1:
        return parts[0]
    first, second = parts
    shape, strides = first.shape, first.stride()
    is_one = not is_dynamo_compiling() and lie_side_by_side(first, second)
    if is_one and not is_traced():
        tensor_memory.address(second, "q_pe", RunError)  # as_strided would raise torch's own error for resized storage
    return first.as_strided((*shape[:2], shape[2] + second.shape[2]), strides) if is_one else torch.cat(parts, -1)
