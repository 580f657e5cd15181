"""vLLM's paged_attention_v1 and _v2 by gathering: one row a sequence, over a cache of blocks, in partitions of tokens.

The blocks in use are gathered into rows, over which a decode plan runs; a partition is a request of the plan. On a card
only head sizes that the kernels of flashpage/engines/vllm/decode.py do not support come here.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import torch

from ...base import checks, tensor_memory
from ...base.errors import RunError
from ...plan.lengths import Lengths
from ...plan.page_indices import Pages
from ...plan.session import current_stream
from ...run.checks import NO_SCALES
from ...variants.variant import Variant
from ...wrappers.base import DECODE, Attention
from ...wrappers.plan_arguments import DecodeArguments
from . import cache_layout

PARTITION_TOKENS = 512  # of paged_attention_v2

_WORKSPACE_BYTES = 32 << 20
_POSITION = "kv_idx + first_token(b)"  # position of a token in its sequence
_BIAS = f"score + alibi_slopes(h) * to_float({_POSITION} - last_token(b))"
_BLOCK = f"floor_div({_POSITION}, sparse_block)"
_PATTERN = (
    f"logical_or(floor_div(last_token(b), sparse_block) - {_BLOCK} < local_blocks, "
    f"mod({_BLOCK} + head_offset(h), vert_stride) == 0)"
)

_local = threading.local()  # runners of this thread, by device and stream


class BlockSparse(NamedTuple):
    """Block-sparse attention: the nearest blocks of each sequence and every `vert_stride`-th one, shifted by head."""

    tp_rank: int = 0
    local_blocks: int = 0
    vert_stride: int = 0  # 1 or less: all blocks are visible
    block_size: int = 64  # tokens
    head_sliding_step: int = 0  # below 0: the shift goes by KV heads instead of query heads

    @property
    def is_sparse(self) -> bool:
        return self.vert_stride > 1

    def check(self, num_heads: int) -> None:
        """Checks numbers by which kernels divide, and products that they hold in 32 bits."""
        if self.vert_stride.__class__ is int and self.vert_stride <= 1:
            return
        least = {"tp_rank": 0, "local_blocks": 0, "vert_stride": 0, "block_size": 1, "head_sliding_step": 1 - 2**31}
        for field, value in zip(self._fields, self, strict=True):
            name = field if field == "tp_rank" else f"blocksparse_{field}"
            checks.whole(name, value, least[field], error=RunError)
        if (self.tp_rank + 1) * num_heads * abs(self.head_sliding_step) >= 2**31 - 1:
            raise RunError(
                f"blocksparse_head_sliding_step={self.head_sliding_step} with tp_rank={self.tp_rank} and {num_heads} "
                "heads shifts by more than 31 bits hold: pass a smaller step."
            )

    def head_offsets(self, num_heads: int, num_kv_heads: int) -> torch.Tensor:
        """[num_heads] int32"""
        heads, step = torch.arange(num_heads, dtype=torch.int32, device="cpu"), self.head_sliding_step
        if step >= 0:
            return (self.tp_rank * num_heads + heads) * step + 1
        groups = heads.div(num_heads // num_kv_heads, rounding_mode="floor")
        return (self.tp_rank * num_kv_heads + groups) * -step + 1


class Sequences(NamedTuple):
    """The arguments that both operators share."""

    query: torch.Tensor  # [num_seqs, num_heads, head_size], any strides, last dimension contiguous
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    num_kv_heads: int
    scale: float
    block_tables: torch.Tensor  # [num_seqs, blocks]
    seq_lens: torch.Tensor  # [num_seqs]; after the checks int64 on the host
    block_size: int
    max_seq_len: int
    alibi_slopes: torch.Tensor | None  # [num_heads] fp32
    kv_cache_dtype: str
    k_scale: torch.Tensor
    v_scale: torch.Tensor
    sparse: BlockSparse

    @staticmethod
    def of(values: tuple[Any, ...]) -> Sequences:
        """All but sparse, in the operators' order; numbers and types are checked here, shapes by check_shapes."""
        count = len(values) - len(BlockSparse._fields)
        given = Sequences(*values[:count], BlockSparse(*values[count:]))  # type: ignore[call-arg]
        for name in ("query", "key_cache", "value_cache", "block_tables", "seq_lens"):
            if not isinstance(tensor := getattr(given, name), torch.Tensor):
                checks.tensor(tensor, name, RunError)
        for name in ("num_kv_heads", "block_size"):
            checks.whole(name, getattr(given, name), 1, error=RunError)
        checks.whole("max_seq_len", given.max_seq_len, 0, error=RunError)
        checks.real("scale", given.scale, error=RunError)
        given.sparse.check(given.query.shape[1] if given.query.dim() == 3 else 1)
        return given


