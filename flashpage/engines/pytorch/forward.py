"""Attention of PyTorch's flash operators: dense batches, whose lengths are shapes, and ragged and paged ones."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...base.errors import CapabilityError
from ...plan.lengths import Lengths
from ...plan.page_indices import NO_PAGES, Pages
from ...run.checks import NO_SCALES, scales_of
from ...wrappers.base import Attention
from ...wrappers.function_plans import FunctionPlan, Tables, key_of, plan_of
from ...wrappers.lse_mode import LN_2
from ...wrappers.plan_arguments import PrefillArguments

_E4M3 = torch.float8_e4m3fn
_DTYPES = {"cuda": (torch.float16, torch.bfloat16), "cpu": (torch.float16, torch.bfloat16, torch.float32)}


class Options(NamedTuple):
    """Options of both kinds of batches."""

    scale: float | None = None
    is_causal: bool = False
    window_left: int | None = None  # None, -1: no limit
    window_right: int | None = None
    num_splits: int | None = None
    # Factors of e4m3 queries, keys and values, [batch, KV heads] each or None; None: an operator of other elements.
    descales: tuple[torch.Tensor | None, ...] | None = None

    @property
    def causal(self) -> bool:
        """Whether rows see no tokens after their own."""
        return self.is_causal or self.window_right == 0

    def arguments(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, page_size: int) -> PrefillArguments:
        """Arguments of a plan, without the scale, for tensors [..., heads, dim]."""
        left = self.window_left
        return PrefillArguments(
            "paged" if page_size else "ragged",
            q.shape[-2],
            k.shape[-2],
            q.shape[-1],
            page_size,
            v.shape[-1],
            causal=self.causal,
            window_left=-1 if left is None else max(left, -1),
            q_data_type=q.dtype,
            kv_data_type=k.dtype,
            disable_split_kv=self.num_splits == 1,
        )

    def scales(self, q_heads: int) -> Any:
        """The factors, with those of queries for each query head."""
        if self.descales is None:
            return NO_SCALES
        q, k, v = self.descales
        if q is not None:
            q = q.repeat_interleave(q_heads // q.shape[1], 1)
        return scales_of(q, k, v, None)


def check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: Options,
    dropout_p: float = 0.0,
    cum_seq_q: torch.Tensor | None = None,
) -> None:
    """Raises CapabilityError for what torch's own kernels must do; plans refuse the rest."""
    dtypes, otherwise = _DTYPES.get(q.device.type, ()), "torch's own kernel runs"
    if options.descales is not None:
        check_descales(len(q) if cum_seq_q is None else len(cum_seq_q) - 1, k.shape[-2], options.descales)
        dtypes, otherwise = (_E4M3,), f"torch's quantized operators take {_E4M3} and have no other kernel"
    for is_lacking, what in (
        (dropout_p != 0, "dropout"),
        (q.dtype not in dtypes or not q.dtype == k.dtype == v.dtype, f"elements of {q.dtype} and {k.dtype}"),
        (q.device != k.device or q.device != v.device, "tensors on several devices"),
        (not (q.numel() and k.numel() and v.numel()), "an empty tensor"),
        (any(t.stride(-1) != 1 and t.shape[-1] > 1 for t in (q, k, v)), "a head dimension that is not contiguous"),
        (not options.causal and (options.window_right or -1) > 0, "a window to the right"),
        (q.dim() == 4 and options.causal and q.shape[1] > k.shape[1], "causal rows without tokens"),
    ):
        if is_lacking:
            raise CapabilityError(f"flashpage does not have {what} here: {otherwise}.")


