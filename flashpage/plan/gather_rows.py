"""Pages of one token whose K and V are copied to rows, one behind the other, before a Hopper prefill reads them.

Loading warps bring single rows by cp.async, which costs a prefill an eighth of its time (docs/tried.md); rows
one behind the other come in boxes. Where enough query rows see each token, a kernel that copies all of them costs less.
A paged plan says where a request's page numbers begin: with pages of one token that is its first row here, so the plan
serves the ragged kernel as it is. The rows lie in what a plan leaves free of the float workspace; without room for them
single rows are loaded as ever.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import torch

from .. import native
from ..base.kv_view import View
from ..kernels import ATTENTION, devices
from ..kernels.devices import H200, Device
from ..kernels.options import Options
from ..kernels.work import Problem, Work

NOTE = "pages of one token: a kernel before this one copies K and V to rows one behind the other, which come in boxes"

LEAST_ROWS = 4096  # packed rows that see a token, on average (docs/tried.md)
# Single rows also cost a unit's start, as much as so many tokens. Of short contexts, many units start for each token:
# with that counted, as many as here are enough where the launch itself is hardly felt.
UNIT_TOKENS, LEAST_ROWS_AND_STARTS, MANY_TOKENS = 1900, 6000, 8192
_ALIGNMENT = 128  # bytes: whole lines
_VECTOR_BYTES = 16  # include/flashpage/kernels/helpers/gather_rows.h
_ELEMENT_BYTES = 2


def runs_on(device: torch.device) -> bool:
    """Whether a kernel for it has another way to load rows that lie one behind the other."""
    return devices.of(device).has_wgmma


def as_rows(options: Options) -> Options:
    """What the attention kernel is then asked for."""
    return dataclasses.replace(options, kv_source="ragged", page_size=0)


class Worth:
    """Whether a batch is worth the copy. Made once for options, asked at every plan."""

    __slots__ = ("_hidden", "_least_rows", "_least_with_starts", "_most_tokens", "_unit_tokens", "may_be")

    def __init__(self, options: Options, card: Device) -> None:
        self.may_be = _may_be(options)  # in any batch
        self._hidden = 0.5 if options.causal else 0.0
        self._most_tokens = options.most_visible
        # The copy costs memory's time and saves time of products.
        rows_of_h200 = card.flops_per_byte / options.group_size
        self._least_rows = LEAST_ROWS * rows_of_h200
        self._least_with_starts = LEAST_ROWS_AND_STARTS * rows_of_h200
        self._unit_tokens = UNIT_TOKENS * card.flops_per_byte

    def least(self) -> tuple[float, float]:
        """Query rows of a request on average, and of a batch: with fewer of both, none is worth it, whatever the
        tokens."""
        return (self._least_rows, self._least_with_starts) if self.may_be else (math.inf, math.inf)

    def is_for(self, batch: int, total_rows: int, total_tokens: int) -> bool:
        of_request, of_batch = self.least()
        if batch == 0 or total_tokens <= 0 or total_rows < min(of_request * batch, of_batch):
            return False
        rows = self.rows_of_token(batch, total_rows, total_tokens)
        if rows >= self._least_rows:
            return True
        return (
            total_tokens >= MANY_TOKENS
            and rows + self._unit_tokens * total_rows / total_tokens >= self._least_with_starts
        )

    def rows_of_token(self, batch: int, total_rows: int, total_tokens: int) -> float:
        """Of q, that see a token, on average; as if all requests were alike."""
        rows, tokens = total_rows / batch, total_tokens / batch
        on_edge = min(rows, tokens)  # of a causal mask: rows before the first token see nothing
        found = rows if self._hidden == 0.0 else on_edge - self._hidden * on_edge * on_edge / tokens
        return found if self._most_tokens is None else min(found, rows * self._most_tokens / tokens)


def _may_be(options: Options) -> bool:
    """Not where a batch must not choose how it is read, and not with masks or a user's code, which nobody measured."""
    is_plain = options.position_encoding != "ROPE_LLAMA" and options.variant is None and not options.has_mask
    is_free = not (options.uniform_q_len or options.is_batch_invariant)
    of_tokens = options.kv_source == "paged" and options.page_size == 1 and options.kv_dtype.size == _ELEMENT_BYTES
    if not (is_plain and is_free and of_tokens):
        return False
    work = Work(Problem(options, LEAST_ROWS), H200)  # of the card, only its capability counts here
    return any(kernel.gathers_rows and not kernel.refusals(work) for kernel in ATTENTION)


class Rows(NamedTuple):
    """Where the rows of one plan lie: [end, num_kv_heads, head_dim], those from `first` on written by each run."""

    first: int  # of kv_indices' entries
    end: int
    k: int  # address
    v: int

    @staticmethod
    def below(limit: int, first: int, end: int, options: Options) -> Rows:
        """The memory that ends at address `limit`; where it begins: `k`."""
        v = _down(limit - end * _token_bytes(options, options.head_dim_vo))
        return Rows(first, end, _down(v - end * _token_bytes(options, options.head_dim_qk)), v)

    def views(self, options: Options) -> dict[str, View]:
        """As those of ragged tensors."""
        heads = options.num_kv_heads
        return {
            name: View(self.end, 1, heads, dim, 0, heads * dim, dim)
            for name, dim in (("K", options.head_dim_qk), ("V", options.head_dim_vo))
        }

    def bind(self, params: native.GatherRowsParams, views: dict[str, View], options: Options, kv_indices: int) -> None:
        """Everything but the addresses of the cache, which is seen as `views` say."""
        params.kv_indices, params.k_rows, params.v_rows = kv_indices, self.k, self.v
        params.first, params.count = self.first, self.end - self.first
        for side, view in ((params.k, views["K"]), (params.v, views["V"])):
            side.page_stride, side.token_stride, side.head_stride = view.page_stride, 0, view.head_stride
        k, v = (dim * _ELEMENT_BYTES // _VECTOR_BYTES for dim in (options.head_dim_qk, options.head_dim_vo))
        params.k_row_vectors, params.v_row_vectors = native.make_fast_div(k), native.make_fast_div(v)
        params.k_token_vectors, params.v_token_vectors = k * options.num_kv_heads, v * options.num_kv_heads
        params.token_vectors = native.make_fast_div(max(k, v) * options.num_kv_heads)


def _token_bytes(options: Options, dim: int) -> int:
    return options.num_kv_heads * dim * _ELEMENT_BYTES


def _down(address: int) -> int:
    return address // _ALIGNMENT * _ALIGNMENT
