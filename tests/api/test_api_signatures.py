"""Names, order and defaults of public parameters, compared with FlashInfer 0.7.4."""

from __future__ import annotations

import functools
import inspect

import pytest
import torch
from signatures import shown

import flashpage

# Positional parameters of FlashInfer 0.7.4 as name=default; a name alone has no default.
SIGNATURES: dict[str, str] = {
    "BatchDecodeWithPagedKVCacheWrapper.__init__": (
        "float_workspace_buffer kv_layout='NHD' use_cuda_graph=False use_tensor_cores=False "
        "paged_kv_indptr_buffer=None paged_kv_indices_buffer=None paged_kv_last_page_len_buffer=None "
        "backend='auto' jit_args=None jit_kwargs=None"
    ),
    "BatchDecodeWithPagedKVCacheWrapper.workspace_size": (
        "indptr indices last_page_len num_qo_heads num_kv_heads head_dim page_size pos_encoding_mode='NONE' "
        "window_left=-1 logits_soft_cap=None q_data_type='float16' kv_data_type=None o_data_type=None "
        "data_type=None sm_scale=None rope_scale=None rope_theta=None block_tables=None seq_lens=None "
        "fixed_split_size=None disable_split_kv=False q_len_per_req=1"
    ),
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper.__init__": (
        "workspace_buffer indptr_buffer indices_buffer last_page_len_buffer kv_layout='NHD' use_tensor_cores=False"
    ),
    "fast_decode_plan": (
        "self indptr indices last_page_len num_qo_heads num_kv_heads head_dim page_size pos_encoding_mode='NONE' "
        "window_left=-1 logits_soft_cap=None q_data_type=None kv_data_type=None data_type=None sm_scale=None "
        "rope_scale=None rope_theta=None non_blocking=True fixed_split_size=None disable_split_kv=False "
        "q_len_per_req=1 global_override_indptr_cpu=None"
    ),
    "BatchPrefillWithPagedKVCacheWrapper.__init__": (
        "float_workspace_buffer kv_layout='NHD' use_cuda_graph=False qo_indptr_buf=None paged_kv_indptr_buf=None "
        "paged_kv_indices_buf=None paged_kv_last_page_len_buf=None custom_mask_buf=None mask_indptr_buf=None "
        "backend='auto' jit_args=None jit_kwargs=None variant_owns_mask=False max_total_num_rows=None"
    ),
    "BatchPrefillWithPagedKVCacheWrapper.plan": (
        "qo_indptr paged_kv_indptr paged_kv_indices paged_kv_last_page_len num_qo_heads num_kv_heads head_dim_qk "
        "page_size head_dim_vo=None custom_mask=None packed_custom_mask=None causal=False "
        "pos_encoding_mode='NONE' use_fp16_qk_reduction=False sm_scale=None window_left=-1 logits_soft_cap=None "
        "rope_scale=None rope_theta=None q_data_type='float16' kv_data_type=None o_data_type=None "
        "non_blocking=True prefix_len_ptr=None token_pos_in_items_ptr=None token_pos_in_items_len=0 "
        "max_item_len_ptr=None seq_lens=None seq_lens_q=None block_tables=None max_token_per_sequence=None "
        "max_sequence_kv=None fixed_split_size=None disable_split_kv=False"
    ),
    "BatchPrefillWithRaggedKVCacheWrapper.__init__": (
        "float_workspace_buffer kv_layout='NHD' use_cuda_graph=False qo_indptr_buf=None kv_indptr_buf=None "
        "custom_mask_buf=None mask_indptr_buf=None backend='auto' jit_args=None jit_kwargs=None "
        "variant_owns_mask=False"
    ),
    "BatchPrefillWithRaggedKVCacheWrapper.plan": (
        "qo_indptr kv_indptr num_qo_heads num_kv_heads head_dim_qk head_dim_vo=None custom_mask=None "
        "packed_custom_mask=None causal=False pos_encoding_mode='NONE' use_fp16_qk_reduction=False window_left=-1 "
        "logits_soft_cap=None sm_scale=None rope_scale=None rope_theta=None q_data_type='float16' "
        "kv_data_type=None o_data_type=None non_blocking=True prefix_len_ptr=None token_pos_in_items_ptr=None "
        "token_pos_in_items_len=0 max_item_len_ptr=None fixed_split_size=None disable_split_kv=False "
        "seq_lens=None seq_lens_q=None max_token_per_sequence=None max_sequence_kv=None v_indptr=None "
        "o_indptr=None qo_indptr_cpu=None kv_indptr_cpu=None"
    ),
    "single_decode_with_kv_cache": (
        "q k v kv_layout='NHD' pos_encoding_mode='NONE' use_tensor_cores=False q_scale=None k_scale=None "
        "v_scale=None window_left=-1 logits_soft_cap=None sm_scale=None rope_scale=None rope_theta=None "
        "return_lse=False"
    ),
    "single_prefill_with_kv_cache": (
        "q k v scale_q=None scale_k=None scale_v=None o_dtype=None custom_mask=None packed_custom_mask=None "
        "causal=False kv_layout='NHD' pos_encoding_mode='NONE' use_fp16_qk_reduction=False sm_scale=None "
        "window_left=-1 logits_soft_cap=None rope_scale=None rope_theta=None backend='auto' return_lse=False "
        "kv_cache_sf=None k_scale=None v_scale=None"
    ),
    "merge_state": "v_a s_a v_b s_b",
    "merge_state_in_place": "v s v_other s_other mask=None",
    "merge_states": "v s",
    "append_paged_kv_cache": (
        "append_key append_value batch_indices positions paged_kv_cache kv_indices kv_indptr kv_last_page_len "
        "kv_layout='NHD'"
    ),
    "nvfp4_quantize_append_paged_kv_cache": (
        "append_key append_value batch_indices positions paged_kv_cache kv_cache_sf kv_indices kv_indptr "
        "kv_last_page_len k_scale v_scale kv_layout='NHD'"
    ),
    "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping": (
        "append_key append_value slot_mapping paged_kv_cache kv_cache_sf k_scale v_scale kv_layout='NHD' "
        "nvfp4_4over6=None"
    ),
    "get_batch_indices_positions": "append_indptr seq_lens nnz batch_indices=None positions=None",
    "get_seq_lens": "kv_indptr kv_last_page_len page_size",
}

