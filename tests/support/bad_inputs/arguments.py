"""Which argument is of which kind, and by which other words messages name it."""

from __future__ import annotations

from .kinds import (
    ANYTHING,
    BITS,
    CACHE,
    CALLABLE,
    CHUNK,
    COUNT,
    DATA,
    DEVICE,
    DTYPE,
    EXPRESSION,
    FLAG,
    FORMAT,
    INDEX,
    INDPTR,
    LENGTHS,
    LIST_OF_INDICES,
    LISTS,
    LISTS_OF_ANY_ROWS,
    MAPPING,
    MASK,
    MODE,
    NOT_NEGATIVE,
    NUMBERS,
    OUTPUT,
    POSITIVE,
    REAL,
    REFUSED,
    REFUSED_WORD,
    ROWS,
    SCALE,
    SOFT_CAP,
    SPLIT,
    TOLD_LATER,
    VARIANT,
    WHOLE,
    WINDOW,
    WORD,
    WORKSPACE,
    Badness,
    constant,
)

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
_kind(REFUSED, "block_mask custom_mask_d packed_custom_mask_d return_lse_p return_lse_d variant_owns_mask")
_kind(REFUSED, "kv_block_lens q2k_indices q2k_num kv_splits use_clc")
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
_kind(REFUSED, "nvfp4_4over6 sparse_top_k variable_window_token_starts variable_window_token_ends max_total_num_rows")
_kind(REFUSED, "qo_indptr_cpu kv_indptr_cpu")
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
_kind((), "length_aware_schedule")
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
_kind(REFUSED, "extra_indices_in_kvcache extra_indices extra_kv_cache extra_topk_length descale_q descale_k")
_kind(REFUSED_WORD, "return_log2_lse")
_kind(FLAG, "enable_batch_invariant use_legacy is_varlen")
_kind(INDPTR, "cu_seqlens_qo cu_seqlens_kv")
_kind(LENGTHS, "seqlens_k")
_kind(COUNT, "num_q_tokens_per_head_k h_k h_q topk")
_kind((), "max_seqlen_qo max_seqlen_kv")
_kind(REFUSED_WORD, "return_lse_base")

# Arguments that have another kind in one step than elsewhere.
_OF_STEP: dict[tuple[str, str], tuple[Badness, ...]] = {
    ("merge_state_in_place", "v"): OUTPUT,
    ("merge_state_in_place", "s"): OUTPUT,
    ("MultiLevelCascadeAttentionWrapper.plan", "paged_kv_last_page_len"): LIST_OF_INDICES,
    ("BatchAttention.run", "kv_cache"): CACHE,
    ("BatchMLAPagedAttentionWrapper.run", "kv_cache"): TOLD_LATER,  # in place of the two caches
    ("BatchMLAPagedAttentionWrapper.run", "query"): TOLD_LATER,
    **{
        ("BatchMLAPagedAttentionWrapper.plan", name): REFUSED  # of the other form
        for name in ("cum_seq_lens_q", "block_tables", "seq_lens")
    },
    ("BatchMLAPagedAttentionWrapper.run", "bmm1_scale"): REFUSED,
    ("BatchMLAPagedAttentionWrapper.run", "bmm2_scale"): REFUSED,
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
    **{  # scales of single tokens, which 1 is not either
        ("VariableBlockSparseAttentionWrapper.plan", name): REFUSED for name in ("q_scale", "k_scale", "v_scale")
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
    ("flash_mla_with_kvcache", "kv_format"): REFUSED_WORD,
    ("get_mla_decoding_metadata", "is_fp8_kvcache"): FLAG,
    **{
        (f"{step}_with_kv_cache{rows}", name): ()
        for step in ("trtllm_batch_decode", "trtllm_batch_context", "xqa_batch_decode")
        for rows in ("", "_mla")
        for name in ("workspace_buffer", "max_seq_len")
    },
}


def kind_of(step: str, name: str) -> tuple[Badness, ...]:
    """The bad values of an argument; LookupError if it has no kind."""
    if (step, name) in _OF_STEP:
        return _OF_STEP[step, name]
    if name not in _KINDS:
        raise LookupError(
            f"{step}: the argument {name!r} has no kind: add it to a line of _kind(...) in {__file__}, or to _OF_STEP "
            "there if it has another kind in this step alone; kinds.py says what each kind tries."
        )
    return _KINDS[name]


# Other words by which messages name an argument.
OTHER_WORDS = {
    "qo_indptr_cpu": "qo_indptr",
    "kv_indptr_cpu": "kv_indptr",
    "block_table": "block_tables",
    "cache_seqlens": "seq_lens|rows",
    "cum_seq_lens_q": "qo_indptr|rows",
    "cu_seqlens_q": "rows",
    "cu_seqlens_k": "cu_seqlens_q|tokens",
    "cu_seqlens_qo": "rows",
    "cu_seqlens_kv": "cu_seqlens_k|tokens",
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