class Partitions(NamedTuple):
    """The sequence and tokens of each request of a plan, on the host."""

    sequence: torch.Tensor  # [requests]
    first_token: torch.Tensor
    kv_lens: torch.Tensor

    @staticmethod
    def of(seq_lens: torch.Tensor, tokens: int) -> Partitions:
        """Pieces of `tokens` tokens; 0: one request for each sequence."""
        if not tokens:
            return Partitions(torch.arange(len(seq_lens), device="cpu"), torch.zeros_like(seq_lens), seq_lens)
        counts = (seq_lens + tokens - 1) // tokens
        sequence = torch.repeat_interleave(torch.arange(len(seq_lens), device="cpu"), counts)
        first = (torch.arange(len(sequence), device="cpu") - (counts.cumsum(0) - counts)[sequence]) * tokens
        return Partitions(sequence, first, (seq_lens[sequence] - first).clamp(max=tokens))


class Runner:
    """Decode plans and their variants, which read tensors of the newest call."""

    def __init__(self, device: torch.device) -> None:
        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._attention = Attention(workspace, names=DECODE, owner="paged_attention")
        self._variants = {
            (has_bias, is_sparse): Variant(logit=_BIAS * has_bias, mask=_PATTERN * is_sparse)
            for has_bias in (False, True)
            for is_sparse in (False, True)
        }

    def run(
        self, given: Sequences, partitions: Partitions, out: torch.Tensor | None, lse: torch.Tensor | None
    ) -> torch.Tensor:
        """The attention of every partition, [partitions, num_heads, head_size]."""
        query = given.query
        if not int(partitions.kv_lens.sum()):
            if lse is not None:
                lse.fill_(-torch.inf)
            return query.new_zeros((len(partitions.kv_lens), *query.shape[1:])) if out is None else out.zero_()
        if len(partitions.sequence) != len(query) or bool((partitions.sequence.diff() != 1).any()):
            query = query[partitions.sequence.to(query.device)]
        blocks, cache = _gathered(given)
        counts = (partitions.kv_lens + given.block_size - 1) // given.block_size
        indptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        arguments = DecodeArguments(
            query.shape[1],
            given.num_kv_heads,
            query.shape[2],
            given.block_size,
            q_data_type=query.dtype,
            kv_data_type=cache[0].dtype,
            sm_scale=given.scale,
            own={"variant": self._variant(given, partitions)},
        )
        lengths = Lengths(kv_indptr=indptr, kv_lens=partitions.kv_lens)
        self._attention.plan(lengths, Pages(blocks), *arguments.checked())
        scales = NO_SCALES
        if given.kv_cache_dtype != "auto":
            given_scales = ((given.k_scale, "k_scale"), (given.v_scale, "v_scale"))
            k_scale, v_scale = (cache_layout.scale_on(query.device, *named) for named in given_scales)
            scales = (None, k_scale.reshape(1), v_scale.reshape(1))
        found: torch.Tensor = self._attention.run(query, cache, out, lse, scales=scales)
        return found

    def _variant(self, given: Sequences, partitions: Partitions) -> Variant | None:
        device, sparse, slopes = given.query.device, given.sparse, given.alibi_slopes
        key = (slopes is not None, sparse.is_sparse)
        if not any(key):
            return None
        variant, (num_heads, _) = self._variants[key], given.query.shape[1:]
        last_token = given.seq_lens[partitions.sequence] - 1
        variant.tensors["first_token"] = partitions.first_token.to(device, torch.int32)
        variant.tensors["last_token"] = last_token.to(device, torch.int32)
        if slopes is not None:
            check_slopes(slopes, num_heads)
            variant.tensors["alibi_slopes"] = slopes
        if key[1]:
            variant.tensors["head_offset"] = sparse.head_offsets(num_heads, given.num_kv_heads).to(device)
            variant.scalars.update(
                sparse_block=sparse.block_size, local_blocks=sparse.local_blocks, vert_stride=sparse.vert_stride
            )
        return variant


