"""q and K are rotated (RoPE) before a Hopper prefill, which then needs no RoPE of its own.

The rotating loader of prefill_sm90 rotates each tile of K that a unit reads, and a prefill reads a token once for every
128 packed rows: at 0.6 of the speed without RoPE (docs/tried.md). So if enough rows see each token, and each row enough
tokens, a kernel that rotates q and K once costs less. It copies V, too, unless K and V are ragged, since K's copies
have page numbers of their own. All copies lie in the free part of the float workspace; if there is no room, the
attention kernel rotates.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from .. import native
from ..base.dtypes import DType
from ..base.kv_view import View
from ..kernels.options import Options
from ..kernels.spec import KernelSpec
from .copy_memory import align_down

NOTE = "RoPE: a kernel before this one rotates q and K once, for all tiles"

# Packed rows that see a token, and tokens that a row sees, on average (docs/tried.md).
LEAST_ROWS, LEAST_VISIBLE = 512, 256
_ELEMENT_BYTES = 2
_NUMBER_BYTES = 4


def rotates(options: Options) -> bool:
    """Whether copies for a prefill are rotated. A thread of the kernel has 16 bytes of each half of a row."""
    is_half = options.q_dtype is options.kv_dtype and options.q_dtype in (DType.BFLOAT16, DType.FLOAT16)
    is_whole = options.head_dim_qk % 16 == 0 and options.head_dim_vo % 8 == 0
    is_plain = options.kv_source in ("paged", "ragged") and not options.has_formats
    return options.position_encoding == "ROPE_LLAMA" and is_plain and is_half and is_whole


def as_rotated(options: Options) -> Options:
    """The problem of the attention kernel over rotated copies. Pages of one token become contiguous rows."""
    found = dataclasses.replace(options, position_encoding="NONE")
    return dataclasses.replace(found, kv_source="ragged", page_size=0) if options.page_size == 1 else found


def spec_of(options: Options) -> KernelSpec:
    """The kernel that rotates."""
    return KernelSpec(
        "rotate_pages", q_dtype=options.q_dtype, head_dim_qk=options.head_dim_qk, head_dim_vo=options.head_dim_vo
    )


class RotatedPages(NamedTuple):
    """The copies of one plan: pages in the order of its page numbers, or rows, of which each run writes those from
    `first` on; and q."""

    first: int  # among the entries of kv_indices; ragged: rows
    end: int
    k: int  # address
    v: int  # 0: V is read where it is
    q: int
    numbers: int  # address of the page numbers that the attention kernel reads; 0: it reads rows

    @property
    def is_paged(self) -> bool:
        """Whether the attention kernel reads pages."""
        return self.numbers != 0

    @property
    def q_address(self) -> int | None:
        """Where the attention kernel reads q; None: where it is."""
        return self.q

    @staticmethod
    def below(limit: int, batch: native.BatchStruct, options: Options) -> RotatedPages:
        """The copies at the end of the memory before `limit`; `k` is where they begin."""
        end, numbers, v = batch.kv_end, 0, 0
        rows = end * max(1, options.page_size) * options.num_kv_heads
        if options.page_size > 1:
            limit = numbers = align_down(limit - end * _NUMBER_BYTES)
        if options.is_paged:
            limit = v = align_down(limit - rows * options.head_dim_vo * _ELEMENT_BYTES)
        row_bytes = options.head_dim_qk * _ELEMENT_BYTES
        q = align_down(limit - batch.rows_end * options.num_q_heads * row_bytes)
        return RotatedPages(batch.kv_begin, end, align_down(q - rows * row_bytes), v, q, numbers)

    def views(self, options: Options) -> dict[str, View]:
        """K, and V unless it is read where it is, as paged or ragged tensors."""
        heads, page = options.num_kv_heads, max(1, options.page_size)
        dims = {"K": options.head_dim_qk} | ({"V": options.head_dim_vo} if self.v else {})
        return {
            name: View(self.end, page, heads, dim, page * heads * dim if self.is_paged else 0, heads * dim, dim)
            for name, dim in dims.items()
        }

    def bind(
        self,
        given: native.RotatePagesParams,
        views: dict[str, View],
        options: Options,
        params: native.AttentionParams,
    ) -> None:
        """All parameters except the addresses of q and of the cache, which has the strides of `views`; and the page
        numbers and q of the attention kernel."""
        given.kv_indices = params.kv_indices if options.is_paged else None
        given.plan, given.k_pages, given.v_pages, given.numbers = params.plan, self.k, self.v, self.numbers
        given.first, given.count, given.num_pages = self.first, self.end - self.first, views["K"].num_pages
        given.page = native.make_fast_div(max(1, options.page_size))
        given.num_q_heads, given.num_kv_heads = options.num_q_heads, options.num_kv_heads
        given.rope_scale, given.rope_theta = params.rope_scale, params.rope_theta
        for side, view in ((given.k, views["K"]), (given.v, views["V"])):
            side.page_stride, side.token_stride, side.head_stride = view[4:7]
        given.q_rows, given.q_row_stride, given.q_head_stride = self.q, params.q_row_stride, params.q_head_stride
        params.q_row_stride, params.q_head_stride = options.num_q_heads * options.head_dim_qk, options.head_dim_qk
        if self.is_paged:
            params.kv_indices = self.numbers
