"""The kinds of arguments: which argument is of which kind, and which values are bad for a kind.

A badness changes the arguments of one call. Its expected outcome, unless expected.py has another one for the row:

    error    a FlashpageError that names the argument
    works    the result of the good arguments
    safe     one of the two
    clean    a FlashpageError, or any result
    any      any error or result, but no crash
    missing  a TypeError that names the argument
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from .scene import Arguments, Make

Change = Callable[[Make, Any], Any]  # the good value (None if the argument has none) -> the bad one


class NotApplicable(Exception):
    """This badness cannot be made from this value."""


@dataclasses.dataclass(frozen=True)
class Badness:
    name: str
    expect: str
    change: Change = lambda make, value: None
    cuda: bool = True  # False: values on a device are not checked, so the row runs on the CPU alone
    many: Callable[[Make, Arguments, str], None] | None = None  # changes several arguments, in place of `change`

    def apply(self, make: Make, given: Arguments, name: str, good: Any) -> None:
        if self.many is not None:
            self.many(make, given, name)
        else:
            given[name] = self.change(make, good)


def tensor(change: Callable[[torch.Tensor], Any]) -> Change:
    """A change of a tensor, or of the last tensor in a list."""

    def changed(make: Make, value: Any) -> Any:
        if isinstance(value, (list, tuple)) and value and isinstance(value[-1], torch.Tensor):
            return [*value[:-1], change(value[-1])]
        if not isinstance(value, torch.Tensor):
            raise NotApplicable
        return change(value)

    return changed


def constant(value: Any) -> Change:
    return lambda make, good: value


class NoMemory(torch.Tensor):
    """A tensor subclass without memory, such as a DTensor."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> NoMemory:
        made: NoMemory = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{function} of a tensor without memory")


def without_storage(value: torch.Tensor) -> torch.Tensor:
    value = value.clone()
    value.untyped_storage().resize_(0)
    return value


def strided(value: torch.Tensor) -> torch.Tensor:
    """Equal values with a stride of two in the last dimension."""
    if not value.dim() or value.shape[-1] < 2:
        raise NotApplicable
    wide = value.new_zeros(*value.shape[:-1], 2 * value.shape[-1])
    wide[..., ::2] = value
    return wide[..., ::2]


def with_first(number: float, dtype: torch.dtype | None = None) -> Callable[[torch.Tensor], torch.Tensor]:
    def changed(value: torch.Tensor) -> torch.Tensor:
        value = value.to(dtype, copy=True) if dtype is not None else value.clone()
        value.view(-1)[0] = number
        return value

    return changed


def with_last(number: int, dtype: torch.dtype | None = None) -> Callable[[torch.Tensor], torch.Tensor]:
    def changed(value: torch.Tensor) -> torch.Tensor:
        value = value.to(dtype, copy=True) if dtype is not None else value.clone()
        value.view(-1)[-1] = number
        return value

    return changed


def plus_2_32(value: torch.Tensor) -> torch.Tensor:
    """Equal to the good value in its low 32 bits."""
    return value.long() + 2**32


def flipped(value: torch.Tensor) -> torch.Tensor:
    if len(value) < 2 or bool((value == value.flip(0)).all()):
        raise NotApplicable
    return value.flip(0)


def one_more(value: torch.Tensor) -> torch.Tensor:
    return torch.cat([value, value[-1:]])


def expanded(value: torch.Tensor) -> torch.Tensor:
    """Strides of 0: all entries share the memory of the first one."""
    if value.numel() < 2:
        raise NotApplicable
    return value.flatten()[:1].expand(value.numel()).view(value.shape)


