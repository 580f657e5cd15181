"""flash_mla_with_kvcache as one operator of torch: what torch.compile and dispatch modes see of a call.

The operator plans and runs when the compiled code does. It gets the metadata as a tensor that holds its number: other
values of a tensor compile nothing, so that one compiled function serves all steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...wrappers import operators
from .metadata import of_handle

Result = tuple[torch.Tensor, torch.Tensor]

_NAME = "flash_mla_with_kvcache"
_SCHEMA = (
    "(Tensor q, Tensor k_cache, Tensor? block_table, Tensor? cache_seqlens, int head_dim_v, Tensor metadata, "
    "float? softmax_scale, bool causal, bool? is_fp8_kvcache, Tensor? indices, Tensor? attn_sink, "
    "Tensor? extra_k_cache, Tensor? extra_indices_in_kvcache, Tensor? topk_length, Tensor? extra_topk_length, "
    "bool enable_batch_invariant, bool use_legacy, str? kv_format, Tensor? descale_q, Tensor? descale_k) "
    "-> (Tensor, Tensor)"
)


def define(function: Callable[..., Result]) -> None:
    """Registers the operator of the function, which it calls with the metadata itself."""

    def implementation(
        q: torch.Tensor, k_cache: torch.Tensor, tables: Any, lens: Any, head_dim_v: int, *rest: Any
    ) -> Result:
        handle, *values = rest
        return function(q, k_cache, tables, lens, head_dim_v, of_handle(handle), None, *values)

    operators.define(_NAME, _SCHEMA, implementation, _fake, tags=operators.OUT_OF_GRAPHS)


def _fake(q: torch.Tensor, k_cache: torch.Tensor, tables: Any, lens: Any, head_dim_v: int, *_: Any) -> Result:
    batch, rows, heads = q.shape[:3]
    dtype = torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype
    out = q.new_empty((batch, rows, heads, head_dim_v), dtype=dtype)
    return out, q.new_empty((batch, heads, rows), dtype=torch.float32)


def call(*args: Any, descale_q: Any, descale_k: Any) -> Result:
    """Calls the operator; `args`: all others of its schema."""
    descales = (_one(value, args[0]) for value in (descale_q, descale_k))
    found: Result = getattr(torch.ops.flashpage, _NAME)(*args, *descales)
    return found


def _one(value: Any, like: torch.Tensor) -> torch.Tensor | None:
    """A scale of a tensor, which may be a number."""
    is_number = value is not None and not isinstance(value, torch.Tensor)
    return torch.full((1,), value, dtype=torch.float32, device=like.device) if is_number else value
