"""When K and V are copied before a Hopper prefill reads them, and pages of one token as contiguous rows; those of
formats become wider pages (widened_pages.py), under RoPE q and K are rotated (rotated_pages.py), and V of e4m3 is
transposed (value_columns.py).

Loading warps load single rows by cp.async, which costs a prefill an eighth of its time (docs/tried.md); contiguous rows
come in boxes. If enough query rows see each token, a kernel that copies all rows costs less. The start of a request's
page numbers in a paged plan is, with pages of one token, also its first row here, so the plan serves the ragged kernel
without a change. The rows lie in the free part of the float workspace; if there is no room, single rows are loaded.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from .. import native
from ..base.kv_view import View
from ..kernels import ATTENTION, devices
from ..kernels.devices import H200, Device
from ..kernels.options import Options
from ..kernels.spec import KernelSpec
from ..kernels.work import Problem, Work
from . import rotated_pages, value_columns, widened_pages
from .copy_memory import align_down
from .rotated_pages import rotates
from .value_columns import transposes
from .widened_pages import widens

NOTE = "pages of one token: a kernel before this one gathers K and V into contiguous rows, which come in boxes"

LEAST_ROWS = 4096  # packed rows that see a token, on average (docs/tried.md)
# Loads of single rows also cost each unit's start about as much as this many tokens. In batches of short contexts many
# units start for each token: with that counted, this many rows are enough if the launch itself costs little.
UNIT_TOKENS, LEAST_ROWS_AND_STARTS, MANY_TOKENS = 1900, 6000, 8192
_VECTOR_BYTES = 16  # include/flashpage/kernels/helpers/gather_rows.h
_ELEMENT_BYTES = 2


def runs_on(device: torch.device) -> bool:
    """Whether a kernel for the work loads contiguous rows in another way."""
    return devices.of(device).has_wgmma


class _Kind(NamedTuple):
    """One kind of copy.

    Attributes:
        least: of packed rows that see a token on an H200, alone and with what starts of units cost; and of tokens that
            a row sees.
        skips_unused: whether page numbers may be of no page, as those that given lengths leave out.
    """

    note: str
    least: Callable[[Options], tuple[float, float, float]]
    skips_unused: bool
    read: Callable[[Options], Options]
    spec: Callable[[Options], KernelSpec]
    params: type[Params]
    below: Callable[[int, native.BatchStruct, Options], Copy | None]


def _kind(options: Options) -> _Kind:
    if transposes(options):
        return _COLUMNS
    return _ROTATED if rotates(options) else _WIDENED if widens(options) else _GATHERED


def as_rows(options: Options) -> Options:
    """The problem of the attention kernel over the copy."""
    return _kind(options).read(options)


def note_of(options: Options) -> str:
    return _kind(options).note


def spec_of(options: Options) -> KernelSpec:
    """The kernel that copies."""
    return _kind(options).spec(options)


def params_of(options: Options) -> Params:
    """Its parameters."""
    return _kind(options).params()


def skips_unused(options: Options) -> bool:
    """Whether the kernel skips page numbers of no page, as given lengths may leave some unused."""
    return _kind(options).skips_unused


class GatherPolicy:
    """Whether a batch is worth the copy. Made once for options, evaluated at every plan."""

    __slots__ = (
        *("_hidden", "_least_rows", "_least_visible", "_least_with_starts", "_most_tokens", "_options"),
        *("_unit_tokens", "may_be"),
    )

    def __init__(self, options: Options, card: Device) -> None:
        self._options = options
        self.may_be = _may_be(options)  # whether any batch is worth it
        self._hidden = 0.5 if options.causal else 0.0
        self._most_tokens = options.most_visible
        # The copy costs memory bandwidth and saves time of wgmmas.
        rows_of_h200 = card.flops_per_byte / options.group_size
        least, with_starts, self._least_visible = _kind(options).least(options)
        self._least_rows = least * rows_of_h200
        self._least_with_starts = with_starts * rows_of_h200
        self._unit_tokens = UNIT_TOKENS * card.flops_per_byte

    def least(self) -> tuple[float, float]:
        """Query rows of a request on average, and of a batch, below both of which no batch is worth it, whatever its
        tokens."""
        return (self._least_rows, self._least_with_starts) if self.may_be else (math.inf, math.inf)

    def is_for(self, batch: int, total_rows: int, total_tokens: int) -> bool:
        of_request, of_batch = self.least()
        if batch == 0 or total_tokens <= 0 or total_rows < min(of_request * batch, of_batch):
            return False
        rows = self.rows_of_token(batch, total_rows, total_tokens)
        if rows >= self._least_rows:
            return rows * total_tokens >= self._least_visible * total_rows
        return (
            total_tokens >= MANY_TOKENS
            and rows + self._unit_tokens * total_rows / total_tokens >= self._least_with_starts
        )

    def copy_for(self, batch: native.BatchStruct, entries: int, partials: tuple[int, int]) -> Copy | None:
        """Where a batch's copy goes, if it is worth one and has room between the addresses of partial results. None
        also if lengths are given, so that some page numbers may not be in use, unless the copy skips numbers of no
        page."""
        options = self._options
        tokens = entries * max(1, options.page_size)
        are_used = batch.kv_lens.data is None or skips_unused(options)
        if not (are_used and self.is_for(batch.requests, batch.rows, tokens)):
            return None
        copy = _kind(options).below(partials[1], batch, options)
        return copy if copy is not None and copy.k >= partials[0] else None

    def rows_of_token(self, batch: int, total_rows: int, total_tokens: int) -> float:
        """Rows of q that see a token, on average, as if all requests were equal."""
        rows, tokens = total_rows / batch, total_tokens / batch
        on_edge = min(rows, tokens)  # on a causal mask's edge: rows before the first token see nothing
        found = rows if self._hidden == 0.0 else on_edge - self._hidden * on_edge * on_edge / tokens
        return found if self._most_tokens is None else min(found, rows * self._most_tokens / tokens)


def _may_be(options: Options) -> bool:
    """False if the batch must not choose how it is read, and for masks and users' variants, which were not measured."""
    is_plain = options.variant is None and not options.has_mask
    is_free = not (options.uniform_q_len or options.is_batch_invariant)
    of_tokens = options.kv_source == "paged" and options.page_size == 1 and options.kv_dtype.size == _ELEMENT_BYTES
    has_copy = rotates(options) or (
        options.position_encoding != "ROPE_LLAMA" and (of_tokens or widens(options) or transposes(options))
    )
    if not (is_plain and is_free and has_copy):
        return False
    read = options if _kind(options) is _GATHERED else as_rows(options)
    work = Work(Problem(read, LEAST_ROWS), H200)  # only the card's capability matters here
    return any(kernel.gathers_rows and not kernel.refusals(work) for kernel in ATTENTION)


