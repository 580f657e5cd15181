"""K and V in fp8 or in formats with scales: their pages are widened to 16-bit elements before a Hopper prefill.

attention_sm80 (formats) and the converting loader of prefill_sm90 (fp8) convert each tile that a unit reads, and a
prefill reads a token once for every 128 packed rows: at 0.4 and 0.7 of the speed over 16-bit pages (docs/tried.md). So
if enough rows see each token, a kernel that widens all pages once, in the order of the page numbers, costs less. The
pages lie in the free part of the float workspace; if there is no room, the cache is read in place.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from .. import native
from ..base.dtypes import DType
from ..base.kv_view import View
from ..kernels import kv_formats
from ..kernels.options import Options
from ..kernels.spec import KernelSpec
from .copy_memory import align_down

NOTE = "K and V of few bits: a kernel before this one widens their pages to 16-bit elements, which come in boxes"

# The copy costs a launch and 5 KiB of memory traffic a token and eight heads (docs/tried.md).
LEAST_ROWS, LEAST_ROWS_OF_FP8 = 320, 1024
_ELEMENT_BYTES = 2
_NUMBER_BYTES = 4
_MOST_EIGHTS = 2**31  # of eight elements, by which the kernel counts


def as_pages(options: Options) -> Options:
    """The problem of the attention kernel over widened pages."""
    return dataclasses.replace(options, kv_dtype=options.q_dtype, k_format=kv_formats.PLAIN, v_format=kv_formats.PLAIN)


def widens(options: Options) -> bool:
    """Whether copies of K and V for a prefill are wider pages. Not with an fp32 scale of each token under fp16 queries:
    a number times its scale need not be one of fp16, and the scale of the run comes later."""
    is_narrow = options.has_formats or options.kv_dtype.is_fp8
    formats = [kv_formats.find(name, options.kv_dtype) for name in (options.k_format, options.v_format)]
    has_token_scales = any(each.scale_columns == kv_formats.WHOLE_ROW for each in formats)
    is_in_range = options.q_dtype is DType.BFLOAT16 or (options.q_dtype is DType.FLOAT16 and not has_token_scales)
    return is_narrow and options.kv_source == "paged" and is_in_range


def least_rows(options: Options) -> int:
    """Packed rows that see a token, on average, from which on a batch is worth the copy."""
    return LEAST_ROWS if options.has_formats else LEAST_ROWS_OF_FP8


def spec_of(options: Options) -> KernelSpec:
    """The kernel that widens."""
    return KernelSpec(
        "widen_pages",
        q_dtype=options.q_dtype,
        kv_dtype=options.kv_dtype,
        head_dim_qk=options.head_dim_qk,
        head_dim_vo=options.head_dim_vo,
        k_format=kv_formats.unrotated(options.k_format),
        v_format=options.v_format,
    )


class Pages(NamedTuple):
    """The pages of one plan, in the order of its page numbers, of which each run writes those from `first` on."""

    first: int  # among the entries of kv_indices
    end: int
    k: int  # address
    v: int
    numbers: int  # address of the page numbers that the attention kernel reads

    @property
    def is_paged(self) -> bool:
        """Whether the attention kernel reads pages."""
        return True

    @property
    def q_address(self) -> int | None:
        """Where the attention kernel reads q; None: where it is."""
        return None

    @staticmethod
    def below(limit: int, first: int, end: int, options: Options) -> Pages | None:
        """The pages at the end of the memory before `limit`; `k` is where they begin. None: more than can be
        counted."""
        tokens = end * options.page_size * options.num_kv_heads
        if tokens * max(options.head_dim_qk, options.head_dim_vo) // 8 >= _MOST_EIGHTS:
            return None
        numbers = align_down(limit - end * _NUMBER_BYTES)
        v = align_down(numbers - tokens * options.head_dim_vo * _ELEMENT_BYTES)
        return Pages(first, end, align_down(v - tokens * options.head_dim_qk * _ELEMENT_BYTES), v, numbers)

    def views(self, options: Options) -> dict[str, View]:
        """K and V as paged tensors."""
        heads, page = options.num_kv_heads, options.page_size
        return {
            name: View(self.end, page, heads, dim, page * heads * dim, heads * dim, dim)
            for name, dim in (("K", options.head_dim_qk), ("V", options.head_dim_vo))
        }

    def bind(
        self,
        given: native.WidenPagesParams,
        views: dict[str, View],
        options: Options,
        params: native.AttentionParams,
    ) -> None:
        """All parameters except the addresses of the cache, which has the strides of `views`, and of its scales, which
        have those of `params`; and the page numbers of the attention kernel."""
        given.kv_indices, given.k_pages, given.v_pages, given.numbers = params.kv_indices, self.k, self.v, self.numbers
        given.first, given.count, given.num_pages = self.first, self.end - self.first, views["K"].num_pages
        given.page, given.heads = native.make_fast_div(options.page_size), native.make_fast_div(options.num_kv_heads)
        for side, view in ((given.k, views["K"]), (given.v, views["V"])):
            side.page_stride, side.token_stride, side.head_stride = view[4:7]
        given.key_scales, given.value_scales = params.key_scales, params.value_scales
        params.kv_indices = self.numbers