RUN_KEYWORDS = {
    "BatchDecodeWithPagedKVCacheWrapper": (
        "q_scale k_scale v_scale out lse return_lse enable_pdl window_left sinks q_len_per_req "
        "skip_softmax_threshold_scale_factor kv_cache_sf"
    ),
    "BatchPrefillWithPagedKVCacheWrapper": (
        "q_scale k_scale v_scale out lse return_lse enable_pdl window_left sinks kv_cache_sf "
        "skip_softmax_threshold_scale_factor use_fp16_softmax uses_spcompress"
    ),
    "BatchPrefillWithRaggedKVCacheWrapper": (
        "q_scale k_scale v_scale o_scale out lse return_lse enable_pdl kv_cache_sf"
    ),
}

DECODE_KEYWORDS = (
    "pos_encoding_mode='NONE' window_left=-1 window_right=0 logits_soft_cap=None q_data_type='float16' "
    "kv_data_type=None o_data_type=None data_type=None sm_scale=None rope_scale=None rope_theta=None "
    "non_blocking=True block_tables=None seq_lens=None fixed_split_size=None disable_split_kv=False "
    "q_len_per_req=1"
)


@pytest.mark.parametrize("name", SIGNATURES)
def test_positional_parameters(name: str) -> None:
    function = functools.reduce(getattr, name.split("."), flashpage)
    parameters = list(inspect.signature(function).parameters.values())
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    expected = SIGNATURES[name].split()
    assert shown([p for p in positional if "." not in name or p.name != "self"]) == expected
    ours = {"lse_mode", "variant", "max_batch", "max_pages", "max_kv_rows", "max_rows", "kv_format", "o_scale"}
    ours |= {"kv_cache_sf", "k_scale", "v_scale"} if "append" in name or "decode" in name else set()
    assert {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} <= ours


@pytest.mark.parametrize("name", RUN_KEYWORDS)
def test_run_keywords(name: str) -> None:
    parameters = inspect.signature(getattr(flashpage, name).run).parameters.values()
    keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    expected = RUN_KEYWORDS[name].split()
    assert keywords[: len(expected)] == expected


def test_decode_plan_keywords() -> None:
    parameters = list(inspect.signature(flashpage.BatchDecodeWithPagedKVCacheWrapper.plan).parameters.values())
    assert shown([p for p in parameters if p.kind is p.KEYWORD_ONLY]) == DECODE_KEYWORDS.split()


@pytest.mark.parametrize(
    "name",
    [
        "BatchDecodeWithPagedKVCacheWrapper",
        "BatchPrefillWithPagedKVCacheWrapper",
        "BatchPrefillWithRaggedKVCacheWrapper",
    ],
)
def test_a_misspelt_keyword_is_a_type_error(name: str) -> None:
    """Our own keywords are accepted by name only, and unknown keywords are refused."""
    wrapper = getattr(flashpage, name)(torch.empty(1 << 20, dtype=torch.uint8))
    indptr, ones = torch.tensor([0, 1], dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    arguments = {"Decode": (indptr, ones, ones, 1, 1, 64, 16), "Ragged": (indptr, indptr, 1, 1, 64)}
    kind = next((kind for kind in arguments if kind in name), "Paged")
    given = arguments.get(kind, (indptr, indptr, ones, ones, 1, 1, 64, 16))
    with pytest.raises(TypeError, match=r"^plan\(\) got an unexpected keyword argument 'windw_left'$"):
        wrapper.plan(*given, windw_left=3)
    wrapper.plan(*given, variant=None)


def test_submodules() -> None:
    import flashpage.cascade
    import flashpage.decode
    import flashpage.page
    import flashpage.prefill

    assert flashpage.cascade.merge_state is flashpage.merge_state
    assert flashpage.decode.fast_decode_plan is flashpage.fast_decode_plan
    assert flashpage.page.get_seq_lens is flashpage.get_seq_lens
    assert issubclass(
        flashpage.BatchAttentionWithAttentionSinkWrapper, flashpage.prefill.BatchPrefillWithPagedKVCacheWrapper
    )