class Rows(NamedTuple):
    """The rows of one plan: [end, num_kv_heads, head_dim], of which each run writes those from `first` on."""

    first: int  # among the entries of kv_indices
    end: int
    k: int  # address
    v: int

    @property
    def is_paged(self) -> bool:
        """Whether the attention kernel reads pages."""
        return False

    @property
    def q_address(self) -> int | None:
        """Where the attention kernel reads q; None: where it is."""
        return None

    @staticmethod
    def below(limit: int, first: int, end: int, options: Options) -> Rows:
        """The rows at the end of the memory before `limit`; `k` is where they begin."""
        v = align_down(limit - end * _token_bytes(options, options.head_dim_vo))
        return Rows(first, end, align_down(v - end * _token_bytes(options, options.head_dim_qk)), v)

    def views(self, options: Options) -> dict[str, View]:
        """K and V as ragged tensors."""
        heads = options.num_kv_heads
        return {
            name: View(self.end, 1, heads, dim, 0, heads * dim, dim)
            for name, dim in (("K", options.head_dim_qk), ("V", options.head_dim_vo))
        }

    def bind(
        self,
        params: native.GatherRowsParams,
        views: dict[str, View],
        options: Options,
        attention: native.AttentionParams,
    ) -> None:
        """All parameters except the addresses of the cache, which has the strides of `views`."""
        params.kv_indices, params.k_rows, params.v_rows = attention.kv_indices, self.k, self.v
        params.first, params.count = self.first, self.end - self.first
        for side, view in ((params.k, views["K"]), (params.v, views["V"])):
            side.page_stride, side.token_stride, side.head_stride = view.page_stride, 0, view.head_stride
        k, v = (dim * _ELEMENT_BYTES // _VECTOR_BYTES for dim in (options.head_dim_qk, options.head_dim_vo))
        params.k_row_vectors, params.v_row_vectors = native.make_fast_div(k), native.make_fast_div(v)
        params.k_token_vectors, params.v_token_vectors = k * options.num_kv_heads, v * options.num_kv_heads
        params.token_vectors = native.make_fast_div(max(k, v) * options.num_kv_heads)


Copy = Rows | widened_pages.Pages | rotated_pages.RotatedPages | value_columns.Columns
Params = native.GatherRowsParams | native.WidenPagesParams | native.RotatePagesParams | native.ValueColumnsParams

_GATHERED = _Kind(
    NOTE,
    lambda _: (LEAST_ROWS, LEAST_ROWS_AND_STARTS, 0),
    False,
    lambda options: dataclasses.replace(options, kv_source="ragged", page_size=0),
    lambda _: KernelSpec("gather_rows"),
    native.GatherRowsParams,
    lambda limit, batch, options: Rows.below(limit, batch.kv_begin, batch.kv_end, options),
)
_WIDENED = _Kind(
    widened_pages.NOTE,
    lambda options: (widened_pages.least_rows(options), math.inf, 0),  # a unit's start costs no more without the copy
    True,
    widened_pages.as_pages,
    widened_pages.spec_of,
    native.WidenPagesParams,
    lambda limit, batch, options: widened_pages.Pages.below(limit, batch.kv_begin, batch.kv_end, options),
)
_ROTATED = _Kind(
    rotated_pages.NOTE,
    lambda _: (rotated_pages.LEAST_ROWS, math.inf, rotated_pages.LEAST_VISIBLE),
    True,
    rotated_pages.as_rotated,
    rotated_pages.spec_of,
    native.RotatePagesParams,
    rotated_pages.RotatedPages.below,
)
_COLUMNS = _Kind(
    value_columns.NOTE,
    lambda _: (value_columns.LEAST_ROWS, math.inf, value_columns.LEAST_VISIBLE),
    True,
    value_columns.as_columns,
    value_columns.spec_of,
    native.ValueColumnsParams,
    value_columns.Columns.below,
)


def _token_bytes(options: Options, dim: int) -> int:
    return options.num_kv_heads * dim * _ELEMENT_BYTES
