"""What sgl-flash-mla 1.0.0 has in addition to its predecessors: arguments, metadata, prompts and refused names."""

from __future__ import annotations

import copy
import math
import pickle
import threading
from typing import Any

import pytest
import torch
from reference import Options, attention

from flashpage import CapabilityError, FlashpageError, RunError, compat, flash_mla
from flashpage.wrappers import function_plans
from flashpage.wrappers.base import Attention

pytestmark = pytest.mark.usefixtures("quick_kernels")

HEADS, CKV, KPE, PAGE, SCALE, TOPK = 4, 64, 32, 8, 0.2, 6


def dense(requests: int = 2, **changes: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    given = {
        "q": torch.randn(3, 1, HEADS, CKV + KPE, generator=generator)[:requests],
        "k_cache": torch.randn(6, PAGE, 1, CKV + KPE, generator=generator),
        "block_table": torch.tensor([[4, 1, 0], [2, 5, 3], [0, 0, 0]], dtype=torch.int32)[:requests],
        "cache_seqlens": torch.tensor([20, 9, 2], dtype=torch.int32)[:requests],
        "head_dim_v": CKV,
        "tile_scheduler_metadata": flash_mla.get_mla_metadata()[0],
        "softmax_scale": SCALE,
    }
    return given | changes


def sparse(**changes: Any) -> dict[str, Any]:
    lists = torch.stack([torch.arange(TOPK) * 7 % 48 + row for row in range(2)]).int().unsqueeze(1) % 48
    return dense(block_table=None, cache_seqlens=None, indices=lists) | changes


def rows_of_bytes(size: int) -> dict[str, Any]:
    """A call over rows of bytes, which are all 0."""
    q = torch.randn(2, 1, HEADS, 576 if size == 656 else 512)
    return sparse(q=q, k_cache=torch.zeros(6, PAGE, 1, size, dtype=torch.uint8), head_dim_v=512)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each plan from here on, whether requests may be cut."""
    found: list[bool] = []
    for name in ("plan", "plan_on_device"):
        original = getattr(Attention, name)

        def plan(self: Attention, *args: Any, original: Any = original) -> None:
            found.append(not next(arg.is_batch_invariant for arg in args if hasattr(arg, "is_batch_invariant")))
            original(self, *args)

        monkeypatch.setattr(Attention, name, plan)
    return found


def test_calls_plan_again_once_a_graph_has_the_plan(planned: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay makes the plan of its graph in the memory of theirs."""
    monkeypatch.setattr(function_plans, "_local", threading.local())  # no other test's plans
    given, captured = dense(), []
    for captures, plans in ((False, 1), (False, 1), (True, 2), (True, 2), (False, 3), (False, 4)):
        monkeypatch.setattr(function_plans, "is_capturing", lambda _, captures=captures: captures)
        captured.append(flash_mla.flash_mla_with_kvcache(**given)[0])
        assert len(planned) == plans
    assert all(torch.equal(out, captured[0]) for out in captured)


@pytest.mark.parametrize("kind", [dense, sparse], ids=["dense", "sparse"])
def test_batch_invariant_calls_cut_no_request(kind: Any, planned: list[bool]) -> None:
    plain = flash_mla.flash_mla_with_kvcache(**kind())
    uncut = flash_mla.flash_mla_with_kvcache(**kind(), enable_batch_invariant=True)
    assert planned == [True, False]
    for one, other in zip(plain, uncut, strict=True):
        torch.testing.assert_close(one, other)
    with pytest.raises(RunError, match="first used with enable_batch_invariant=False, now .* is True"):
        given = kind()
        flash_mla.flash_mla_with_kvcache(**given)
        flash_mla.flash_mla_with_kvcache(**given, enable_batch_invariant=True)


@pytest.mark.parametrize("kind", [dense, sparse], ids=["dense", "sparse"])
def test_both_routes_are_one(kind: Any) -> None:
    found = [flash_mla.flash_mla_with_kvcache(**kind(), use_legacy=use_legacy)[0] for use_legacy in (False, True)]
    assert torch.equal(*found) and flash_mla.has_legacy()


@pytest.mark.parametrize(("name", "size"), [("V32", 656), ("V4", 584)])
def test_names_of_formats(name: str, size: int) -> None:
    given = rows_of_bytes(size)
    found, expected = (flash_mla.flash_mla_with_kvcache(**given, kv_format=kv_format) for kv_format in (name, None))
    assert torch.equal(found[1], expected[1]) and bool((found[1] - math.log(TOPK)).abs().max() < 1e-5)
    other = 584 if size == 656 else 656
    with pytest.raises(RunError, match=f"kv_format={name!r} is of {size} bytes but k_cache has rows of {other}"):
        flash_mla.flash_mla_with_kvcache(**rows_of_bytes(other), kv_format=name)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (sparse(kv_format="V41"), "^kv_format='V41' is not supported, .*: pass 'V32' .656 bytes. or 'V4' .584 bytes"),
        (sparse(kv_format="V32_NO_ROPE"), "^kv_format='V32_NO_ROPE' is not supported"),
        (sparse(kv_format="V5"), "^kv_format='V5' is not accepted: pass 'V32' or 'V4'"),
        (
            sparse(kv_format="V32"),
            "^kv_format='V32' is of 656 bytes but k_cache has rows of 96 elements of torch.float",
        ),
        (dense(kv_format="V32"), "^kv_format='V32' without indices: pass None"),
        (
            rows_of_bytes(528),
            "^k_cache has rows of 528 bytes, V3.2's without .* or V4.1's, which no kernel reads: pass 6",
        ),
        (rows_of_bytes(288), "^k_cache has rows of 288 bytes, V4.1's in fp4, which no kernel reads: pass 656"),
        (dense(use_legacy="yes"), "^use_legacy='yes' is of type str: pass True or False"),
        (sparse(enable_batch_invariant=2), "^enable_batch_invariant=2 is of type int"),
    ],
    ids=lambda value: value.split("=")[0].lstrip("^")[:40] if isinstance(value, str) else "",
)
def test_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(FlashpageError, match=says):
        flash_mla.flash_mla_with_kvcache(**given)