def runner(device: torch.device) -> Runner:
    """This thread's runner for a device and stream, so that work on two streams shares no memory."""
    key = (device, current_stream(device.index) if device.type == "cuda" else 0)
    runners = _local.__dict__.setdefault("runners", {})
    if key not in runners:
        runners[key] = Runner(device)
    found: Runner = runners[key]
    return found


def check_slopes(slopes: torch.Tensor, num_heads: int) -> None:
    """Checks alibi_slopes."""
    if slopes.shape != (num_heads,) or slopes.dtype != torch.float32:
        raise RunError(f"alibi_slopes has shape {tuple(slopes.shape)}: pass float32 [{num_heads}], one for each head.")


def checked(given: Sequences, out: torch.Tensor) -> Sequences:
    """Checks all arguments, and copies the lengths to the host."""
    check_shapes(given, out)
    lens = given.seq_lens.cpu().long()
    room = given.block_tables.shape[1] * given.block_size
    if lens.numel() and (int(lens.max()) > min(given.max_seq_len, room) or int(lens.min()) < 0):
        raise RunError(
            f"seq_lens reaches {int(lens.max())} (least {int(lens.min())}). "
            f"Pass lengths from 0 to max_seq_len={given.max_seq_len} that fit block_tables ({room} tokens)."
        )
    return given._replace(seq_lens=lens)


def check_shapes(given: Sequences, out: torch.Tensor) -> None:
    """Checks shapes and devices."""
    sizes = cache_layout.block_sizes(given.key_cache, given.value_cache)
    query, tables, lens = given.query, given.block_tables, given.seq_lens
    if query.dim() != 3 or query.shape[2] != sizes.head_size or query.shape[1] % max(1, given.num_kv_heads):
        raise RunError(
            f"query has shape {tuple(query.shape)}. "
            f"Pass [num_seqs, num_heads, {sizes.head_size}], num_heads a multiple of {sizes.num_kv_heads}."
        )
    for name, value, found in (
        ("num_kv_heads", given.num_kv_heads, sizes.num_kv_heads),
        ("block_size", given.block_size, sizes.block_size),
    ):
        if value != found:
            raise RunError(f"{name}={value} but the caches have {found}: pass {found}.")
    if out.shape != query.shape or out.dtype != query.dtype:
        raise RunError(
            f"out has shape {tuple(out.shape)} and dtype {out.dtype}: "
            f"pass {tuple(query.shape)} and {query.dtype}, as query has."
        )
    tensor_memory.check_written(out, "out", RunError)
    for name, tensor in (("block_tables", tables), ("seq_lens", lens)):
        if tensor.dtype not in (torch.int32, torch.int64):
            raise RunError(f"{name} has dtype {tensor.dtype}: pass int32 or int64.")
    if tables.dim() != 2 or tables.shape[0] != len(query) or lens.shape != (len(query),):
        raise RunError(
            f"block_tables has shape {tuple(tables.shape)} and seq_lens has {tuple(lens.shape)}. "
            f"Pass one row and one length for each of {len(query)} sequences."
        )
    caches = (("key_cache", given.key_cache), ("value_cache", given.value_cache))
    for name, tensor in (*caches, ("block_tables", tables), ("seq_lens", lens), ("out", out)):
        checks.same_device(tensor, query.device, name, RunError)


def _gathered(given: Sequences) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """The page numbers of all sequences, joined, and the blocks that they name as rows [page, token, head, dim]."""
    counts = (given.seq_lens + given.block_size - 1) // given.block_size
    tables = given.block_tables
    is_used = torch.arange(tables.shape[1], device="cpu") < counts.unsqueeze(1)
    blocks, numbers = tables[is_used.to(tables.device)].long().unique(return_inverse=True)
    if blocks.is_cpu and blocks.numel() and not 0 <= int(blocks[0]) <= int(blocks[-1]) < len(given.key_cache):
        last = len(given.key_cache) - 1
        raise RunError(f"block_tables names blocks {int(blocks[0])} to {int(blocks[-1])}: pass 0 to {last}.")
    dtype = cache_layout.element_type(given.key_cache, given.kv_cache_dtype)
    keys, values = cache_layout.by_token(*(cache_layout.as_bytes(t) for t in (given.key_cache, given.value_cache)))
    cache = (keys[blocks].flatten(3), values[blocks].contiguous())
    return numbers.to(torch.int32), (cache[0].view(dtype), cache[1].view(dtype))