def overlapping_rows(value: torch.Tensor) -> torch.Tensor:
    """Rows that overlap: each begins half a row after the one before."""
    if value.dim() < 2 or value.shape[0] < 2:
        raise NotApplicable
    row = value[0].numel()
    memory = value.new_zeros(row * value.shape[0])
    return memory.as_strided(value.shape, (row // 2, *value.stride()[1:]))


def inside_q(make: Make, given: Arguments, name: str) -> None:
    """Gives the argument memory that begins in the middle of q's."""
    source = next((n for n in ("q", "query") if isinstance(given.get(n), torch.Tensor)), None)
    if source is None:
        raise NotApplicable
    q = given[source]
    memory = q.new_zeros(2 * q.numel())
    given[source] = memory[: q.numel()].view(q.shape).copy_(q)
    if name == "lse":
        given[name] = memory.view(torch.uint8).view(torch.float32)[: q[..., 0].numel()].view(q.shape[:-1])
    else:
        given[name] = memory[q.numel() // 2 :][: q.numel()].view(q.shape)


def to_meta(value: torch.Tensor) -> torch.Tensor:
    return value.to("meta")


def is_float(value: torch.Tensor) -> torch.Tensor:
    if not value.dtype.is_floating_point:
        raise NotApplicable
    return value


# ---------------------------------------------------------------- kinds of tensors

NO_TENSORS = (
    Badness("type-list", "error", lambda make, value: [1, 2]),
    Badness("type-number", "error", constant(3)),
    Badness("type-numpy", "error", lambda make, value: np.zeros(4, np.float32)),
    Badness("type-text", "error", constant("tensor")),
)
ANY_TENSOR = (
    Badness("device-meta", "error", tensor(to_meta)),
    Badness("storage-gone", "error", tensor(without_storage)),
    Badness("no-memory", "error", tensor(NoMemory)),
    Badness("sparse", "error", tensor(lambda value: value.to_sparse())),
    Badness("complex", "error", tensor(lambda value: value.to(torch.complex64))),
    Badness("shape-less", "error", tensor(lambda value: value[0])),
    Badness("shape-more", "error", tensor(lambda value: value[None])),
)
NEGATED = Badness("negative-bit", "safe", tensor(lambda value: torch._neg_view(-value)))
DATA = (
    *NO_TENSORS,
    *ANY_TENSOR,
    NEGATED,
    Badness("dtype-double", "error", tensor(lambda value: value.double())),
    Badness("dtype-int", "error", tensor(lambda value: value.int())),
    Badness("shape-narrow", "error", tensor(lambda value: value[..., :-3].contiguous())),
    Badness("stride-last", "safe", tensor(strided)),
    Badness("requires-grad", "error", tensor(lambda value: is_float(value).detach().requires_grad_())),
    Badness("nan", "clean", tensor(with_first(float("nan")))),
)
ROWS = (*DATA, Badness("shape-rows", "error", tensor(one_more)))
CACHE = (
    *DATA,
    Badness("pair-of-one", "error", lambda make, value: (value[:, 0],)),
    Badness("pair-of-three", "error", lambda make, value: (value[:, 0],) * 3),
    Badness("pair-with-none", "error", lambda make, value: (value[:, 0], None)),
    Badness("pair-with-number", "error", lambda make, value: (value[:, 0], 1)),
    Badness("pair-unequal", "error", lambda make, value: (value[:, 0], one_more(value[:, 1]))),
    Badness("pair-dtypes", "error", lambda make, value: (value[:, 0], value[:, 1].double())),
    Badness("pair-list", "works", lambda make, value: [value[:, 0], value[:, 1]]),
    Badness("pages-few", "error", tensor(lambda value: value[:3]), cuda=False),  # only the host checks pages
)
OUTPUT = (
    *(badness for badness in DATA if badness.name not in ("nan", "negative-bit")),
    Badness("negative-bit", "error", tensor(lambda value: torch._neg_view(value))),
    Badness("shape-rows", "error", tensor(one_more)),
    Badness("stride-zero", "error", tensor(expanded)),
    Badness("stride-overlap", "error", tensor(overlapping_rows)),
    Badness("inside-q", "error", many=inside_q),
)
INDEX = (
    *NO_TENSORS,
    *ANY_TENSOR,
    NEGATED,
    Badness("dtype-float", "error", tensor(lambda value: value.float())),
    Badness("dtype-int16", "error", tensor(lambda value: value.short())),
    Badness("dtype-bool", "error", tensor(lambda value: value.bool())),
    Badness("dtype-int64", "safe", tensor(lambda value: value.long())),
    Badness("stride", "safe", tensor(strided)),
    Badness("shape-empty", "error", tensor(lambda value: value[:0])),
    Badness("shape-short", "error", tensor(lambda value: value[:-1]), cuda=False),
    Badness("range-negative", "error", tensor(with_first(-5)), cuda=False),
    Badness("range-2^30", "error", tensor(with_last(2**30)), cuda=False),
    Badness("range-2^31", "error", tensor(with_last(2**31, torch.int64)), cuda=False),
    Badness("range-2^32", "error", tensor(plus_2_32), cuda=False),
    Badness("range-2^62", "error", tensor(with_last(2**62, torch.int64)), cuda=False),
)
INDPTR = (
    *INDEX,
    Badness("shape-long", "error", tensor(one_more)),
    Badness("falls", "error", tensor(flipped), cuda=False),
)
LENGTHS = (*INDEX, Badness("shape-long", "error", tensor(one_more)))
LISTS = tuple(badness for badness in INDEX if badness.name != "shape-more")  # of tokens, [rows, topk]
LISTS_OF_ANY_ROWS = tuple(badness for badness in LISTS if badness.name not in ("shape-empty", "shape-short"))
LIST_OF_INDICES = (
    *(badness for badness in INDEX if badness.name not in ("type-list", "shape-short")),
    Badness("type-tensor", "error", lambda make, value: value[0]),
    Badness("list-short", "error", lambda make, value: value[:-1]),
    Badness("list-long", "error", lambda make, value: [*value, value[-1]]),
    Badness("list-with-none", "error", lambda make, value: [*value[:-1], None]),
    Badness("list-with-list", "error", lambda make, value: [*value[:-1], [0, 1]]),
)
MASK = (
    *NO_TENSORS,
    *(badness for badness in ANY_TENSOR if badness.name not in ("shape-less", "shape-more")),
    Badness("dtype-float", "error", tensor(lambda value: value.float())),
    Badness("dtype-int64", "error", tensor(lambda value: value.long())),
    Badness("shape-short", "error", tensor(lambda value: value.flatten()[:-9])),
    Badness("shape-empty", "error", tensor(lambda value: value.flatten()[:0])),
)
BITS = (*NO_TENSORS, *(b for b in ANY_TENSOR if b.name not in ("shape-less", "shape-more")))
WORKSPACE = (
    *NO_TENSORS,
    *(badness for badness in ANY_TENSOR if badness.name not in ("shape-less", "shape-more", "complex")),
    Badness("misaligned", "error", tensor(lambda value: value[3:])),
    Badness("stride", "error", tensor(lambda value: value[::2])),
    Badness("empty", "clean", tensor(lambda value: value[:0])),
    Badness("stride-zero", "error", tensor(expanded)),
)
SCALE = (
    Badness("nan", "error", constant(float("nan"))),
    Badness("inf", "error", constant(float("inf"))),
    Badness("too-large", "error", constant(1e39)),
    Badness("text", "error", constant("a")),
    Badness("list", "error", constant([1.0, 2.0])),
    Badness("complex", "error", constant(1j)),
    Badness("numpy", "error", lambda make, value: np.ones(3, np.float32)),
    Badness("shape-long", "error", lambda make, value: make.ones(77)),
    Badness("shape-2d", "error", lambda make, value: make.ones(2, 2, 2)),
    Badness("shape-empty", "error", lambda make, value: make.ones(0)),
    Badness("dtype-half", "safe", lambda make, value: make.ones(1).half()),  # one element on the host is a number
    Badness("dtype-int", "safe", lambda make, value: make.ones(1).int()),
    Badness("device-meta", "error", lambda make, value: make.ones(1).to("meta")),
    Badness("no-memory", "error", lambda make, value: NoMemory(make.ones(1))),
    Badness("storage-gone", "error", lambda make, value: without_storage(make.ones(1))),
    Badness("one", "works", constant(1.0)),
    Badness("one-int", "works", constant(1)),
)

# ---------------------------------------------------------------- kinds of numbers and words

NO_NUMBERS = (
    Badness("text", "error", constant("4")),
    Badness("list", "error", constant([4])),
    Badness("nan", "error", constant(float("nan"))),
    Badness("tensor-of-two", "error", lambda make, value: make.ints(4, 4)),
    Badness("complex", "error", constant(4j)),
)
WHOLE = (*NO_NUMBERS, Badness("fraction", "error", constant(2.5)), Badness("2^63", "error", constant(2**63)))
NOT_NEGATIVE = (*WHOLE, Badness("negative", "error", constant(-1)))
COUNT = (*NOT_NEGATIVE, Badness("zero", "error", constant(0)), Badness("2^31", "error", constant(2**31)))
SPLIT = (  # -1: balanced, as FlashInfer has it
    *(badness for badness in COUNT if badness.name not in ("negative", "2^31")),
    Badness("negative", "works", constant(-1)),
    Badness("-2", "error", constant(-2)),
)
CHUNK = (*NOT_NEGATIVE, Badness("zero", "works", constant(0)))  # 0: no chunks
WINDOW = (*WHOLE, Badness("2^31-1", "clean", constant(2**31 - 1)), Badness("-2", "clean", constant(-2)))
REAL = (
    *NO_NUMBERS,
    Badness("inf", "error", constant(float("inf"))),
    Badness("-inf", "error", constant(float("-inf"))),
    Badness("too-large", "error", constant(1e39)),
)
POSITIVE = (*REAL, Badness("zero", "error", constant(0.0)), Badness("negative", "error", constant(-1.0)))
SOFT_CAP = (*REAL, Badness("negative", "works", constant(-1.0)))  # no cap, as FlashInfer has it
FLAG = (
    Badness("text", "error", constant("False")),
    Badness("fraction", "error", constant(1.5)),
    Badness("list", "error", constant([])),
    Badness("tensor", "error", lambda make, value: torch.tensor(True, device=make.device)),
    Badness("tensor-of-two", "error", lambda make, value: torch.tensor([True, False], device=make.device)),
)
DTYPE = (
    Badness("int8", "error", constant(torch.int8)),
    Badness("double", "error", constant(torch.float64)),
    Badness("unknown", "error", constant("int4")),
    Badness("number", "error", constant(3)),
    Badness("list", "error", constant([])),
)
WORD = (
    Badness("unknown", "error", constant("NDH")),
    Badness("number", "error", constant(3)),
    Badness("none", "error", constant(None)),
    Badness("list", "error", constant([])),
)
MODE = WORD[:-2] + WORD[-1:]  # without `none`, which means the planned mode
DEVICE = (
    Badness("unknown", "error", constant("banana")),
    Badness("number", "error", constant(3.5)),
    Badness("meta", "error", constant("meta")),
)
REFUSED = (
    Badness("true", "error", constant(True)),
    Badness("tensor", "error", lambda make, value: make.ones(2)),
)
REFUSED_WORD = (Badness("unknown", "error", constant("e")), Badness("number", "error", constant(3)))
FORMAT = (
    Badness("unknown", "error", constant("int5")),
    Badness("number", "error", constant(3)),
    Badness("three", "error", constant(("nvfp4",) * 3)),
    Badness("list", "error", constant([])),
)
TOLD_LATER = (Badness("number", "clean", constant(3)),)  # checked only if other arguments are given, too
CALLABLE = (Badness("number", "error", constant(3)), Badness("text", "error", constant("score")))
EXPRESSION = (Badness("number", "error", constant(3)), Badness("brackets", "error", constant("score + (a")))
MAPPING = (Badness("number", "error", constant(3)), Badness("list", "error", constant([1])))
NUMBERS = (
    Badness("number", "error", constant(3)),
    Badness("negative", "error", constant([-5, 3])),
    Badness("text", "error", constant("ab")),
    Badness("short", "error", constant([2])),
)
VARIANT = (
    Badness("callable", "error", constant(lambda score: score)),
    Badness("number", "error", constant(3)),
    Badness("text", "error", constant("score")),
)
ANYTHING = (Badness("list", "clean", constant([1])),)  # plain arithmetic, which raises Python's own errors

_KINDS: dict[str, tuple[Badness, ...]] = {}


def _kind(badness: tuple[Badness, ...], names: str) -> None:
    _KINDS.update(dict.fromkeys(names.split(), badness))


_kind(ROWS, "q q_p q_d query append_key append_value append_ckv append_kpe key value")
_kind(DATA, "k v k_p v_p k_shared v_shared v_a v_b v_other s_a s_b s_other s sinks exp_sums max_logits tmp_out")
_kind(CACHE, "paged_kv_cache paged_kv_cache_p paged_kv_cache_d unique_kv_cache")
_kind(DATA, "kv_cache key_cache value_cache ckv_cache kpe_cache")
_kind(OUTPUT, "out lse")
_kind(
    INDPTR, "indptr qo_indptr kv_indptr paged_kv_indptr qo_indptr_p qo_indptr_d kv_indptr_p kv_indptr_d append_indptr"
)
_kind(INDPTR, "unique_kv_indptr")
_kind(
    LENGTHS, "last_page_len paged_kv_last_page_len last_page_len_p last_page_len_d kv_last_page_len seq_lens kv_len_arr"
)
_kind(LENGTHS, "unique_kv_last_page_len table_rows num_requests batch_indices positions rows starts slots slot_mapping")
_kind(INDEX, "indices paged_kv_indices kv_indices kv_indices_p kv_indices_d unique_kv_indices block_tables table")
_kind(LIST_OF_INDICES, "qo_indptr_arr paged_kv_indptr_arr paged_kv_indices_arr")
_kind(MASK, "custom_mask custom_mask_p mask block_mask_map packed_custom_mask packed_custom_mask_p packed_mask")
_kind(INDEX, "block_row_sz block_col_sz")
_kind(WORKSPACE, "float_workspace_buffer int_workspace_buffer workspace_buffer")
_kind((WORKSPACE[1], WORKSPACE[3], LIST_OF_INDICES[-4]), "int_workspace_buffers")
_kind(SCALE, "q_scale k_scale v_scale scale_q scale_k scale_v")
_kind(COUNT, "num_qo_heads num_kv_heads head_dim head_dim_qk head_dim_vo page_size q_len_per_req M N R C")
_kind(
    COUNT, "num_heads n_heads num_q_heads block_size head_size num_levels num_pages num_layers max_requests max_context"
)
_kind(COUNT, "world_size num_ctas max_batch_of_graph")
_kind(SPLIT, "fixed_split_size")
_kind(CHUNK, "chunk")
_kind(NOT_NEGATIVE, "nnz layer row rank tp_rank max_seq_len interleave max_token_per_sequence max_sequence_kv")
_kind(NOT_NEGATIVE, "max_pages max_kv_rows max_rows max_batch fixed_piece_tokens token_pos_in_items_len")
_kind(WINDOW, "window_left window_left_p window_left_d")
_kind(REAL, "sm_scale sm_scale_p sm_scale_d scale fill")
_kind(SOFT_CAP, "logits_soft_cap")
_kind(POSITIVE, "rope_scale rope_theta rope_scale_p rope_theta_p rope_scale_d rope_theta_d")
_kind(FLAG, "causal causal_p causal_d return_lse use_cuda_graph disable_split_kv enable_pdl")
_kind(FLAG, "non_blocking use_tensor_cores use_profiler")
_kind(DTYPE, "q_data_type kv_data_type o_data_type data_type o_dtype dtype")
_kind(WORD, "kv_layout kv_layout_p kv_layout_d bitorder backend order pages heads kv_cache_dtype")
_kind(MODE, "pos_encoding_mode pos_encoding_mode_p pos_encoding_mode_d")
_kind(DEVICE, "device")
_kind(REFUSED, "use_fp16_qk_reduction window_right kv_cache_sf skip_softmax_threshold_scale_factor use_fp16_softmax")
_kind(REFUSED, "uses_spcompress profiler_buffer seq_lens_q v_indptr o_indptr o_scale jit_args jit_kwargs")
_kind(
    REFUSED,
    "block_mask custom_mask_d packed_custom_mask_d return_lse_p return_lse_d",
)
_kind(REFUSED_WORD, "lse_base lse_layout lse_mode")
_kind(FORMAT, "kv_format")
_kind(LISTS, "slot_mapping")
_kind(BITS, "x")
_kind(CALLABLE, "score_mod mask_mod")
_kind(EXPRESSION, "logit")
_kind(MAPPING, "tensors scalars")
_kind(NUMBERS, "q_lens kv_lens")
_kind(VARIANT, "variant")
_kind(ANYTHING, "y parents max_batch")
# Buffers of graphs are checked only if use_cuda_graph=True, the three tensors of multi-item scoring only together.
_kind(
    TOLD_LATER, "custom_mask_buf mask_indptr_buf qo_indptr_buf kv_indptr_buf paged_kv_indptr_buf paged_kv_indices_buf"
)
_kind(TOLD_LATER, "paged_kv_last_page_len_buf paged_kv_indptr_buffer paged_kv_indices_buffer")
_kind(TOLD_LATER, "paged_kv_last_page_len_buffer qo_indptr_buf_arr paged_kv_indptr_buf_arr paged_kv_indices_buf_arr")
_kind(TOLD_LATER, "paged_kv_last_page_len_buf_arr prefix_len_ptr token_pos_in_items_ptr max_item_len_ptr alibi_slopes")
_kind(
    TOLD_LATER, "blocksparse_local_blocks blocksparse_vert_stride blocksparse_block_size blocksparse_head_sliding_step"
)
_kind(TOLD_LATER, "group tile cost clusters card global_override_indptr_cpu")
_kind(INDEX, "indptr_buffer indices_buffer last_page_len_buffer")
_kind(REFUSED, "o_sf_scale o_sf_vec_size bmm1_scale_log2 enable_block_sparse_attention causal_seqlens_kv_global")
_kind(REFUSED, "bf16q_fp8kv_transform_mode request_order request_order_plan cache_leftpad")
_kind(REAL, "bmm1_scale bmm2_scale softmax_scale dropout_p")
_kind(SOFT_CAP, "softcap")
_kind(FLAG, "uses_shared_paged_kv_idx return_attn_probs return_softmax_lse rotary_interleaved")
_kind(WHOLE, "cp_world cp_rank")
_kind(COUNT, "batch_size")
_kind(DTYPE, "out_dtype")
_kind(INDPTR, "cum_seq_lens_q cu_seqlens_q cu_seqlens_k")
_kind(INDEX, "block_table cache_batch_idx")
_kind(LENGTHS, "cache_seqlens")
_kind(WINDOW, "window_size")
_kind(DATA, "rotary_cos rotary_sin k_cache v_cache")
# Accepted, and nothing to flashpage.
_kind((), "max_q_len max_kv_len cum_seq_lens_kv multi_ctas_kv_counter_buffer max_seqlen_q max_seqlen_k deterministic")
_kind((), "num_splits")
_kind((), "args kwargs deprecated_positional_args _ __")  # tests/api/test_api_signatures.py checks these

# Latent rows.
_kind(COUNT, "head_dim_ckv")
_kind(NOT_NEGATIVE, "head_dim_kpe")
_kind(ROWS, "q_nope q_pe")
_kind(DTYPE, "output_dtype")
_kind(MODE, "query_layout kv_cache_layout lse_mode")
_kind(REFUSED_WORD, "output_scale scale_mode")
_kind(REFUSED, "skip_softmax kv_len page_table ckv_scale ckv_scale_arr kpe_scale")
_kind(FLAG, "use_sinks return_lse_base_on_e")
_kind(MODE[:-1], "kv_row_format")
_kind(LENGTHS, "topk_length")
_kind((Badness("number", "error", constant(3)), Badness("list", "error", constant([1]))), "metadata")
_kind(_KINDS["metadata"], "tile_scheduler_metadata")
_kind(COUNT, "kv_lora_rank head_dim_v d_v")
_kind(REFUSED, "indexer_topk")
_kind(DATA, "kv")
_kind(NOT_NEGATIVE, "qk_rope_head_dim")
_kind((), "qk_nope_head_dim is_var_seq cute_dsl_impl kv_scale_format")
_kind(REFUSED, "sparse_mla_top_k sparse_mla_top_k_lens enable_dcp is_fp8_kvcache attn_sink extra_k_cache")
_kind(REFUSED, "extra_indices_in_kvcache extra_topk_length")
_kind(REFUSED_WORD, "return_lse_base")

# Arguments that have another kind in one step than elsewhere.
_OF_STEP: dict[tuple[str, str], tuple[Badness, ...]] = {
    ("merge_state_in_place", "v"): OUTPUT,
    ("merge_state_in_place", "s"): OUTPUT,
    ("MultiLevelCascadeAttentionWrapper.plan", "paged_kv_last_page_len"): LIST_OF_INDICES,
    ("BatchAttention.run", "kv_cache"): CACHE,
    ("BatchMLAPagedAttentionWrapper.run", "kv_cache"): TOLD_LATER,  # in place of the two caches
    ("BatchMLAPagedAttentionWrapper.run", "query"): TOLD_LATER,
    ("BatchMLASparseAttentionWrapper", "num_rows"): REFUSED,
    ("BatchMLASparseAttentionWrapper.run", "kv_cache"): TOLD_LATER,
    ("BatchMLASparseAttentionWrapper.run", "query"): TOLD_LATER,
    ("BatchMLASparseAttentionWrapper.plan", "indices"): LISTS_OF_ANY_ROWS,
    ("BatchMLASparseAttentionWrapper.run", "indices"): LISTS,
    ("BatchMLASparseAttentionWrapper.run", "ckv_scale"): TOLD_LATER,  # in place of ckv_scale_arr
    ("BatchMLASparseAttentionWrapper.run", "ckv_scale_arr"): DATA,
    ("BatchMLASparseAttentionWrapper.run", "kpe_scale"): SCALE,
    **{
        ("BatchMLAPagedAttentionWrapper", name): TOLD_LATER
        for name in ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
    },
    ("TokenPool", "v_head_dim"): tuple(badness for badness in COUNT if badness.name != "none"),
    ("merge_over_group", "out"): DATA,
    ("merge_over_group", "lse"): DATA,
    ("append_paged_kv_cache", "kv_last_page_len"): LENGTHS,
    ("plan_lengths", "backend"): WORD[:2],
    ("Variant", "mask"): EXPRESSION,
    ("ceil_div", "x"): ANYTHING,
    ("round_up", "x"): ANYTHING,
    ("next_positive_power_of_2", "x"): ANYTHING,
    ("last_positive_power_of_2", "x"): COUNT,
    ("is_float8", "x"): ANYTHING,
    ("batch_sizes_to_capture", "max_batch"): COUNT,
    ("trtllm_batch_decode_with_kv_cache", "mask"): REFUSED,
    ("flash_mla_with_kvcache", "indices"): REFUSED,
    ("flash_mla_with_kvcache", "num_splits"): REFUSED,
    ("flash_mla_sparse_fwd", "indices"): LISTS,
    ("flash_mla_with_kvcache", "topk_length"): REFUSED,
    **{
        (f"{step}_with_kv_cache{rows}", name): ()
        for step in ("trtllm_batch_decode", "trtllm_batch_context", "xqa_batch_decode")
        for rows in ("", "_mla")
        for name in ("workspace_buffer", "max_seq_len")
    },
}


def kind_of(step: str, name: str) -> tuple[Badness, ...]:
    """The bad values of an argument; KeyError if it has no kind."""
    return _OF_STEP[step, name] if (step, name) in _OF_STEP else _KINDS[name]


# Other words by which messages name an argument.
OTHER_WORDS = {
    "block_table": "block_tables",
    "cache_seqlens": "seq_lens|rows",
    "cum_seq_lens_q": "qo_indptr|rows",
    "cu_seqlens_q": "rows",
    "cu_seqlens_k": "cu_seqlens_q|tokens",
    "bmm1_scale": "sm_scale|q_scale",
    "bmm2_scale": "v_scale",
    "query": "q|q_data_type",
    "paged_kv_cache": r"K|V|k|v|kv_data_type|num_kv_heads",
    "kv_lora_rank": r"q|head_dim",
    "qk_rope_head_dim": r"q|head_dim",
    "head_dim_v": r"head_dim",
    "d_v": r"head_dim",
    "kv_cache": r"paged_kv_cache|K|V|k|v|kv_data_type",
}