def test_metadata_of_a_step_that_begins_later(planned: list[bool]) -> None:
    given = dense(use_legacy=True)
    meta, expected = given["tile_scheduler_metadata"], flash_mla.flash_mla_with_kvcache(**dense())[0]
    del planned[:]
    for _ in range(2):
        found = flash_mla.get_mla_decoding_metadata(given["cache_seqlens"], HEADS, 1, use_legacy=True)
        assert [tuple(tensor.shape) for tensor in found] == [(1, 8), (3,)]
        meta.tile_scheduler_metadata, meta.num_splits = found
        for _ in range(2):  # layers
            assert torch.equal(flash_mla.flash_mla_with_kvcache(**given)[0], expected)
    assert len(planned) == 2
    meta.num_splits = flash_mla.get_mla_decoding_metadata(given["cache_seqlens"], HEADS, 1)[1]
    with pytest.raises(RunError, match="tile_scheduler_metadata and num_splits of the metadata are of two calls"):
        flash_mla.flash_mla_with_kvcache(**given)
    meta.tile_scheduler_metadata, meta.num_splits = flash_mla.get_mla_decoding_metadata(torch.zeros(5).int(), HEADS, 1)
    with pytest.raises(RunError, match="num_splits of the metadata is for 5 requests but q has 2"):
        flash_mla.flash_mla_with_kvcache(**given)
    meta.tile_scheduler_metadata, meta.num_splits = torch.zeros(9, 8).int(), None
    with pytest.raises(RunError, match="^tile_scheduler_metadata of the metadata was written: assign get_mla_decoding"):
        flash_mla.flash_mla_with_kvcache(**given)
    meta.tile_scheduler_metadata, meta.num_splits = flash_mla.get_mla_decoding_metadata(
        given["cache_seqlens"], HEADS, 1
    )
    meta.tile_scheduler_metadata.copy_(meta.tile_scheduler_metadata.clone())  # of the same step, as far as can be seen
    with pytest.raises(RunError, match="^tile_scheduler_metadata of the metadata was written"):
        flash_mla.flash_mla_with_kvcache(**given)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda meta: pickle.loads(pickle.dumps(meta))])
