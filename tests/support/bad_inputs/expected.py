"""Rows whose outcome differs from that of their kind: (pattern of row names, outcome, pattern of the error's message).

Names are matched as by fnmatch, messages by a regular expression; an empty one stands for the argument's name. The
first line that matches a row decides.
"""

EXPECTED: list[tuple[str, str, str]] = [
    # The changed argument is valid, too: more rows or tokens, fewer columns, entries that are left out.
    ("single_prefill_with_kv_cache*.q.shape-rows", "clean", ""),
    ("single_*.[kv].shape-empty", "clean", ""),
    ("*.workspace_size.*last_page_len.none", "clean", ""),  # the bound holds for full pages
    ("merge_*.shape-narrow", "clean", ""),
    ("*append_paged*.batch_indices.range-negative", "clean", ""),
    ("*append_paged*.kv_last_page_len.range-*", "clean", ""),  # only its length is looked at
    ("*append_paged*.kv_indptr.range-2^30", "clean", ""),  # entries of which no new token needs a page
    ("*append_paged*.kv_indices.range-negative", "clean", ""),
    ("get_batch_indices_positions.*.batch_indices.range-*", "clean", ""),  # written, never read
    ("get_batch_indices_positions.*.positions.range-*", "clean", ""),
    ("gather_slots.*.indices.range-*", "clean", ""),
    ("*append_paged*.paged_kv_cache.pair-list", "clean", ""),  # the result then is a list of two tensors
    ("get_batch_indices_positions.*.append_indptr.range-*", "clean", ""),
    ("get_batch_indices_positions.*.seq_lens.range-*", "clean", ""),  # checking values would wait for the device
    ("get_seq_lens.*.range-*", "clean", ""),
    ("get_seq_lens.*.dtype-int64", "clean", ""),  # the result has the lengths' type
    ("get_seq_lens.*.kv_indptr.falls", "clean", ""),
    ("segment_packbits.*.indptr.shape-long", "clean", ""),  # an empty segment
    ("BlockSparseAttentionWrapper.plan.[qkv]_scale.one*", "error", ""),  # of other kernels
    ("append_paged_kv_cache.*.[kv]_scale.one*", "error", ""),  # without kv_format
    ("nvfp4_quantize*.[kv]_scale.none", "clean", ""),  # 1
    ("nvfp4_quantize*.slot_mapping.shape-*", "clean", ""),  # rows without a slot are not written
    ("nvfp4_quantize*.slot_mapping.range-negative", "clean", ""),
    ("reshape_and_cache*.slot_mapping.shape-*", "clean", ""),  # vLLM pads keys: slots decide how many are written
    ("reshape_and_cache*.slot_mapping.range-negative", "clean", ""),  # left out
    ("split_kv_cache.*.kv_cache.dtype-*", "clean", ""),  # views of any type
    ("split_kv_cache.*.kv_cache.complex", "clean", ""),
    ("canonicalize_torch_dtype.*.int8", "clean", ""),  # dtypes of torch
    ("canonicalize_torch_dtype.*.double", "clean", ""),
    ("canonicalize_torch_dtype.*.unknown", "clean", ""),
    ("RequestTable.write.*.range-2^30", "clean", ""),  # a slot of a larger pool
    # Arguments that are accepted and not used, and last entries of tables that are not in use.
    ("flash_attn_varlen_func.*.max_seqlen_[qk].none", "clean", ""),
    ("expanded_prompts.*.max_seqlen_*.none", "clean", ""),
    ("trtllm_batch_*.max_*.none", "clean", ""),
    ("xqa_batch_*.max_*.none", "clean", ""),
    ("*_mla.*.qk_nope_head_dim.none", "clean", ""),
    ("trtllm_batch_*.cum_seq_lens_kv.none", "clean", ""),
    ("trtllm_batch_*.workspace_buffer.none", "clean", ""),
    ("xqa_batch_*.workspace_buffer.none", "clean", ""),
    ("flash_attn_with_kvcache.*.block_table.range-2^30", "clean", ""),
    ("trtllm_batch_*.block_tables.range-2^30", "clean", ""),
    ("xqa_batch_*.block_tables.range-2^30", "clean", ""),
    ("flash_mla_*.block_table.range-2^30", "clean", ""),
    ("flash_mla_sparse_fwd*.indices.range-*", "clean", ""),  # numbers outside of the cache are none
    ("get_mla_decoding_metadata.*.seqlens_k.range-*", "clean", ""),  # not read
    ("get_mla_decoding_metadata.*.seqlens_k.shape-*", "any", ""),  # any batch
    # Arithmetic on tensors, from which plans are made: what they hold is judged there.
    ("ContextLayout*.storage-gone", "error", ""),
    ("ContextLayout*", "any", ""),
    ("gather_slots.*.table.range-*", "clean", ""),  # slots that no row of the batch has
    ("trtllm_batch_context_with_kv_cache*.query.shape-rows", "any", ""),  # rows of no request
    ("flash_attn_with_kvcache.*.cache_seqlens.type-number", "any", ""),  # tokens of every request
    # Helpers around torch's dtypes and devices and Python's numbers: torch's or Python's own error is fine.
    ("is_float8.*", "any", ""),
    ("device_support_pdl.*", "any", ""),
    ("is_sm90a_supported.*", "any", ""),
    ("determine_attention_backend.*", "any", ""),
    ("ceil_div.*", "any", ""),
    ("round_up.*", "any", ""),
    ("next_positive_power_of_2.*", "any", ""),
    ("BatchAttention.plan.head_dim_vo.none", "works", ""),  # as head_dim_qk
    ("VariableBlock*.run.*.inside-q", "clean", ""),  # results are copied there after the run
    ("VariableBlock*.run.*.negative-bit", "safe", ""),
    # vLLM's operators read them only in fp8 caches, and with blocksparse_vert_stride.
    ("paged_attention_v?.*.[kv]_scale.[!m]*", "clean", ""),
    ("paged_attention_v?.*.tp_rank.*", "clean", ""),
    ("reshape_and_cache*.[kv]_scale.one*", "error", ""),  # their schema takes tensors alone
    ("paged_attention_v?.*.block_tables.range-2^3[01]", "clean", ""),  # the last entry is not in use
    ("paged_attention_v?.*.block_tables.range-2^62", "clean", ""),
    ("TokenPool.TokenPool.fill.nan", "clean", ""),
    ("plan_lengths.*.q_lens.none", "clean", ""),  # one row for each request
    ("plan_lengths.*.page_size.zero", "clean", ""),  # ragged
    ("plan_lengths.*.fixed_piece_tokens.negative", "clean", ""),  # no request is cut
    # Functions that plan from q's shape.
    *((f"*.{name}.heads-none", "error", f"num_qo_heads=0|{name}") for name in ("q", "q_p", "query")),
    # Errors about the order of calls.
    ("*.order.copy.*", "safe", "neither copied nor pickled"),
    ("RequestTable.release.order.plan.left-out", "any", ""),
    ("RequestTable.release.order.run.twice", "safe", "row=0 belongs to no request"),
    ("*.order.plan.left-out", "error", "no plan"),
    ("CUDAGraph*.*_buffer.range-*", "clean", ""),  # what graph buffers hold is never read
    ("CUDAGraph*.indices_buffer.shape-short", "clean", ""),
    ("CUDAGraph*.indices_buffer.shape-empty", "error", "indices buffer holds 0"),
    ("*.plan_on_device.seq_lens.shape-*", "clean", ""),  # it says how many requests there are
    ("*.plan_on_device.block_tables.range-2^30", "clean", ""),  # its last entry is not in use
    # workspace_size computes sizes without planning; num_requests lies on the device and is not read by the host.
    ("*.workspace_size.*.range-*", "clean", ""),
    ("*.workspace_size.*.shape-*", "clean", ""),
    ("*.workspace_size.indptr.falls", "clean", ""),
    ("*.num_requests.range-*", "clean", ""),  # clamped to the batch
    ("PODWithPagedKVCacheWrapper.*.q_p.shape-rows", "clean", ""),
]

# Rows that are left out, because they would really allocate a mask or a table of that many entries.
NOT_TRIED = ("ContextParallelAttention.plan.qo_indptr.range-2^3[01]",)