def check_descales(batch: int, heads: int, descales: tuple[torch.Tensor | None, ...]) -> None:
    """Checks the shapes of factors, as a run would use those of one sequence for all."""
    for name, scale in zip("qkv", descales, strict=True):
        if scale is not None and scale.shape != (batch, heads):
            raise CapabilityError(
                f"{name}_descale has shape {tuple(scale.shape)}: pass [{batch}, {heads}], one factor for each sequence "
                "and KV head."
            )


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options, out: torch.Tensor) -> torch.Tensor:
    """Attention of equally long requests, [batch, rows, heads, dim] in any strides, written to `out`; returns the LSE,
    [batch, heads, rows], a natural logarithm."""
    batch, rows, heads, _ = q.shape
    tokens = k.shape[1]
    ragged = _as_rows(k), _as_rows(v)
    is_ragged = ragged[0] is not None and ragged[1] is not None
    cache: Any = ragged if is_ragged else (k, v)  # otherwise a request's tokens are one page
    plan = plan_of(q.device, "NHD", options.arguments(q, k, v, 0 if is_ragged else tokens))

    def lengths() -> tuple[Lengths, Pages]:
        ends = torch.arange(batch + 1, dtype=torch.int32, device="cpu")
        if is_ragged:
            return Lengths(ends * rows, ends * tokens), NO_PAGES
        last = torch.full((batch,), tokens, dtype=torch.int32, device="cpu")
        return Lengths(ends * rows, ends, last), Pages(torch.arange(batch, dtype=torch.int32, device=q.device))

    attention = plan.on_host((batch, rows, tokens), lengths)
    found = _as_rows(out)
    q_rows = _as_rows(q)
    to, lse = _run(attention, plan, q.flatten(0, 1) if q_rows is None else q_rows, cache, options, found)
    if found is None:
        out.copy_(to.unflatten(0, (batch, rows)))
    shape = (batch, heads, rows)
    return torch.mul(lse.unflatten(0, (batch, rows)).transpose(1, 2), LN_2, out=lse.new_empty(shape))


class Varlen(NamedTuple):
    """Lengths of requests whose rows stand one after the other."""

    cum_seq_q: torch.Tensor
    cum_seq_k: torch.Tensor | None
    seqused_k: torch.Tensor | None
    block_table: torch.Tensor | None


def varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Varlen, options: Options, out: torch.Tensor
) -> torch.Tensor:
    """Attention of rows [total, heads, dim] over ragged keys or over pages [pages, page, heads, dim], written to `out`;
    returns the LSE, [heads, total], a natural logarithm."""
    begins, used = lengths.cum_seq_q, lengths.seqused_k
    if lengths.block_table is not None:
        if used is None:
            raise CapabilityError("flashpage needs seqused_k with block_table: torch's own kernel runs.")
        plan = plan_of(q.device, "NHD", options.arguments(q, k, v, k.shape[1]))
        tables = Tables(used.contiguous(), lengths.block_table, begins.int().contiguous(), q.shape[0])
        attention = plan.on_device(tables)
    else:
        if lengths.cum_seq_k is None:
            raise CapabilityError("flashpage needs cum_seq_k or block_table: torch's own kernel runs.")
        plan = plan_of(q.device, "NHD", options.arguments(q, k, v, 0))
        given = [begins, lengths.cum_seq_k, *(() if used is None else (used,))]
        ragged = Lengths(begins, lengths.cum_seq_k, None, used)
        attention = plan.on_host(key_of(*given), lambda: (ragged, NO_PAGES))
    _, lse = _run(attention, plan, q, (k, v), options, out)
    natural = torch.mul(lse.T, LN_2, out=lse.new_empty(lse.shape[::-1]))
    if used is None and options.causal:  # torch's backward kernel wants inf for rows without tokens
        natural.masked_fill_(natural.isneginf(), torch.inf)
    return natural


def _run(
    attention: Attention, plan: FunctionPlan, q: torch.Tensor, cache: Any, options: Options, out: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    values = plan.values._replace(sm_scale=options.scale)
    found: tuple[torch.Tensor, torch.Tensor] = attention.run(
        q, cache, out, return_lse=True, values=values, scales=options.scales(q.shape[1])
    )
    return found


def _as_rows(tensor: torch.Tensor) -> torch.Tensor | None:
    """A view [batch * rows, heads, dim] of [batch, rows, heads, dim]; None if strides do not allow it."""
    batch, rows = tensor.shape[:2]
    if rows == 1:
        return tensor.squeeze(1)
    if batch == 1 or tensor.stride(0) == rows * tensor.stride(1):
        return tensor.as_strided((batch * rows, *tensor.shape[2:]), tensor.stride()[1:], tensor.storage_offset())
    return None
