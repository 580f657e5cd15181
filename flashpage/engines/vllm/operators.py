"""The operators of vLLM's first paged attention: torch.ops.flashpage.paged_attention_v1, paged_attention_v2,
reshape_and_cache and reshape_and_cache_flash, with vLLM's schemas and layouts. Importing this module registers them.

The functions here call the operators with vLLM's defaults. v1 and v2 give the same result; v2 cuts sequences at
multiples of 512 tokens and also writes the state of each partition to three more tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ...base import checks
from ...base.errors import FlashpageError, RunError
from ...base.tensor_memory import check_apart
from ...wrappers import operators
from . import cache_layout, decode, write
from .gathered_decode import PARTITION_TOKENS, Partitions, Sequences, check_shapes, checked, runner

__all__ = ["paged_attention_v1", "paged_attention_v2", "reshape_and_cache", "reshape_and_cache_flash", "split_kv_cache"]

_LN2 = math.log(2.0)
_COMMON = (
    "Tensor query, Tensor key_cache, Tensor value_cache, int num_kv_heads, float scale, Tensor block_tables, "
    "Tensor seq_lens, int block_size, int max_seq_len, Tensor? alibi_slopes, str kv_cache_dtype, Tensor k_scale, "
    "Tensor v_scale, int tp_rank, int blocksparse_local_blocks, int blocksparse_vert_stride, "
    "int blocksparse_block_size, int blocksparse_head_sliding_step) -> ()"
)
_WRITE = (
    "(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping, "
    "str kv_cache_dtype, Tensor k_scale, Tensor v_scale) -> ()"
)


def paged_attention_v1(
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    num_kv_heads: int,
    scale: float,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: torch.Tensor | None,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    tp_rank: int = 0,
    blocksparse_local_blocks: int = 0,
    blocksparse_vert_stride: int = 0,
    blocksparse_block_size: int = 64,
    blocksparse_head_sliding_step: int = 0,
) -> None:
    """Attention of one query row for each sequence, over a cache of blocks.

    Args:
        out: [num_seqs, num_heads, head_size], written. A sequence without tokens gets 0.
        query: [num_seqs, num_heads, head_size], any strides, last dimension contiguous.
        key_cache: [num_blocks, num_kv_heads, head_size / x, block_size, x], x = 16 / bytes of an element.
        value_cache: [num_blocks, num_kv_heads, head_size, block_size].
        block_tables, seq_lens: [num_seqs, most blocks] and [num_seqs], int32.
        max_seq_len: at least the longest of seq_lens. Tokens past max_seq_len or block_tables are ignored on a card,
            where the host does not read the lengths, and are an error on the CPU.
        alibi_slopes: [num_heads] fp32: a score gets slope x (token - last token).
        kv_cache_dtype: "auto": the caches' own type; "fp8" ("fp8_e4m3") or "fp8_e5m2": the type in uint8 caches, whose
            values are multiplied by k_scale and v_scale (one fp32 value each).
        tp_rank, blocksparse_*: with blocksparse_vert_stride > 1, a row sees the blocksparse_local_blocks nearest blocks
            of blocksparse_block_size tokens, and every blocksparse_vert_stride-th one, shifted from head to head.
    """
    sparse = (tp_rank, blocksparse_local_blocks, blocksparse_vert_stride, blocksparse_block_size)
    caches = (key_cache, value_cache, num_kv_heads, scale, block_tables, seq_lens, block_size, max_seq_len)
    rest = (alibi_slopes, kv_cache_dtype, k_scale, v_scale, *sparse, blocksparse_head_sliding_step)
    _call("paged_attention_v1", out, query, *caches, *rest)


def paged_attention_v2(
    out: torch.Tensor,
    exp_sums: torch.Tensor,
    max_logits: torch.Tensor,
    tmp_out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    num_kv_heads: int,
    scale: float,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: torch.Tensor | None,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    tp_rank: int = 0,
    blocksparse_local_blocks: int = 0,
    blocksparse_vert_stride: int = 0,
    blocksparse_block_size: int = 64,
    blocksparse_head_sliding_step: int = 0,
) -> None:
    """`paged_attention_v1` in partitions of 512 tokens.

    Args:
        exp_sums, max_logits: [num_seqs, num_heads, partitions] fp32, written for each partition of a sequence:
            max_logits + log(exp_sums) is the log of the partition's sum of weights (-inf and 0 if nothing is visible).
            How the sum is divided between the two depends on the device.
        tmp_out: [num_seqs, num_heads, partitions, head_size], written for the same partitions: their own attention.

    The other arguments are those of paged_attention_v1.
    """
    sparse = (tp_rank, blocksparse_local_blocks, blocksparse_vert_stride, blocksparse_block_size)
    caches = (key_cache, value_cache, num_kv_heads, scale, block_tables, seq_lens, block_size, max_seq_len)
    rest = (alibi_slopes, kv_cache_dtype, k_scale, v_scale, *sparse, blocksparse_head_sliding_step)
    _call("paged_attention_v2", out, exp_sums, max_logits, tmp_out, query, *caches, *rest)


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> None:
    """Writes new tokens to their slots of a cache that paged_attention_v1 reads.

    Args:
        key, value: [tokens, num_kv_heads, head_size].
        key_cache, value_cache: as in paged_attention_v1, written.
        slot_mapping: [tokens], block x block_size + offset; tokens with negative slots are not written.
        kv_cache_dtype, k_scale, v_scale: fp8 caches hold key / k_scale and value / v_scale, saturated.
    """
    _call("reshape_and_cache", key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale)


def reshape_and_cache_flash(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> None:
    """`reshape_and_cache` for caches of rows, [num_blocks, block_size, num_kv_heads, head_size], any strides."""
    _call("reshape_and_cache_flash", key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale)


def split_kv_cache(kv_cache: torch.Tensor, num_kv_heads: int, head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of a tensor [2, num_blocks, block_size x num_kv_heads x head_size] as key cache and value cache."""
    checks.tensor(kv_cache, "kv_cache", RunError)
    for name, value in (("num_kv_heads", num_kv_heads), ("head_size", head_size)):
        checks.whole(name, value, 1, error=RunError)
    x, row = 16 // kv_cache.element_size(), num_kv_heads * head_size
    if kv_cache.dim() != 3 or kv_cache.shape[0] != 2 or kv_cache.shape[2] % row or head_size % x:
        raise RunError(
            f"kv_cache has shape {tuple(kv_cache.shape)}: pass [2, num_blocks, block_size x {row}], as "
            f"num_kv_heads={num_kv_heads} and head_size={head_size} (a multiple of {x}) say."
        )
    blocks = kv_cache.shape[1]
    key_cache = kv_cache[0].view(blocks, num_kv_heads, head_size // x, -1, x)
    return key_cache, kv_cache[1].view(blocks, num_kv_heads, head_size, -1)


# ---------------------------------------------------------------- implementations


def _check_rows(given: Sequences, out: torch.Tensor) -> None:
    """Checks what the kernels of decode.py would read or write elsewhere."""
    query, numbers = given.query, (torch.int32, torch.int64)
    is_whole = given.block_tables.dtype in numbers and given.seq_lens.dtype in numbers
    if (
        not is_whole
        or given.value_cache.dtype != given.key_cache.dtype
        or query.dim() != 3
        or out.shape != query.shape
        or given.block_tables.dim() != 2
    ):
        check_shapes(given, out)
    check_apart(out, "out", query, "query", RunError)


def _paged_attention_v1(out: torch.Tensor, *values: Any) -> None:
    given = Sequences.of(values)
    if decode.serves(given, out):
        _check_rows(given, out)
        decode.attention(given, out, None)
        return
    given = checked(given, out)
    runner(out.device).run(given, Partitions.of(given.seq_lens, 0), out, None)


def _paged_attention_v2(
    out: torch.Tensor, exp_sums: torch.Tensor, max_logits: torch.Tensor, tmp_out: torch.Tensor, *values: Any
) -> None:
    given = Sequences.of(values)
    on_card = decode.serves(given, out)
    if on_card:
        _check_rows(given, out)
    else:
        given = checked(given, out)
        check_apart(out, "out", given.query, "query", RunError)
    num_seqs, num_heads = given.query.shape[:2]
    most = -(-given.max_seq_len // PARTITION_TOKENS)
    for name, tensor, rest, dtype in (
        ("exp_sums", exp_sums, (), torch.float32),
        ("max_logits", max_logits, (), torch.float32),
        ("tmp_out", tmp_out, out.shape[2:], out.dtype),
    ):
        checks.same_device(tensor, out.device, name, RunError)
        fits = tensor.dim() == 3 + len(rest) and tensor.shape[:2] == (num_seqs, num_heads) and tensor.shape[3:] == rest
        if not fits or tensor.shape[2] < most or tensor.dtype != dtype:
            sizes = ", ".join(map(str, (num_seqs, num_heads, f"{most} or more", *rest)))
            raise RunError(f"{name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}: pass [{sizes}] {dtype}.")
    if on_card:
        decode.attention(given, out, decode.Partials(exp_sums, max_logits, tmp_out))
        return
    partitions = Partitions.of(given.seq_lens, PARTITION_TOKENS)
    lse = out.new_empty((len(partitions.sequence), num_heads), dtype=torch.float32)
    found = runner(out.device).run(given, partitions, None, lse)
    where = [t.to(out.device) for t in (partitions.sequence, partitions.first_token // PARTITION_TOKENS)]
    tmp_out[where[0], :, where[1]] = found.to(tmp_out.dtype)
    max_logits[where[0], :, where[1]] = lse * _LN2
    exp_sums[where[0], :, where[1]] = (lse > -math.inf).float()
    states = lse.new_full((num_seqs, max(1, tmp_out.shape[2]), num_heads), -math.inf)
    states[where[0], where[1]] = lse
    merged = torch.empty_like(out, memory_format=torch.contiguous_format)
    if tmp_out.shape[2]:
        operators.call(
            "merge_states_into", tmp_out.transpose(1, 2), states, merged, lse.new_empty((num_seqs, num_heads))
        )
    else:
        merged.zero_()
    out.copy_(merged)


def _write(layout: str, on_cpu: Callable[..., None]) -> Callable[..., None]:
    """The implementation of reshape_and_cache or reshape_and_cache_flash."""

    def implementation(key: torch.Tensor, *rest: Any) -> None:
        write.write(layout, key, *rest) if key.is_cuda else on_cpu(key, *rest)

    return implementation


def _nothing(*_: Any) -> None:
    """The fake implementation: the operators only write into their arguments."""


_IMPLEMENTATIONS: dict[str, tuple[str, Callable[..., None]]] = {
    "paged_attention_v1": ("(Tensor(a!) out, " + _COMMON, _paged_attention_v1),
    "paged_attention_v2": (
        "(Tensor(a!) out, Tensor(b!) exp_sums, Tensor(c!) max_logits, Tensor(d!) tmp_out, " + _COMMON,
        _paged_attention_v2,
    ),
    "reshape_and_cache": (_WRITE, _write("blocks", cache_layout.write_blocks)),
    "reshape_and_cache_flash": (_WRITE, _write("rows", cache_layout.write_rows)),
}


def _check_types(name: str, args: tuple[Any, ...]) -> None:
    """Raises for the first argument whose type is not that of the operator's schema."""
    for argument, value in zip(getattr(torch.ops.flashpage, name).default._schema.arguments, args, strict=False):
        kind = str(argument.type)
        if kind == "Tensor" or (kind == "Optional[Tensor]" and value is not None):
            checks.tensor(value, argument.name, RunError)
        elif kind == "int":
            checks.whole(argument.name, value, -(2**63), 2**63 - 1, RunError)
        elif kind == "float":
            checks.real(argument.name, value, error=RunError)
        elif kind == "str" and not isinstance(value, str):
            raise RunError(f"{argument.name}={checks.shown(value)} is a {type(value).__name__}: pass a string.")


def _call(name: str, *args: Any) -> None:
    """Calls the implementation directly, or the operator if torch traces or intercepts calls."""
    if torch.compiler.is_dynamo_compiling() or torch._C._len_torch_dispatch_stack():
        getattr(torch.ops.flashpage, name)(*args)
        return
    try:
        _IMPLEMENTATIONS[name][1](*operators.judged(name, args))
    except FlashpageError as error:
        error.use_names({"q": "query", "paged_kv_cache[0]": "key_cache", "paged_kv_cache[1]": "value_cache"})
        raise
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError):  # an argument of another type?
        _check_types(name, args)
        raise


_library = torch.library.Library("flashpage", "FRAGMENT")
for _name, (_schema, _implementation) in _IMPLEMENTATIONS.items():
    _library.define(_name + _schema, tags=(torch.Tag.needs_fixed_stride_order,))
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _implementation, _key)
    torch.library.register_fake(f"flashpage::{_name}", _nothing, lib=_library)
