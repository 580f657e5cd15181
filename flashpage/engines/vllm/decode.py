"""vLLM's operators on a card: kernels that read and write blocks in place, with lengths and tables on the device.

A call launches at most two kernels and never waits for the device, so it may stand in a captured graph; its temporary
memory is torch's. Structs are built once for each form (shapes, strides and types) of the tensors.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any, NamedTuple

import torch

from ... import jit, native
from ...base import checks
from ...base.dtypes import DType
from ...base.errors import RunError
from ...kernels import blocks, devices, schedules
from ...plan.session import current_stream
from . import cache_layout
from .gathered_decode import PARTITION_TOKENS, Sequences, check_shapes, check_slopes

_LEAST_TOKENS = 128  # least tokens in a CTA's share: include/flashpage/kernels/blocks/steps.h
_MOST_BOUND = 256  # number of forms whose structs are kept
_MOST_HEAD_SIZE = 256

_local = threading.local()  # bound calls of this thread; a struct serves one call at a time


class Partials(NamedTuple):
    """The outputs of paged_attention_v2 for each partition."""

    exp_sums: torch.Tensor  # [num_seqs, num_heads, partitions] fp32
    max_logits: torch.Tensor  # [num_seqs, num_heads, partitions] fp32
    tmp_out: torch.Tensor  # [num_seqs, num_heads, partitions, head_size]


def serves(given: Sequences, out: torch.Tensor) -> bool:
    """Whether the kernels here support such tensors; others go to gathered_decode."""
    query, cache = given.query, given.key_cache
    stored = cache_layout.FP8.get(given.kv_cache_dtype, cache.dtype)
    return (
        query.is_cuda
        and query.dtype in (torch.float16, torch.bfloat16)
        and out.dtype == query.dtype
        and stored in (query.dtype, *cache_layout.FP8.values())
        and query.shape[-1] <= _MOST_HEAD_SIZE
        and given.block_size >= 8
        and given.block_size & (given.block_size - 1) == 0
    )


def attention(given: Sequences, out: torch.Tensor, partials: Partials | None) -> None:
    """paged_attention_v1 (partials None) or _v2. Tokens past max_seq_len or block_tables are not read."""
    query, keys, values = given.query, given.key_cache, given.value_cache
    rows = query.device, query.dtype, query.shape[1:], query.stride(), out.stride()
    caches = keys.device, keys.dtype, keys.shape, keys.stride(), values.device, values.shape, values.stride()
    key = rows, caches, given.num_kv_heads, given.block_size, given.kv_cache_dtype, given.sparse, partials is None
    bound: dict[Any, _Attention] = _local.__dict__.setdefault("attention", {})
    call = bound.get(key)
    if call is None:
        if len(bound) >= _MOST_BOUND:
            bound.clear()
        call = bound[key] = _Attention(given, out)
    call.run(given, out, partials)


class _Attention:
    """Kernels and parameters for tensors of one form."""

    def __init__(self, given: Sequences, out: torch.Tensor) -> None:
        check_shapes(given, out)
        query, cache, values = given.query, given.key_cache, given.value_cache
        _check_places(query, out, cache, values)
        self.device, (self.num_heads, head_size) = query.device, query.shape[1:]
        q_dtype = DType.of(query.dtype)
        kv_dtype = DType.of(cache_layout.element_type(cache, given.kv_cache_dtype))
        self.has_scales = given.kv_cache_dtype != "auto"
        group = self.num_heads // given.num_kv_heads
        card = devices.of(query.device)
        decode = blocks.decode_spec(q_dtype, kv_dtype, head_size, group, card)
        row_tiles = -(-group // decode.rows)
        self._decode, self._merge = jit.prebuild((decode, blocks.merge_spec(q_dtype)), query.device)
        self._units = given.num_kv_heads * row_tiles  # units in a sequence
        self._most_ctas = schedules.resident_ctas(self._decode.info, card)
        rows = self._most_ctas * 2 * decode.rows
        self._lses = rows * head_size * 4  # layout of v1's memory: where partial LSEs and cuts begin, and its bytes
        self._cuts = self._lses + rows * 4
        self._bytes = self._cuts + self._most_ctas * 16
        self._merge_rows = min(decode.rows, group)  # packed rows in a CTA's last unit
        self._pdl = int(card.has_pdl)
        size = cache.element_size()
        self.params = native.BlockAttentionParams(
            q_row_stride=query.stride(0),
            q_head_stride=query.stride(1),
            out_row_stride=out.stride(0),
            out_head_stride=out.stride(1),
            k_block_stride=cache.stride(0) * size,
            k_head_stride=cache.stride(1) * size,
            v_block_stride=values.stride(0) * size,
            v_head_stride=values.stride(1) * size,
            pattern=_pattern(given, self.num_heads),
            num_q_heads=self.num_heads,
            num_kv_heads=given.num_kv_heads,
            head_dim=head_size,
            group=group,
            tile_q=decode.rows,
            row_tiles=row_tiles,
            log_block_size=given.block_size.bit_length() - 1,
        )
        self._address = ctypes.addressof(self.params)

    def run(self, given: Sequences, out: torch.Tensor, partials: Partials | None) -> None:
        num_seqs = len(given.query)
        self._check(given, out)
        if num_seqs == 0:
            return
        given = self._readable(given)
        params = self._point(given, out)
        max_tokens = params.max_tokens
        shares = num_seqs * self._units * -(-max_tokens // (_LEAST_TOKENS if partials is None else PARTITION_TOKENS))
        ctas = max(1, min(self._most_ctas, shares))
        if partials is None:
            memory = torch.empty(self._bytes, dtype=torch.uint8, device=self.device)  # allocated in stream order
            address = memory.data_ptr()
            params.partial_out, params.partial_lse = address, address + self._lses
            params.cuts = address + self._cuts
            merges = ctas * self._merge_rows
        else:
            params.partitions = max(1, _partitions(partials, out))
            params.tmp_out = partials.tmp_out.data_ptr()
            params.exp_sums, params.max_logits = partials.exp_sums.data_ptr(), partials.max_logits.data_ptr()
            merges = num_seqs * self.num_heads if max_tokens > PARTITION_TOKENS else 0
        launch, stream = native.load().fp_launch, current_stream(self.device.index)
        native.check(launch(self._decode.handle, self._address, ctas, stream, self._pdl))
        native.check(launch(self._merge.handle, self._address, merges, stream, self._pdl))

    def _point(self, given: Sequences, out: torch.Tensor) -> native.BlockAttentionParams:
        """The parameters, with the addresses and numbers of this call."""
        params, tables, slopes = self.params, given.block_tables, given.alibi_slopes
        params.q, params.out = given.query.data_ptr(), out.data_ptr()
        params.k, params.v = given.key_cache.data_ptr(), given.value_cache.data_ptr()
        if (params.q | params.out | params.k | params.v) % 16:
            _check_places(given.query, out, given.key_cache, given.value_cache)
        params.block_tables, params.table_stride = tables.data_ptr(), tables.stride(0)
        params.seq_lens = given.seq_lens.data_ptr()
        params.alibi_slopes = None if slopes is None else slopes.data_ptr()
        if self.has_scales:
            params.k_scale, params.v_scale = given.k_scale.data_ptr(), given.v_scale.data_ptr()
        params.score_scale, params.num_seqs = given.scale, len(given.query)
        params.max_tokens = min(given.max_seq_len, tables.shape[1] * given.block_size)
        return params

    def _readable(self, given: Sequences) -> Sequences:
        """Lengths and tables in the types that the kernels read; usually they are already."""
        tables, lens = _whole(given.block_tables), _whole(given.seq_lens)
        if tables is not given.block_tables or lens is not given.seq_lens:
            given = given._replace(block_tables=tables, seq_lens=lens)
        if not self.has_scales:
            return given
        scales = [
            cache_layout.scale_on(self.device, *named)
            for named in ((given.k_scale, "k_scale"), (given.v_scale, "v_scale"))
        ]
        return given if scales[0] is given.k_scale and scales[1] is given.v_scale else given._replace(
            k_scale=scales[0], v_scale=scales[1]
        )  # fmt: skip

    def _check(self, given: Sequences, out: torch.Tensor) -> None:
        """Checks what the form does not determine."""
        tables, lens, slopes, count = given.block_tables, given.seq_lens, given.alibi_slopes, len(given.query)
        fits = out.shape == given.query.shape and tables.shape[0] == count and lens.shape == (count,)
        if not (fits and tables.device == lens.device == out.device == self.device):
            check_shapes(given, out)
        if slopes is not None:
            check_slopes(slopes, self.num_heads)
            checks.same_device(slopes, self.device, "alibi_slopes", RunError)


def _whole(numbers: torch.Tensor) -> torch.Tensor:
    """The tensor as int32, contiguous in its last dimension."""
    if numbers.dtype == torch.int32 and (numbers.shape[-1] <= 1 or numbers.stride(-1) == 1):
        return numbers
    return numbers.to(torch.int32).contiguous()


def _partitions(partials: Partials, out: torch.Tensor) -> int:
    """The number of partitions; checks that the three outputs agree on it."""
    count = partials.tmp_out.shape[2]
    for name, tensor, dtype in zip(Partials._fields, partials, (torch.float32, torch.float32, out.dtype), strict=True):
        if not tensor.is_contiguous() or tensor.shape[2] != count or tensor.dtype != dtype:
            raise RunError(
                f"{name} has shape {tuple(tensor.shape)}, strides {tensor.stride()} and dtype {tensor.dtype}. "
                f"On a card all three outputs must be contiguous with {count} partitions, and {name} {dtype}."
            )
    return count


def _pattern(given: Sequences, num_heads: int) -> native.BlockPattern:
    sparse = given.sparse
    if not sparse.is_sparse:
        return native.BlockPattern()
    step = sparse.head_sliding_step
    heads = num_heads if step >= 0 else given.num_kv_heads
    return native.BlockPattern(
        block_size=native.make_fast_div(sparse.block_size),
        stride=native.make_fast_div(sparse.vert_stride),
        local_blocks=sparse.local_blocks,
        first=sparse.tp_rank * heads * abs(step) + 1,
        head_step=max(step, 0),
        kv_head_step=max(-step, 0),
    )


def _check_places(query: torch.Tensor, out: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor) -> None:
    """Checks that rows and blocks begin on multiples of 16 bytes, and that a head's block is contiguous."""
    block_size, x = key_cache.shape[3:]
    for name, tensor, inner in (
        ("query", query, (1,)),
        ("out", out, (1,)),
        ("key_cache", key_cache, (block_size * x, x, 1)),
        ("value_cache", value_cache, (block_size, 1)),
    ):
        strides = [stride if size > 1 else 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
        outer, found = strides[: -len(inner)], strides[-len(inner) :]
        if any(here not in (0, wanted) for here, wanted in zip(found, inner, strict=True)):
            raise RunError(
                f"{name} has strides {tensor.stride()}. "
                f"On a card a head's part of a block must be contiguous: the last strides must be {inner}."
            )
        if any(stride * tensor.element_size() % 16 for stride in outer) or tensor.data_ptr() % 16:
            raise RunError(
                f"{name} has strides {tensor.stride()} and address {tensor.data_ptr():#x}. "
                "On a card rows and blocks must begin on multiples of 16 bytes."
            )
