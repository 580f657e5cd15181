"""Names, order and defaults of the parameters of FlashInfer's smaller wrappers and functions."""

from __future__ import annotations

import functools
import inspect

import pytest
from signatures import shown

import flashpage

# Positional parameters of FlashInfer 0.7.4 as name=default; a name alone has no default. One default is ours:
# FlashInfer's BlockSparseAttentionWrapper.plan has o_data_type='float16', which silently narrows wider outputs.
SIGNATURES: dict[str, str] = {
    "MultiLevelCascadeAttentionWrapper.__init__": (
        "num_levels float_workspace_buffer kv_layout='NHD' use_cuda_graph=False qo_indptr_buf_arr=None "
        "paged_kv_indptr_buf_arr=None paged_kv_indices_buf_arr=None paged_kv_last_page_len_buf_arr=None"
    ),
    "MultiLevelCascadeAttentionWrapper.plan": (
        "qo_indptr_arr paged_kv_indptr_arr paged_kv_indices_arr paged_kv_last_page_len num_qo_heads "
        "num_kv_heads head_dim page_size causal=False pos_encoding_mode='NONE' use_fp16_qk_reduction=False "
        "sm_scale=None window_left=-1 logits_soft_cap=None rope_scale=None rope_theta=None "
        "q_data_type='float16' kv_data_type=None"
    ),
    "MultiLevelCascadeAttentionWrapper.run": ("q paged_kv_cache"),
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper.__init__": ("float_workspace_buffer kv_layout='NHD'"),
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper.begin_forward": (
        "unique_kv_indptr unique_kv_indices unique_kv_last_page_len num_qo_heads num_kv_heads head_dim "
        "page_size data_type='float16'"
    ),
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper.forward": ("q k_shared v_shared unique_kv_cache"),
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper.__init__": ("float_workspace_buffer kv_layout='NHD'"),
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper.begin_forward": (
        "qo_indptr paged_kv_indptr paged_kv_indices paged_kv_last_page_len num_qo_heads num_kv_heads head_dim page_size"
    ),
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper.forward": (
        "q k_shared v_shared unique_kv_cache causal=False use_fp16_qk_reduction=False sm_scale=None "
        "rope_scale=None rope_theta=None"
    ),
    "PODWithPagedKVCacheWrapper.__init__": (
        "float_workspace_buffer kv_layout='NHD' use_cuda_graph=False paged_kv_indptr_buffer=None "
        "paged_kv_indices_buffer=None paged_kv_last_page_len_buffer=None jit_args=None"
    ),
    "PODWithPagedKVCacheWrapper.plan": (
        "indptr indices last_page_len num_qo_heads num_kv_heads head_dim page_size pos_encoding_mode='NONE' "
        "window_left=-1 q_data_type='float16' kv_data_type=None data_type=None sm_scale=None rope_scale=None "
        "rope_theta=None non_blocking=True"
    ),
    "PODWithPagedKVCacheWrapper.run": (
        "q_p k_p v_p q_d paged_kv_cache_d custom_mask_p=None packed_custom_mask_p=None causal_p=False "
        "kv_layout_p='NHD' pos_encoding_mode_p='NONE' sm_scale_p=None window_left_p=-1 rope_scale_p=None "
        "rope_theta_p=None return_lse_p=False custom_mask_d=None packed_custom_mask_d=None causal_d=False "
        "kv_layout_d='NHD' pos_encoding_mode_d='NONE' sm_scale_d=None window_left_d=-1 rope_scale_d=None "
        "rope_theta_d=None q_scale=None k_scale=None v_scale=None return_lse_d=False "
        "use_fp16_qk_reduction=False enable_pdl=None"
    ),
    "BatchPODWithPagedKVCacheWrapper.__init__": ("float_workspace_buffer kv_layout='NHD'"),
    "BatchPODWithPagedKVCacheWrapper.plan": (
        "qo_indptr_p kv_indptr_p kv_indices_p last_page_len_p qo_indptr_d kv_indptr_d kv_indices_d "
        "last_page_len_d num_qo_heads num_kv_heads head_dim page_size pos_encoding_mode='NONE' window_left=-1 "
        "q_data_type='float16' kv_data_type=None data_type=None sm_scale=None rope_scale=None rope_theta=None "
        "non_blocking=True"
    ),
    "BatchPODWithPagedKVCacheWrapper.run": (
        "q_p paged_kv_cache_p q_d paged_kv_cache_d custom_mask_p=None packed_custom_mask_p=None "
        "causal_p=False q_scale=None k_scale=None v_scale=None return_lse=False use_fp16_qk_reduction=False "
        "enable_pdl=None"
    ),
    "BlockSparseAttentionWrapper.__init__": ("float_workspace_buffer backend='auto'"),
    "BlockSparseAttentionWrapper.plan": (
        "indptr indices M N R C num_qo_heads num_kv_heads head_dim mask=None packed_mask=None causal=False "
        "pos_encoding_mode='NONE' use_fp16_qk_reduction=False logits_soft_cap=None sm_scale=None "
        "rope_scale=None rope_theta=None q_data_type='float16' kv_data_type=None o_data_type=None "
        "non_blocking=True block_mask=None kv_block_lens=None q2k_indices=None q2k_num=None kv_splits=None "
        "use_clc=None q_scale=None k_scale=None v_scale=None"
    ),
    "BlockSparseAttentionWrapper.forward": (
        "q k v scale_q=None scale_k=None scale_v=None pos_encoding_mode='NONE' use_fp16_qk_reduction=False "
        "logits_soft_cap=None sm_scale=None rope_scale=None rope_theta=None"
    ),
    "BlockSparseAttentionWrapper.run": (
        "q k v scale_q=None scale_k=None scale_v=None out=None lse=None return_lse=False enable_pdl=None"
    ),
    "VariableBlockSparseAttentionWrapper.__init__": ("float_workspace_buffer backend='auto'"),
    "VariableBlockSparseAttentionWrapper.plan": (
        "block_mask_map block_row_sz block_col_sz num_qo_heads num_kv_heads head_dim causal=False "
        "pos_encoding_mode='NONE' use_fp16_qk_reduction=False logits_soft_cap=None sm_scale=None "
        "rope_scale=None rope_theta=None non_blocking=True q_data_type='float16' kv_data_type=None "
        "q_scale=None k_scale=None v_scale=None"
    ),
    "VariableBlockSparseAttentionWrapper.forward": (
        "q k v pos_encoding_mode='NONE' use_fp16_qk_reduction=False logits_soft_cap=None sm_scale=None "
        "rope_scale=None rope_theta=None"
    ),
    "VariableBlockSparseAttentionWrapper.run": ("q k v out=None lse=None return_lse=False enable_pdl=None"),
    "BatchAttention.__init__": ("kv_layout='NHD' device='cuda'"),
    "BatchAttention.plan": (
        "qo_indptr kv_indptr kv_indices kv_len_arr num_qo_heads num_kv_heads head_dim_qk head_dim_vo "
        "page_size causal=False sm_scale=None logits_soft_cap=None q_data_type=torch.bfloat16 "
        "kv_data_type=torch.bfloat16 use_profiler=False"
    ),
    "BatchAttention.run": (
        "q kv_cache out=None lse=None k_scale=None v_scale=None logits_soft_cap=0.0 profiler_buffer=None "
        "kv_cache_sf=None"
    ),
    "BatchAttentionWithAttentionSinkWrapper.__init__": (
        "float_workspace_buffer kv_layout='NHD' use_cuda_graph=False qo_indptr_buf=None "
        "paged_kv_indptr_buf=None paged_kv_indices_buf=None paged_kv_last_page_len_buf=None "
        "custom_mask_buf=None mask_indptr_buf=None backend='auto' pos_encoding_mode='NONE' "
        "use_fp16_qk_reduction=False q_data_type=torch.bfloat16 kv_data_type=torch.bfloat16 head_dim_qk=128 "
        "head_dim_vo=128 window_left=-1"
    ),
    "append_paged_mla_kv_cache": (
        "append_ckv append_kpe batch_indices positions ckv_cache kpe_cache kv_indices kv_indptr kv_last_page_len"
    ),
    "single_decode_with_kv_cache_with_jit_module": ("jit_module q k v"),
    "single_prefill_with_kv_cache_with_jit_module": ("jit_module q k v"),
}
_LSE_MODE = "lse_mode='base2'"
_OUTPUTS = f"out=None lse=None return_lse=False {_LSE_MODE}"
_JIT = f"window_left=-1 return_lse=False {_LSE_MODE}"
KEYWORDS = {  # keyword-only in FlashInfer; ours come after them
    "append_paged_mla_kv_cache": "ckv_scale=None ckv_scale_arr=None kpe_scale=None kv_row_format=None",
    "BatchAttention.run": _LSE_MODE,
    "BatchPODWithPagedKVCacheWrapper.run": _LSE_MODE,
    "BlockSparseAttentionWrapper.run": _LSE_MODE,
    "VariableBlockSparseAttentionWrapper.run": _LSE_MODE,
    "BatchAttention.plan": "kv_format=None",
    "MultiLevelCascadeAttentionWrapper.run": f"{_OUTPUTS} k_scale=None v_scale=None kv_cache_sf=None",
    "MultiLevelCascadeAttentionWrapper.forward": f"{_OUTPUTS} k_scale=None v_scale=None kv_cache_sf=None",
    "single_decode_with_kv_cache_with_jit_module": f"kv_layout='NHD' {_JIT}",
    "single_prefill_with_kv_cache_with_jit_module": f"kv_layout='NHD' mask_mode=0 {_JIT}",
}


def parameters_of(name: str) -> list[inspect.Parameter]:
    function = functools.reduce(getattr, name.split("."), flashpage)
    return [p for p in inspect.signature(function).parameters.values() if "." not in name or p.name != "self"]


@pytest.mark.parametrize("name", SIGNATURES)
def test_positional_parameters(name: str) -> None:
    positional = [p for p in parameters_of(name) if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert shown(positional) == SIGNATURES[name].split()


@pytest.mark.parametrize("name", [*SIGNATURES, *KEYWORDS])
def test_keywords(name: str) -> None:
    keywords = [p for p in parameters_of(name) if p.kind is p.KEYWORD_ONLY]
    assert shown(keywords) == KEYWORDS.get(name, "").split()


WITHOUT = ("BatchAttention", "VariableBlockSparseAttentionWrapper")


@pytest.mark.parametrize("name", [n.removesuffix(".plan") for n in SIGNATURES if n.endswith(".plan")])
def test_begin_forward_is_plan(name: str) -> None:
    found = getattr(flashpage, name)
    assert getattr(found, "begin_forward", None) is (None if name in WITHOUT else found.plan)
