"""Bad input, a table: each row is told with argument, value and fix; none crashes, and the wrapper still works."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashpage
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
    """One wrong argument of plan or run, and words that the message must hold."""

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
    plan("decode", "indptr", [0, 2, 3], "list", "torch.Tensor"),
    plan("decode", "indptr", ints(0, 2, 9), "indices has 3 entries", "ends at 9"),
    plan("decode", "indptr", ints(0, 2, 3).to(torch.int16), "int16", "int32 or int64"),
    plan("decode", "indptr", ints(0, 2**40, 2**41, dtype=torch.int64), "31 bits"),
    plan("decode", "indices", ints(5, -2, 7), "indices[1]=-2", "0 or more"),
    plan("decode", "indices", torch.tensor([5.0, 2, 7]), "float32"),
    plan("decode", "indices", ints(5, 2, 7).view(3, 1), "one dimension"),
    plan("decode", "last_page_len", ints(3, 17), "last_page_len[1]=17", "1..16"),
    plan("decode", "last_page_len", ints(0, 16), "last_page_len[0]=0", "1..16"),
    plan("decode", "last_page_len", ints(3, 16, 1), "3 entries", "expected 2"),
    plan("decode", "seq_lens", ints(40, 16), "seq_lens[0]=40", "32 tokens"),
    plan("decode", "seq_lens", ints(-1, 16), "seq_lens[0]=-1", "negative"),
    plan("decode", "block_tables", torch.zeros(1, 4, dtype=torch.int32), "(1, 4)"),
    plan("prefill", "qo_indptr", None, "qo_indptr=None", "torch.Tensor"),
    plan("ragged", "qo_indptr", None, "qo_indptr=None", "torch.Tensor"),
    plan("prefill", "qo_indptr", ints(0, 5, 2), "qo_indptr[2]=2", "never decreases"),
    plan("prefill", "paged_kv_indptr", ints(0, 2, 3, 3), "4 entries", "2 requests", "expected 3"),
    plan("prefill", "max_token_per_sequence", 2, "max_token_per_sequence=2", "has 3"),
    plan("prefill", "max_sequence_kv", 16, "max_sequence_kv=16", "has 19"),
    plan("ragged", "kv_indptr", ints(0, 20), "2 entries", "expected 3"),
    plan("ragged", "seq_lens", ints(21, 10), "seq_lens[0]=21", "20 tokens"),
    # Heads, dims, types and options.
    plan("decode", "num_kv_heads", 3, "num_qo_heads=4", "num_kv_heads=3"),
    plan("decode", "num_qo_heads", 0, "num_qo_heads=0", "at least 1"),
    plan("decode", "num_qo_heads", 4.0, "num_qo_heads=4.0", "integer"),
    plan("decode", "page_size", 0, "page_size=0", "at least 1"),
    plan("decode", "head_dim", -64, "head_dim=-64"),
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
    # What no kernel honours.
    plan(
        "decode", "head_dim", 12, "no kernel", "head_dim_qk 12", "multiple of 8 from 16 to 512", error=CapabilityError
    ),
    plan("decode", "head_dim", 520, "head_dim_qk 520", error=CapabilityError),
    plan("decode", "kv_data_type", torch.bfloat16, "kv_data_type bfloat16", "attention_sm80", error=CapabilityError),
    plan("decode", "o_data_type", torch.float8_e5m2, "o_data_type float8_e5m2", error=CapabilityError),
    refused("decode", "plan", "window_right", 3),
    refused("prefill", "plan", "use_fp16_qk_reduction", True),
    refused("prefill", "plan", "seq_lens_q", ints(2, 3)),
    refused("ragged", "plan", "v_indptr", ints(0, 20, 30)),
    refused("ragged", "plan", "o_indptr", ints(0, 2, 5)),
    refused("decode", "run", "kv_cache_sf", torch.ones(2)),
    refused("decode", "run", "skip_softmax_threshold_scale_factor", 0.5),
    refused("prefill", "run", "use_fp16_softmax", True),
    refused("prefill", "run", "uses_spcompress", True),
    refused("prefill", "run", "lse_base", "e"),
    refused("prefill", "run", "lse_layout", "HN"),
    refused("ragged", "run", "o_scale", 0.5),
    # Runs that do not fit the plan.
    run("decode", "q", torch.randn(3, HEADS, DIM), "3 rows", "plan is for 2"),
    run("decode", "q", torch.randn(2, 2 * HEADS, DIM), "8 heads", "num_qo_heads=4"),
    run("decode", "q", torch.randn(2, 3, DIM), "3 heads"),
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
    run("decode", "paged_kv_cache", (torch.randn(CACHE),), "tuple of 1"),
    run("decode", "paged_kv_cache", (torch.randn(CACHE), torch.randn(9, *CACHE[1:])), "(9, 16, 2, 64)"),
    run("decode", "paged_kv_cache", (torch.randn(CACHE), None), "NoneType"),
    run("decode", "paged_kv_cache", torch.randn(PAGES, 2, PAGE), "(8, 2, 16)", "[pages, 2, ...]"),
    run("decode", "paged_kv_cache", torch.randn(PAGES, 2, PAGE, DIM, KV_HEADS).transpose(3, 4), "strides"),
    run("decode", "out", torch.empty(2, HEADS, 32), "out has shape (2, 4, 32)", "(2, 4, 64)"),
    run("decode", "out", torch.empty(2, HEADS, DIM).half(), "float16", "float32"),
    run("decode", "lse", torch.empty(2, HEADS, dtype=torch.float64), "lse", "float32"),
    run("decode", "lse", torch.empty(HEADS, 2).T, "lse has strides", "contiguous"),
    run("decode", "sinks", torch.zeros(3), "sinks has shape (3,)", "[4]"),
    run("decode", "sinks", torch.zeros(HEADS).half(), "float16", "float32"),
    run("decode", "k_scale", torch.ones(3), "k_scale has 3 entries", "(2)"),
    run("decode", "q_scale", torch.ones(HEADS).half(), "q_scale", "float32"),
    run("decode", "q_len_per_req", 2, "q_len_per_req=2", "plan is for 1"),
    run("ragged", "k", torch.randn(29, KV_HEADS, DIM), "29"),
    run("ragged", "v", torch.randn(30, 1, DIM), "(30, 1, 64)"),
    run("ragged", "v", None, "v=None"),
]


@pytest.mark.parametrize("row", TABLE, ids=str)
def test_bad_argument_is_told(row: Bad) -> None:
    name, plan_arguments, run_arguments = KINDS[row.kind]
    wrapper = getattr(flashpage, name)(workspace())
    planned, ran = plan_arguments(), run_arguments()
    (planned if row.where == "plan" else ran)[row.argument] = row.value
    with pytest.raises(row.error) as caught:
        wrapper.plan(**planned)
        wrapper.run(**ran)
    message = str(caught.value)
    for word in row.says:
        assert word in message, f"{word!r} is not in: {message}"
    assert message.rstrip().endswith(".") or row.error is CapabilityError, message
    # A wrapper that has refused still works.
    wrapper.plan(**plan_arguments())
    assert bool(wrapper.run(**run_arguments()).isfinite().all())


def test_there_are_enough_rows() -> None:
    assert len(TABLE) >= 40
    assert len({str(row) for row in TABLE}) == len(TABLE)


@pytest.mark.parametrize("kind", KINDS)
def test_run_without_a_plan(kind: str) -> None:
    name, plan_arguments, run_arguments = KINDS[kind]
    wrapper = getattr(flashpage, name)(workspace())
    with pytest.raises(RunError, match="has no plan"):
        wrapper.run(**run_arguments())
    with pytest.raises(RunError, match="has no plan"):
        _ = wrapper.last_plan
    wrapper.plan(**plan_arguments())
    wrapper.run(**run_arguments())
    broken = plan_arguments() | {"num_kv_heads": 3}
    with pytest.raises(PlanError):
        wrapper.plan(**broken)
    with pytest.raises(RunError, match="again, where it failed"):  # never the plan before
        wrapper.run(**run_arguments())


CONSTRUCTORS = [
    ({"float_workspace_buffer": None}, PlanError, "float_workspace_buffer=None"),
    ({"float_workspace_buffer": torch.empty(8, device=META)}, PlanError, "meta"),
    ({"float_workspace_buffer": workspace()[3:]}, PlanError, "16 bytes"),
    ({"float_workspace_buffer": workspace()[::2]}, PlanError, "contiguous"),
    ({"kv_layout": "NDH"}, PlanError, "'NDH'"),
    ({"backend": "trtllm-gen"}, CapabilityError, "'trtllm-gen'"),
    ({"backend": "cutlass"}, CapabilityError, "'cutlass'"),
    ({"jit_args": ["uri"]}, CapabilityError, "flashpage.Variant"),
    ({"use_cuda_graph": True}, PlanError, "paged_kv_indptr_buffer=None"),
]


@pytest.mark.parametrize(("changed", "error", "says"), CONSTRUCTORS)
def test_bad_constructor(changed: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        flashpage.BatchDecodeWithPagedKVCacheWrapper(**({"float_workspace_buffer": workspace()} | changed))


def test_graph_buffers_are_judged() -> None:
    given = {"float_workspace_buffer": workspace(), "use_cuda_graph": True}
    buffers = {"paged_kv_indptr_buffer": ints(0, 0, 0), "paged_kv_last_page_len_buffer": ints(0, 0)}
    make = flashpage.BatchDecodeWithPagedKVCacheWrapper
    with pytest.raises(PlanError, match="int32"):
        make(**given, **buffers, paged_kv_indices_buffer=torch.zeros(4, dtype=torch.int64))
    with pytest.raises(PlanError, match="3 requests"):
        short = buffers | {"paged_kv_last_page_len_buffer": ints(0, 0, 0)}
        make(**given, **short, paged_kv_indices_buffer=ints(0, 0, 0, 0))
    wrapper = make(**given, **buffers, paged_kv_indices_buffer=ints(0, 0))
    with pytest.raises(PlanError, match="indices has 3 entries but .* holds 2"):
        wrapper.plan(**decode_plan())
    with pytest.raises(PlanError, match="fix it at 2"):
        wrapper.plan(**(decode_plan() | {"indptr": ints(0, 1), "last_page_len": ints(3)}))


def test_indices_on_the_device_are_checked_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """FLASHPAGE_CHECK_INDICES=on. On the CPU page numbers are always checked, so the switch itself is looked at."""
    from flashpage.plan.page_indices import KvIndices

    assert not KvIndices(torch.device("cpu"))._check_on_device
    monkeypatch.setenv("FLASHPAGE_CHECK_INDICES", "on")
    assert KvIndices(torch.device("cpu"))._check_on_device


def test_workspaces_too_small() -> None:
    plan_arguments = decode_plan() | {"indptr": ints(0, 400), "indices": torch.zeros(400, dtype=torch.int32)}
    plan_arguments["last_page_len"] = ints(16)
    wrapper = flashpage.BatchDecodeWithPagedKVCacheWrapper(workspace(64))
    needed = wrapper.workspace_size(**plan_arguments)
    with pytest.raises(PlanError, match=r"float_workspace_buffer has 64 bytes but this plan needs \d+"):
        wrapper.plan(**plan_arguments, fixed_split_size=16)
    wrapper.reset_workspace_buffer(workspace(), workspace(64))
    with pytest.raises(PlanError, match=r"int_workspace_buffer has 64 bytes but this plan needs \d+"):
        wrapper.plan(**plan_arguments)
    wrapper.reset_workspace_buffer(workspace(max(16, needed[0])), workspace(needed[1]))
    wrapper.plan(**plan_arguments)


SINGLE = (*(torch.zeros(2, 4, 64),) * 3, None, 1.0, None, None, None, None, False, "NHD", "NONE", False, None, -1)
SINGLE += (None, None, None, "auto", False, None, 2.0)  # scale_k=1 and k_scale=2


@pytest.mark.parametrize(
    ("function", "arguments", "says"),
    [
        ("merge_state", (torch.zeros(2, 4, 64), torch.zeros(2, 4), torch.zeros(2, 4, 32), torch.zeros(2, 4)), "v_b"),
        ("merge_state", (torch.zeros(2, 4, 64), torch.zeros(2, 3)) * 2, "s_a has shape (2, 3)"),
        ("merge_state", (torch.zeros(2, 4, 64).int(), torch.zeros(2, 4)) * 2, "v_a has dtype"),
        ("merge_state", (torch.zeros(2, 4, 64), torch.zeros(2, 4).half()) * 2, "float32"),
        ("merge_states", (torch.zeros(2, 4, 64), torch.zeros(2, 4)), "num_states"),
        ("merge_states", (torch.zeros(2, 0, 4, 64), torch.zeros(2, 0, 4)), "at least one state"),
        (
            "merge_state_in_place",
            (torch.zeros(2, 4, 64), torch.zeros(2, 4)) * 2 + (torch.ones(3, dtype=torch.bool),),
            "mask has shape (3,)",
        ),
        (
            "merge_state_in_place",
            (torch.zeros(4, 2, 64).transpose(0, 1), torch.zeros(2, 4), torch.zeros(2, 4, 64), torch.zeros(2, 4)),
            "v has strides",
        ),
        ("packbits", (torch.zeros(3),), "bool or uint8"),
        ("packbits", (torch.zeros(3, dtype=torch.bool), "middle"), "'middle'"),
        ("segment_packbits", (torch.zeros(3, dtype=torch.bool), ints(0, 5)), "3 values"),
        ("segment_packbits", (torch.zeros(3, dtype=torch.bool), torch.zeros(2)), "float32"),
        ("get_seq_lens", (ints(0, 2), ints(1, 2), 16), "kv_last_page_len has shape (2,)"),
        ("get_batch_indices_positions", (ints(0, 2), ints(1, 2), 2), "seq_lens has shape (2,)"),
        ("single_decode_with_kv_cache", (torch.zeros(1, 4, 64),) * 3, "one row"),
        ("single_prefill_with_kv_cache", (torch.zeros(4, 64),) * 3, "three dimensions"),
        ("single_prefill_with_kv_cache", SINGLE, "k_scale"),
    ],
)
def test_bad_function_argument(function: str, arguments: tuple[Any, ...], says: str) -> None:
    with pytest.raises((RunError, PlanError)) as caught:
        getattr(flashpage, function)(*arguments)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("argument", "value", "says"),
    [
        ("append_key", torch.zeros(2, 3, DIM), "append_key has shape (2, 3, 64)"),
        ("append_value", torch.zeros(2, KV_HEADS, DIM).half(), "append_value has shape"),
        ("batch_indices", ints(0, 2), "2 requests"),
        ("batch_indices", ints(0), "batch_indices has 1 entries"),
        ("positions", ints(0, 16), "16 of request 1"),
        ("positions", ints(-1, 0), "-1 of request 0"),
        ("kv_indices", ints(5, 2, 8), "8 pages"),
        ("kv_indices", torch.zeros(3), "float32"),
        ("kv_last_page_len", ints(1), "kv_last_page_len has 1"),
        ("kv_layout", "NDH", "'NDH'"),
    ],
)
def test_bad_append(argument: str, value: Any, says: str) -> None:
    new = torch.zeros(2, KV_HEADS, DIM)
    given = {"append_key": new, "append_value": new, "batch_indices": ints(0, 1), "positions": ints(17, 3)}
    given |= {"paged_kv_cache": torch.zeros(PAGES, 2, PAGE, KV_HEADS, DIM), "kv_indices": ints(5, 2, 7)}
    given |= {"kv_indptr": ints(0, 2, 3), "kv_last_page_len": ints(2, 4), "kv_layout": "NHD"}
    flashpage.append_paged_kv_cache(**given)
    with pytest.raises((RunError, PlanError)) as caught:
        flashpage.append_paged_kv_cache(**(given | {argument: value}))
    assert says in str(caught.value)
