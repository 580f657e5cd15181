"""The outcomes of rows that differ from their kind: (names of rows, outcome, a pattern that the message must hold).

An empty pattern stands for the argument's name. The first line that fits holds.
"""

EXPECTED: list[tuple[str, str, str]] = [
    # Other arguments that are good as well: more rows or tokens, fewer columns, entries that are left out.
    ("single_prefill_with_kv_cache*.q.shape-rows", "clean", ""),
    ("single_*.[kv].shape-empty", "clean", ""),
    ("*.*last_page_len.none", "clean", ""),  # all pages are full, as block-sparse plans have them
    ("BatchAttention.plan.kv_len_arr.none", "clean", ""),
    ("merge_*.shape-narrow", "clean", ""),
    ("append_paged*.batch_indices.range-negative", "clean", ""),
    ("append_paged*.paged_kv_cache.pair-list", "clean", ""),  # written as given: two tensors, not one
    ("get_batch_indices_positions.*.append_indptr.range-*", "clean", ""),
    ("get_batch_indices_positions.*.seq_lens.range-*", "clean", ""),  # values on a device cannot be looked at
    ("get_seq_lens.*.range-*", "clean", ""),
    ("get_seq_lens.*.dtype-int64", "clean", ""),  # the result has the lengths' type
    ("get_seq_lens.*.kv_indptr.falls", "clean", ""),
    ("segment_packbits.*.indptr.shape-long", "clean", ""),  # an empty segment
    ("reshape_and_cache*.slot_mapping.shape-*", "clean", ""),  # vLLM pads keys: slots decide how many are written
    ("reshape_and_cache*.slot_mapping.range-negative", "clean", ""),  # left out
    ("split_kv_cache.*.kv_cache.*", "any", ""),  # views of any tensor
    # Arithmetic on tensors, from which plans are made: what they hold is judged there.
    ("ContextLayout*.storage-gone", "error", ""),
    ("ContextLayout*", "any", ""),
    ("RequestTable.write.*", "any", ""),
    ("tree_mask.*", "any", ""),
    ("canonicalize_torch_dtype.*", "any", ""),
    ("get_alibi_slopes.*.device.*", "any", ""),
    ("gather_slots.*.table.range-*", "clean", ""),  # slots that no row of the batch has
    # torch's own error, or none: names of dtypes and devices, numbers of Python's.
    ("is_float8.*", "any", ""),
    ("device_support_pdl.*", "any", ""),
    ("is_sm90a_supported.*", "any", ""),
    ("determine_attention_backend.*", "any", ""),
    ("ceil_div.*", "any", ""),
    ("round_up.*", "any", ""),
    ("next_positive_power_of_2.*", "any", ""),
    # Words that say more than the argument's name.
    ("*.order.copy.*", "safe", "neither copied nor pickled"),
    ("RequestTable.release.order.plan.left-out", "any", ""),
    ("*.order.plan.left-out", "error", "no plan"),
    # Sizes of a batch that nothing plans, and numbers that a card does not tell.
    ("*.workspace_size.*.range-*", "clean", ""),
    ("*.workspace_size.*.shape-*", "clean", ""),
    ("*.num_requests.range-negative", "clean", ""),
    ("PODWithPagedKVCacheWrapper.*.q_p.shape-rows", "clean", ""),
]

# Rows that would do as they are told: masks and tables of so many entries.
NOT_TRIED = ("ContextParallelAttention.plan.qo_indptr.range-2^3[01]",)