def test_copies_of_metadata(copied: Any) -> None:
    """The first call of each copy plans, unless a call has used what was copied."""
    given = dense()
    meta = given["tile_scheduler_metadata"]
    assert len({meta.key, copied(meta).key, copied(meta).key}) == 3
    expected = flash_mla.flash_mla_with_kvcache(**given)[0]
    used = copied(meta)
    assert used == meta and used.key == meta.key
    assert torch.equal(flash_mla.flash_mla_with_kvcache(**given | {"tile_scheduler_metadata": used})[0], expected)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"seqlens_k": torch.zeros(2)}, r"^seqlens_k has shape \(2,\) and dtype torch.float32: pass int32 \[batch\]"),
        ({"num_q_tokens_per_head_k": 0}, "^num_q_tokens_per_head_k=0"),
        ({"h_k": 2}, "^h_k=2 is not supported: latent rows have one head, pass 1"),
        ({"h_q": 0}, "^h_q=0"),
        ({"topk": "all"}, "^topk='all'"),
        ({"is_fp8_kvcache": None}, "^is_fp8_kvcache=None is of type NoneType: pass True or False"),
        ({"use_legacy": 2}, "^use_legacy=2"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_refused_metadata(change: dict[str, Any], says: str) -> None:
    given = {"seqlens_k": torch.zeros(2).int(), "num_q_tokens_per_head_k": HEADS, "h_k": 1}
    with pytest.raises(FlashpageError, match=says):
        flash_mla.get_mla_decoding_metadata(**(given | change))


def test_units_of_the_lse_of_prompts() -> None:
    q, kv = torch.randn(5, HEADS, CKV + KPE), torch.randn(30, 1, CKV + KPE)
    lists = torch.randint(30, (5, 1, TOPK)).int()
    plain = flash_mla.flash_mla_sparse_fwd(q, kv, lists, SCALE, CKV)
    binary = flash_mla.flash_mla_sparse_fwd(q, kv, lists, SCALE, CKV, None, None, True, True)
    assert torch.equal(plain[0], binary[0])
    torch.testing.assert_close(binary[2], plain[2] * math.log2(math.e))
    out, *others = flash_mla.flash_mla_sparse_fwd(q, kv, lists, SCALE, CKV, return_log2_lse=False)
    assert torch.equal(out, plain[0]) and others == [None, None]
    with pytest.raises(RunError, match="^return_log2_lse='base2' is of type str"):
        flash_mla.flash_mla_sparse_fwd(q, kv, lists, SCALE, CKV, return_log2_lse="base2")
    with pytest.raises(RunError, match="^use_legacy=512"):  # where other versions have indexer_topk
        flash_mla.flash_mla_sparse_fwd(q, kv, lists, SCALE, CKV, None, None, 512)


@pytest.mark.parametrize("causal", [True, False])
def test_expanded_prompts(causal: bool) -> None:
    torch.manual_seed(4)
    q, k, v = torch.randn(6, 4, 48), torch.randn(10, 2, 48), torch.randn(10, 2, 32)
    ends, tokens = torch.tensor([0, 2, 6]).int(), torch.tensor([0, 4, 10]).int()
    out, lse = flash_mla.flash_attn_varlen_func(q, k, v, ends, tokens, 4, 6, causal=causal)
    assert lse.shape == (6, 4) and lse.stride(0) == 1
    given = Options(sm_scale=48**-0.5, causal=causal)
    for rows, used in ((slice(0, 2), slice(0, 4)), (slice(2, 6), slice(4, 10))):
        state = attention(q[rows], k[used], v[used], given)
        torch.testing.assert_close(out[rows].double(), state.out, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse[rows].double(), state.lse * math.log(2), rtol=1e-5, atol=1e-5)
    equal = flash_mla.flash_attn_varlen_func(q, k, v, ends, tokens, 4, 6, is_varlen=False, deterministic=True)
    halves = torch.tensor([0, 3, 6]).int(), torch.tensor([0, 5, 10]).int()
    assert torch.equal(equal[0], flash_mla.flash_attn_varlen_func(q, k, v, *halves, 3, 5)[0])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"dropout_p": 0.1}, "dropout_p=0.1"),
        (
            {"is_varlen": False, "cu_seqlens_kv": torch.tensor([0, 3, 6, 10]).int()},
            "k has 10 rows for the 3 requests of",
        ),
        ({"cu_seqlens_qo": torch.tensor([0, 2, 7]).int()}, "cu_seqlens_qo"),
        ({"deterministic": "yes"}, "deterministic='yes'"),
        ({"q": torch.randn(6, 4, 48, requires_grad=True)}, "^q requires"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_refused_prompts(change: dict[str, Any], says: str) -> None:
    given = {"q": torch.randn(6, 4, 48), "k": torch.randn(10, 2, 48), "v": torch.randn(10, 2, 32)}
    given |= {"cu_seqlens_qo": torch.tensor([0, 2, 6]).int(), "cu_seqlens_kv": torch.tensor([0, 4, 10]).int()}
    with pytest.raises(FlashpageError, match=says):
        flash_mla.flash_attn_varlen_func(**(given | {"max_seqlen_qo": 4, "max_seqlen_kv": 6} | change))


@pytest.mark.parametrize("name", ["prefill", "decode", "permute_q_b_proj", "permute_wv_proj"])
def test_fused_kernels_are_refused(name: str) -> None:
    module = compat.install_flash_mla()
    try:
        from flash_mla.fused_norm_rope_attn_rope_cast import __dict__ as names

        for fused in (names[name], getattr(module.fused_norm_rope_attn_rope_cast, name)):
            with pytest.raises(CapabilityError, match=f"fused_norm_rope_attn_rope_cast.{name} is not supported: it"):
                fused(True, rms_norm_eps=1e-6)
    finally:
        compat.uninstall_flash_mla()
    assert getattr(flash_mla.fused_norm_rope_attn_rope_cast, name) is names[name]
