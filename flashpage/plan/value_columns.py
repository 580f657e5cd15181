"""V of e4m3 is transposed before a Hopper prefill of e4m3 queries, whose products take V by columns.

The loading warps of prefill_sm90 otherwise transpose each tile of V that a unit reads, and a prefill reads a token once
for every 128 packed rows. So if enough rows see each token, a kernel that transposes V once costs less. K is read where
it is. The copy lies in the free part of the float workspace; if there is no room, the loading warps transpose.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from .. import native
from ..base.dtypes import DType
from ..base.kv_view import View
from ..kernels.kernel import COLUMN_POSITIONS
from ..kernels.options import Options
from ..kernels.spec import KernelSpec
from .copy_memory import align_down

NOTE = "V in e4m3: a kernel before this one transposes V once, for all tiles"

# Packed rows that see a token, and tokens that a row sees, on average (docs/tried.md). On an H200 the launch moves
# 256 bytes of a token and KV head at 4.5 TB/s, which takes 57 ps. In return a packed row's products with the token take
# 0.035 ps less, which 1,630 rows make up for; from 4,096 rows on at least 2% of the attention is gained. The launch
# itself takes some 2 us more, which a single prompt gains whose rows see 1,536 tokens.
LEAST_ROWS, LEAST_VISIBLE = 4096, 1536
_MOST_POSITIONS = 2**31 - 256  # the kernels count positions, and those of the tiles after them, in 32 bits
_WIDEST, _COLUMNS = 128, 32  # wider heads have shorter tiles; columns that two boxes divide


def transposes(options: Options) -> bool:
    """Whether copies for a prefill are of V by columns."""
    is_e4m3 = options.q_dtype is options.kv_dtype is DType.FLOAT8_E4M3 and not options.has_formats
    dims = (options.head_dim_qk, options.head_dim_vo)
    fits = all(dim % _COLUMNS == 0 and dim <= _WIDEST for dim in dims) and options.page_size % COLUMN_POSITIONS == 0
    is_plain = options.position_encoding == "NONE" and not options.chunk
    return is_e4m3 and fits and is_plain and options.kv_source in ("paged", "ragged")


def as_columns(options: Options) -> Options:
    """The problem of the attention kernel over the copy."""
    return dataclasses.replace(options, has_value_columns=True)


def spec_of(options: Options) -> KernelSpec:
    """The kernel that transposes."""
    return KernelSpec("value_columns", kv_dtype=options.kv_dtype, head_dim_vo=options.head_dim_vo)


class Columns(NamedTuple):
    """The copy of one plan: [num_kv_heads, head_dim_vo, positions]. Positions are those of tokens in a ragged V, or in
    the order of the page numbers."""

    first: int  # among the entries of kv_indices; ragged: rows
    end: int
    k: int  # where the copies of a plan begin: the address of V

    @property
    def v(self) -> int:
        """The address of V."""
        return self.k

    @property
    def is_paged(self) -> bool:
        """Whether the attention kernel reads pages of V."""
        return False

    @property
    def q_address(self) -> int | None:
        """Where the attention kernel reads q; None: where it is."""
        return None

    @staticmethod
    def below(limit: int, batch: native.BatchStruct, options: Options) -> Columns | None:
        """The copy at the end of the memory before `limit`. None: more positions than the kernels count."""
        positions = _positions(batch.kv_end, options)
        if positions > _MOST_POSITIONS:
            return None
        v = align_down(limit - positions * options.num_kv_heads * options.head_dim_vo)
        return Columns(batch.kv_begin, batch.kv_end, v)

    def views(self, options: Options) -> dict[str, View]:
        """V as a tensor whose rows are columns: tokens have the place of columns."""
        positions, dim = _positions(self.end, options), options.head_dim_vo
        return {"V": View(dim, 1, options.num_kv_heads, positions, 0, positions, dim * positions)}

    def bind(
        self,
        given: native.ValueColumnsParams,
        views: dict[str, View],
        options: Options,
        params: native.AttentionParams,
    ) -> None:
        """All parameters except the address of V, which has the strides of `views`."""
        given.kv_indices = params.kv_indices if options.is_paged else None
        given.columns, given.column_stride = self.v, _positions(self.end, options)
        given.first, given.count, given.num_pages = self.first, self.end - self.first, views["V"].num_pages
        given.page, given.num_kv_heads = native.make_fast_div(max(1, options.page_size)), options.num_kv_heads
        given.v.page_stride, given.v.token_stride, given.v.head_stride = views["V"][4:7]


def _positions(entries: int, options: Options) -> int:
    return -(-entries * max(1, options.page_size) // COLUMN_POSITIONS) * COLUMN_POSITIONS
