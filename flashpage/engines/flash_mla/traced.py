"""flash_mla_with_kvcache as one operator of torch: what torch.compile and dispatch modes see of a call.

The operator plans and runs when the compiled code does. It gets the metadata as a tensor that holds its number: other
values of a tensor compile nothing, so that one compiled function serves all steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from ...base import checks
from ...base.errors import RunError
from ...wrappers import operators
from .metadata import FlashMLASchedMeta, of_handle

Result = tuple[torch.Tensor, torch.Tensor]

_NAME = "flash_mla_with_kvcache"
_SCHEMA = (
    "(Tensor q, Tensor k_cache, Tensor? block_table, Tensor? cache_seqlens, int head_dim_v, Tensor metadata, "
    "float? softmax_scale, bool causal, bool? is_fp8_kvcache, Tensor? indices, Tensor? attn_sink, "
    "Tensor? extra_k_cache, Tensor? extra_indices_in_kvcache, Tensor? topk_length, Tensor? extra_topk_length, "
    "bool enable_batch_invariant, bool use_legacy, str? kv_format, Tensor? descale_q, Tensor? descale_k) "
    "-> (Tensor, Tensor)"
)
_ARGUMENTS = tuple(argument.split()[1] for argument in _SCHEMA[1:].partition(")")[0].split(", "))


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


def handle_of(meta: FlashMLASchedMeta) -> torch.Tensor:
    """The metadata as the operator takes it. Modes with fake tensors take no other tensors than those that are lifted
    into them."""
    return meta.handle if is_dynamo_compiling() else torch.ops.aten.lift_fresh(meta.handle)


def call(*args: Any, descale_q: Any, descale_k: Any) -> Result:
    """Calls the operator; `args`: all others of its schema."""
    for name, value in zip(_ARGUMENTS, args, strict=False):
        if isinstance(value, torch.Tensor):
            checks.tensor(value, name, RunError)  # compiled code passes tensors that require no gradient
    descales = (_one(name, value, args[0]) for name, value in (("descale_q", descale_q), ("descale_k", descale_k)))
    found: Result = getattr(torch.ops.flashpage, _NAME)(*args, *descales)
    return found


def _one(name: str, value: Any, like: torch.Tensor) -> torch.Tensor | None:
    """A scale of a tensor, which may be a number."""
    if isinstance(value, torch.Tensor):
        return checks.tensor(value, name, RunError)
    if value is None:
        return None
    number = checks.real(name, value, positive=True, error=RunError)
    return torch.full((1,), number, dtype=torch.float32, device=like.device)
