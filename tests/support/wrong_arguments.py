"""Bad arguments of plan and run, one a row, with the words that the message must contain."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from flashpage import CapabilityError, PlanError, RunError

PAGES, PAGE, HEADS, KV_HEADS, DIM = 8, 16, 4, 2, 64


def ints(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def workspace(size: int = 1 << 20) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8)


def decode_plan() -> dict[str, Any]:
    return {
        "indptr": ints(0, 2, 3),
        "indices": ints(5, 2, 7),
        "last_page_len": ints(3, 16),
        "num_qo_heads": HEADS,
        "num_kv_heads": KV_HEADS,
        "head_dim": DIM,
        "page_size": PAGE,
        "q_data_type": torch.float32,
    }


def prefill_plan() -> dict[str, Any]:
    given = decode_plan()
    names = {"indptr": "paged_kv_indptr", "indices": "paged_kv_indices", "last_page_len": "paged_kv_last_page_len"}
    names["head_dim"] = "head_dim_qk"
    return {"qo_indptr": ints(0, 2, 5), **{names.get(name, name): value for name, value in given.items()}}


def ragged_plan() -> dict[str, Any]:
    heads = {"num_qo_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim_qk": DIM, "q_data_type": torch.float32}
    return {"qo_indptr": ints(0, 2, 5), "kv_indptr": ints(0, 20, 30), **heads}


def decode_run() -> dict[str, Any]:
    return {"q": torch.randn(2, HEADS, DIM), "paged_kv_cache": torch.randn(PAGES, 2, PAGE, KV_HEADS, DIM)}


def prefill_run() -> dict[str, Any]:
    return {"q": torch.randn(5, HEADS, DIM), "paged_kv_cache": torch.randn(PAGES, 2, PAGE, KV_HEADS, DIM)}


def ragged_run() -> dict[str, Any]:
    k, v = torch.randn(30, KV_HEADS, DIM), torch.randn(30, KV_HEADS, DIM)
    return {"q": torch.randn(5, HEADS, DIM), "k": k, "v": v}


KINDS: dict[str, tuple[str, Callable[[], dict[str, Any]], Callable[[], dict[str, Any]]]] = {
    "decode": ("BatchDecodeWithPagedKVCacheWrapper", decode_plan, decode_run),
    "prefill": ("BatchPrefillWithPagedKVCacheWrapper", prefill_plan, prefill_run),
    "ragged": ("BatchPrefillWithRaggedKVCacheWrapper", ragged_plan, ragged_run),
}


@dataclasses.dataclass(frozen=True)
class Bad:
    """One wrong argument of plan or run, and the words that the message must contain."""

    kind: str
    where: str  # plan | run
    argument: str
    value: Any
    says: tuple[str, ...]
    error: type[Exception] = PlanError

    def __str__(self) -> str:
        return f"{self.kind}-{self.where}-{self.argument}-{'-'.join(self.says)}".replace(" ", "_")


def plan(kind: str, argument: str, value: Any, *says: str, error: type[Exception] = PlanError) -> Bad:
    return Bad(kind, "plan", argument, value, (argument, *says), error)


def run(kind: str, argument: str, value: Any, *says: str) -> Bad:
    return Bad(kind, "run", argument, value, says, RunError)


def refused(kind: str, where: str, argument: str, value: Any) -> Bad:
    return Bad(kind, where, argument, value, (argument,), CapabilityError)


META = torch.device("meta")
CACHE = (PAGES, PAGE, KV_HEADS, DIM)

TABLE = [
    # Lengths and page numbers.
    Bad("decode", "plan", "indptr", ints(0, 2), ("last_page_len has 2 entries", "expected 1")),
    plan("decode", "indptr", ints(0, 3, 2), "indptr[2]=2", "never decreases"),
    plan("decode", "indptr", ints(-1, 2, 3), "indptr[0]=-1", "negative"),
    plan("decode", "indptr", torch.tensor([0.0, 2, 3]), "float32", "int32 or int64"),
    plan("decode", "indptr", ints(0, 2, 3).view(1, 3), "(1, 3)", "[batch + 1]"),
    plan("decode", "indptr", [0, 2, 3], "not a tensor", "torch.Tensor"),
    plan("decode", "indptr", ints(0, 2, 9), "indices has 3 entries", "ends at 9"),
    plan("decode", "indptr", ints(0, 2, 3).to(torch.int16), "int16", "int32 or int64"),
    plan("decode", "indptr", ints(0, 2**40, 2**41, dtype=torch.int64), "31 bits"),
    plan("decode", "indptr", ints(2**40, 2**40 + 2, 2**40 + 3, dtype=torch.int64), "indptr[1]", "31 bits"),
    plan(
        "decode", "indptr", ints(0, 2, -(2**63), dtype=torch.int64), "indptr[2]=-9223372036854775808", "never decreases"
    ),
    plan("decode", "indices", ints(5, -2, 7), "indices[1]=-2", "0 or more"),
    plan("decode", "indices", torch.tensor([5, 2**31, 7]), f"indices[1]={2**31}", "below 2^31"),
    plan("decode", "indices", torch.tensor([5.0, 2, 7]), "float32"),
    plan("decode", "indices", ints(5, 2, 7).view(3, 1), "one dimension"),
    plan("decode", "last_page_len", ints(3, 17), "last_page_len[1]=17", "1..16"),
    plan("decode", "last_page_len", ints(0, 16), "last_page_len[0]=0", "1..16"),
    plan("decode", "last_page_len", ints(3, 16, 1), "3 entries", "expected 2"),
    plan("decode", "last_page_len", None, "last_page_len=None", "seq_lens=None", "the tokens of each request"),
    plan("prefill", "paged_kv_last_page_len", None, "paged_kv_last_page_len=None", "seq_lens=None"),
    plan("decode", "seq_lens", ints(40, 16), "seq_lens[0]=40", "32 tokens"),
    plan("decode", "seq_lens", ints(-1, 16), "seq_lens[0]=-1", "negative"),
    plan("decode", "block_tables", torch.zeros(1, 4, dtype=torch.int32), "(1, 4)"),
    plan("prefill", "qo_indptr", None, "qo_indptr=None", "torch.Tensor"),
    plan("ragged", "qo_indptr", None, "qo_indptr=None", "torch.Tensor"),
    plan("prefill", "qo_indptr", ints(0, 5, 2), "qo_indptr[2]=2", "never decreases"),
    plan("prefill", "paged_kv_indptr", ints(0, 2, 3, 3), "4 entries", "2 requests", "expected 3"),
    plan("prefill", "max_token_per_sequence", 2, "max_token_per_sequence=2", "has 3"),
    plan("prefill", "max_sequence_kv", 16, "max_sequence_kv=16", "has 19"),
    plan("prefill", "max_sequence_kv", "19", "'19'", "integer"),
    plan("prefill", "max_sequence_kv", -1, "at least 0"),
    plan("ragged", "kv_indptr", ints(0, 20), "2 entries", "expected 3"),
    plan("ragged", "seq_lens", ints(21, 10), "seq_lens[0]=21", "20 tokens"),
    # Heads, dims, types and options.
    plan("decode", "num_kv_heads", 3, "num_qo_heads=4", "num_kv_heads=3"),
    plan("decode", "num_qo_heads", 0, "num_qo_heads=0", "at least 1"),
    plan("decode", "num_qo_heads", 4.0, "num_qo_heads=4.0", "integer"),
    plan("decode", "page_size", 0, "page_size=0", "at least 1"),
    plan("decode", "head_dim", -64, "head_dim=-64"),
    plan("decode", "head_dim", 0, "head_dim=0", "pass a multiple of 8 from 16 to 512"),
    plan("decode", "q_data_type", torch.int8, "int8", "float16"),
    plan("decode", "kv_data_type", "int4", "int4", "bfloat16"),
    plan("decode", "window_left", 2.5, "window_left=2.5", "integer"),
    plan("decode", "logits_soft_cap", float("nan"), "logits_soft_cap=nan", "finite"),
    plan("decode", "sm_scale", "a", "sm_scale='a'", "number"),
    plan("decode", "rope_theta", -1.0, "rope_theta=-1.0", "positive"),
    plan("decode", "rope_scale", 0.0, "rope_scale=0.0", "positive"),
    plan("decode", "pos_encoding_mode", "ROPE", "'ROPE'", "ROPE_LLAMA"),
    plan("decode", "fixed_split_size", 0, "fixed_split_size=0"),
    plan("decode", "q_len_per_req", 0, "q_len_per_req=0"),
    plan("decode", "variant", lambda score: score, "flashpage.Variant"),
    # Masks.
    plan("prefill", "custom_mask", torch.ones(50, dtype=torch.bool), "50 values", "86"),
    plan("prefill", "custom_mask", torch.ones(86), "float32", "bool or uint8"),
    plan("prefill", "packed_custom_mask", torch.ones(10, dtype=torch.uint8), "10 values", "11 bytes"),
    plan("prefill", "packed_custom_mask", torch.ones(12, dtype=torch.int32), "int32", "uint8"),
    plan("prefill", "prefix_len_ptr", ints(1, 2), "token_pos_in_items_ptr=None"),
    # Combinations that no kernel supports.
    plan("decode", "head_dim", 12, "head_dim=12", "pass a multiple of 8 from 16 to 512", error=CapabilityError),
    plan("decode", "head_dim", 520, "head_dim=520", error=CapabilityError),
    plan("prefill", "head_dim_qk", 65, "head_dim_qk=65", "multiple of 8", error=CapabilityError),
    plan("prefill", "head_dim_vo", 8, "head_dim_vo=8", "multiple of 8", error=CapabilityError),
    plan("ragged", "head_dim_vo", 65, "head_dim_vo=65", "multiple of 8", error=CapabilityError),
    plan("decode", "kv_data_type", torch.bfloat16, "kv_data_type bfloat16", "cpu_attention", error=CapabilityError),
    plan("decode", "o_data_type", torch.float8_e5m2, "o_data_type float8_e5m2", error=CapabilityError),
    refused("decode", "plan", "window_right", 3),
    refused("prefill", "plan", "use_fp16_qk_reduction", True),
    refused("prefill", "plan", "seq_lens_q", ints(2, 3)),
    refused("ragged", "plan", "v_indptr", ints(0, 20, 30)),
    refused("ragged", "plan", "o_indptr", ints(0, 2, 5)),
    run("ragged", "o_scale", 0.5, "plan's outputs are float32", "o_data_type=torch.float8_e4m3fn"),
    run("decode", "o_scale", torch.ones(2), "a tensor of shape (2,)", "leave it None"),
    run("decode", "kv_cache_sf", torch.ones(2), "shape (2,)", "pass [pages, 2, ...]"),
    run("decode", "kv_cache_sf", [torch.ones(2)] * 3, "3 entries"),
    run("decode", "kv_cache_sf", [torch.ones(PAGES, PAGE, KV_HEADS)] * 2, "has no scales of its own", "kv_format"),
    plan("decode", "kv_format", "int5", "'nvfp4'", "'int8_token'"),
    plan("decode", "kv_format", ("nvfp4", "int4_token_rotated"), "rows of V are not rotated"),
    refused("decode", "run", "skip_softmax_threshold_scale_factor", 0.5),
    refused("prefill", "run", "use_fp16_softmax", True),
    refused("prefill", "run", "uses_spcompress", True),
    refused("prefill", "run", "lse_layout", "HN"),
    # Arguments of run that do not fit the plan.
    run("decode", "q", torch.randn(3, HEADS, DIM), "3 rows", "plan is for 2"),
    run("decode", "q", torch.randn(2, 2 * HEADS, DIM), "8 heads", "num_qo_heads=4"),
    run("decode", "q", torch.randn(2, 3, DIM), "3 heads"),
    run("decode", "q", torch.randn(2, 0, DIM), "q has 0 heads", "plan is for 4"),
    run("prefill", "q", torch.randn(5, 0, DIM), "q has 0 heads"),
    run("ragged", "q", torch.randn(5, 0, DIM), "q has 0 heads"),
    run("decode", "q", torch.randn(2, HEADS, 2 * DIM), "(2, 4, 128)"),
    run("decode", "q", torch.randn(2, HEADS * DIM), "(2, 256)"),
    run("decode", "q", torch.randn(2, HEADS, DIM).half(), "float16", "q_data_type"),
    run("decode", "q", torch.empty(2, HEADS, DIM, device=META), "q is on meta"),
    run("decode", "q", torch.randn(2, HEADS, 2 * DIM)[..., ::2], "strides", "contiguous"),
    run("decode", "q", None, "q=None", "torch.Tensor"),
    run("decode", "paged_kv_cache", torch.randn(PAGES, 2, 8, KV_HEADS, DIM), "pages of 8", "page_size=16"),
    run("decode", "paged_kv_cache", torch.randn(7, 2, PAGE, KV_HEADS, DIM), "7 pages", "reach 7"),
    run("decode", "paged_kv_cache", torch.randn(PAGES, 2, PAGE, 4, DIM), "num_kv_heads=2"),
    run("decode", "paged_kv_cache", torch.randn(PAGES, 2, PAGE, KV_HEADS, 32), "32", "64"),
    run("decode", "paged_kv_cache", torch.randn(PAGES, 3, PAGE, KV_HEADS, DIM), "(8, 3, 16, 2, 64)"),
    run("decode", "paged_kv_cache", torch.randn(PAGES, 2, PAGE, KV_HEADS, DIM).half(), "float16", "kv_data_type"),
    run("decode", "paged_kv_cache", (torch.randn(CACHE),), "has 1 tensors", "pair"),
    run("decode", "paged_kv_cache", (torch.randn(CACHE), torch.randn(9, *CACHE[1:])), "(9, 16, 2, 64)"),
    run("decode", "paged_kv_cache", (torch.randn(CACHE), None), "not a tensor"),
    run("decode", "paged_kv_cache", torch.randn(PAGES, 2, PAGE), "(8, 2, 16)", "[pages, 2, ...]"),
    run("decode", "paged_kv_cache", torch.randn(PAGES, 2, PAGE, DIM, KV_HEADS).transpose(3, 4), "strides"),
    run("decode", "out", torch.empty(2, HEADS, 32), "out has shape (2, 4, 32)", "(2, 4, 64)"),
    run("decode", "out", torch.empty(2, HEADS, DIM).half(), "float16", "float32"),
    run("decode", "lse", torch.empty(2, HEADS, dtype=torch.float64), "lse", "float32"),
    run("decode", "lse", torch.empty(HEADS, 2).T, "lse has strides", "contiguous"),
    run("decode", "sinks", torch.zeros(3), "sinks has shape (3,)", "[4]"),
    run("decode", "sinks", torch.zeros(HEADS).half(), "float16", "float32"),
    run("decode", "k_scale", torch.ones(3), "k_scale has shape (3,)", "[2] (one a head)"),
    run("decode", "q_scale", torch.ones(HEADS).half(), "q_scale", "float32"),
    run("decode", "q_len_per_req", 2, "q_len_per_req=2", "plan is for 1"),
    run("ragged", "k", torch.randn(29, KV_HEADS, DIM), "29"),
    run("ragged", "v", torch.randn(30, 1, DIM), "(30, 1, 64)"),
    run("ragged", "v", None, "v=None"),
]
