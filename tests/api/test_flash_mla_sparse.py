"""FlashMLA's sparse functions: lists of tokens, in one cache or two, with sinks, lengths and fp8 rows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from flashpage import CapabilityError, FlashpageError
from flashpage.engines.flash_mla import sparse
from flashpage.flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata
from flashpage.wrappers import function_plans

pytestmark = pytest.mark.usefixtures("quick_kernels")

HEADS, CKV, KPE, PAGE, PAGES, TOPK, SCALE = 6, 64, 32, 8, 5, 12, 0.2


def exact(q: Any, rows: Any, lists: Any, sink: Any = None, ckv: int = CKV) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and LSEs of q [rows, heads, columns] over tokens rows[list], entries of -1 left out."""
    found = rows[lists.clamp(min=0).long()].double()
    scores = torch.einsum("rhd,rtd->rht", q.double(), found) * SCALE
    scores = scores.masked_fill((lists < 0)[:, None], -math.inf)
    lse = scores.logsumexp(-1)
    out = torch.einsum("rht,rtd->rhd", scores.softmax(-1).nan_to_num(0.0), found[..., :ckv])
    return (out if sink is None else out * (lse - sink).sigmoid().nan_to_num(0.0)[..., None]), lse


def numbers(*shape: int) -> torch.Tensor:
    """Random numbers of a type that the device's kernels take: cards have none for fp32."""
    return torch.randn(*shape).to(torch.float32 if torch.get_default_device().type == "cpu" else torch.bfloat16)


def close(found: torch.Tensor, expected: torch.Tensor, near: float = 1e-5) -> None:
    if found.device.type != "cpu":
        near = 2**-7 if found.dtype is torch.bfloat16 else 1e-3
    torch.testing.assert_close(found.double().reshape(expected.shape), expected, atol=near, rtol=near)


def lists_of(*rows: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    count = math.prod(rows)
    found = torch.stack([torch.randperm(PAGES * PAGE, generator=generator)[:TOPK] for _ in range(count)]).int()
    found[0, 3] = -1
    return found.reshape(*rows, TOPK)


@pytest.fixture
def given() -> dict[str, Any]:
    torch.manual_seed(1)
    cache = numbers(PAGES, PAGE, 1, CKV + KPE)
    tensors = {"q": numbers(3, 2, HEADS, CKV + KPE), "k_cache": cache, "indices": lists_of(3, 2)}
    meta = {"block_table": None, "cache_seqlens": None, "tile_scheduler_metadata": get_mla_metadata()[0]}
    return tensors | meta | {"head_dim_v": CKV, "softmax_scale": SCALE}


@pytest.mark.usefixtures("on_the_device")
def test_decode(given: dict[str, Any]) -> None:
    q, rows = given["q"].flatten(0, 1), given["k_cache"].flatten(0, 2)
    sink = torch.tensor([0.3, -1.0, 2.0, math.inf, -math.inf, 0.0])
    for _ in range(2):  # layers with lists of their own
        out, lse = flash_mla_with_kvcache(**given, attn_sink=sink)
        expected, expected_lse = exact(q, rows, given["indices"].flatten(0, 1), sink)
        close(out, expected)
        close(lse.transpose(1, 2), expected_lse)
        given["indices"] = given["indices"].flip(0).contiguous()


def test_lengths_of_requests_do_not_matter(given: dict[str, Any]) -> None:
    """Engines pass some block table and lengths next to lists."""
    out, _ = flash_mla_with_kvcache(**given)
    given |= {"block_table": torch.full((1, 1), 999), "cache_seqlens": torch.zeros(1)}
    assert torch.equal(flash_mla_with_kvcache(**given)[0], out)


@pytest.mark.usefixtures("on_the_device")
def test_lengths_and_another_cache(given: dict[str, Any]) -> None:
    extra = numbers(4, PAGE, 1, CKV + KPE)
    others = lists_of(3, 2, seed=5) % (4 * PAGE)
    lengths, extra_lengths = torch.tensor([12, 5, 0]).int(), torch.tensor([3, 0, 0]).int()
    out, lse = flash_mla_with_kvcache(
        **given,
        topk_length=lengths,
        extra_k_cache=extra,
        extra_indices_in_kvcache=others,
        extra_topk_length=extra_lengths,
    )
    entry = torch.arange(TOPK)
    used = given["indices"].masked_fill(entry >= lengths[:, None, None], -1)
    used_others = (others + PAGES * PAGE).masked_fill((entry >= extra_lengths[:, None, None]) | (others < 0), -1)
    rows = torch.cat([given["k_cache"].flatten(0, 2), extra.flatten(0, 2)])
    expected, expected_lse = exact(given["q"].flatten(0, 1), rows, torch.cat([used, used_others], -1).flatten(0, 1))
    close(out, expected)
    close(lse.transpose(1, 2), expected_lse)
    assert not out[2].any() and bool((lse[2] == -math.inf).all())


@pytest.mark.usefixtures("on_the_device")
def test_outputs_over_two_caches_are_rounded_once(given: dict[str, Any]) -> None:
    """In bf16 the error is 1.8e-3 then, and 2.4e-3 if the output over each cache is rounded, too."""
    q, first, second = (
        torch.randn(*shape).bfloat16() for shape in ((30, 2, HEADS, 96), (PAGES, PAGE, 1, 96), (4, 8, 1, 96))
    )
    lists, others = lists_of(30, 2), lists_of(30, 2, seed=3).clamp(max=31)
    caches = {"k_cache": first, "extra_k_cache": second, "indices": lists, "extra_indices_in_kvcache": others}
    out, _ = flash_mla_with_kvcache(**given | {"q": q} | caches)
    rows = torch.cat([first.flatten(0, 2), second.flatten(0, 2)])
    joined = torch.cat([lists, torch.where(others >= 0, others + PAGES * PAGE, -1)], -1)
    expected, _ = exact(q.flatten(0, 1), rows, joined.flatten(0, 1))
    assert (out.double().reshape(expected.shape) - expected).norm() <= 2.05e-3 * expected.norm()


@pytest.mark.usefixtures("on_the_device")
def test_rows_of_656_bytes() -> None:
    torch.manual_seed(2)
    latents = torch.randn(PAGES, PAGE, 512).to(torch.float8_e4m3fn)
    scales = torch.tensor([0.5, 1.0, 0.25, 2.0]).expand(PAGES, PAGE, 4)
    rotated = torch.randn(PAGES, PAGE, 64).bfloat16()
    cache = torch.cat([part.contiguous().view(torch.uint8) for part in (latents, scales.contiguous(), rotated)], -1)
    rows = torch.cat([latents.float() * scales.repeat_interleave(128, -1), rotated.float()], -1).flatten(0, 1)
    q, lists = numbers(2, 1, HEADS, 576), lists_of(2, 1)
    found = flash_mla_with_kvcache(
        *(q, cache.unsqueeze(2), None, None, 512, get_mla_metadata()[0], None, SCALE),
        is_fp8_kvcache=True,
        indices=lists,
    )
    close(found[0], exact(q[:, 0], rows, lists[:, 0], ckv=512)[0], 1e-4)
    meta, given = get_mla_metadata()[0], (None, None, 512)
    for is_fp8 in (None, True):  # None: the cache says it
        again = flash_mla_with_kvcache(
            *(q, cache.unsqueeze(2), *given, meta, None, SCALE), is_fp8_kvcache=is_fp8, indices=lists
        )
        assert torch.equal(again[0], found[0])


@pytest.mark.usefixtures("on_the_device")
def test_prefill() -> None:
    torch.manual_seed(3)
    q, kv, lists = numbers(5, HEADS, CKV + KPE), numbers(PAGES * PAGE, 1, CKV + KPE), lists_of(5, 1)
    lists[1, 0, 2] = PAGES * PAGE + 7  # none, as -1
    lists[4, 0, 0] = -5
    lengths = torch.tensor([12, 12, 1, 0, 7]).int()
    out, _, lse = flash_mla_sparse_fwd(q, kv, lists, SCALE, CKV, None, lengths)
    used = lists[:, 0].masked_fill((torch.arange(TOPK) >= lengths[:, None]) | (lists[:, 0] >= len(kv)), -1)
    expected, expected_lse = exact(q, kv[:, 0], used)
    close(out, expected)
    close(lse, expected_lse)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"causal": True}, "causal=True with indices"),
        ({"indices": torch.zeros(3, 1, 4).int()}, "indices has shape"),
        ({"indices": torch.full((3, 2, 4), 99).int()}, "indices has 99"),
        ({"topk_length": torch.zeros(6).int()}, "topk_length has shape"),
        ({"topk_length": torch.tensor([1, 13, 2]).int()}, r"^topk_length\[1\]=13 but each list has 12 entries"),
        ({"topk_length": torch.tensor([1, 2, -3]).int()}, r"^topk_length\[2\]=-3"),
        (
            {"k_cache": torch.zeros(2, 2, 1, 640).byte()},
            r"^k_cache has rows of 640 bytes: pass 656 .* or elements of q",
        ),
        ({"attn_sink": torch.zeros(2)}, "attn_sink has shape"),
        ({"extra_indices_in_kvcache": torch.zeros(3, 2, 4).int()}, "extra_k_cache"),
        ({"extra_k_cache": torch.zeros(2, 2, 1, CKV + KPE)}, "extra_indices_in_kvcache"),
        ({"extra_topk_length": torch.zeros(3).int()}, "extra_topk_length without extra_k_cache"),
        ({"indices": None, "topk_length": torch.zeros(3).int()}, "topk_length"),
        ({"indices": None, "is_fp8_kvcache": True}, "is_fp8_kvcache=True but k_cache has dtype torch.float32"),
        (
            {"indices": None, "k_cache": torch.zeros(2, 2, 1, 656).byte()},
            "are read with indices alone: pass indices, or",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_refused(change: dict[str, Any], says: str, given: dict[str, Any]) -> None:
    with pytest.raises(FlashpageError, match=says):
        flash_mla_with_kvcache(**(given | change))


def test_a_captured_call_has_a_plan_of_its_own(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """An eager call of the same step may write that plan's memory before the graph is replayed."""
    keys = []
    on_host = function_plans.FunctionPlan.on_host
    monkeypatch.setattr(
        function_plans.FunctionPlan, "on_host", lambda plan, key, batch: keys.append(key) or on_host(plan, key, batch)
    )
    for captures in (False, True):
        monkeypatch.setattr(sparse, "is_capturing", lambda _, captures=captures: captures)
        flash_mla_with_kvcache(**given)
    assert keys[0] != keys[1] and keys[0][:-1] == keys[1][:-1]


def test_a_refused_call_leaves_no_shapes(given: dict[str, Any]) -> None:
    with pytest.raises(FlashpageError, match="indices has 99"):
        flash_mla_with_kvcache(**(given | {"indices": torch.full((3, 2, 4), 99).int()}))
    assert given["tile_scheduler_metadata"].config is None
    empty = {"q": given["q"][:0], "indices": given["indices"][:0], "topk_length": torch.zeros(0).int()}
    out, lse = flash_mla_with_kvcache(**(given | empty))
    assert len(out) == len(lse) == 0


def test_refused_prefills() -> None:
    q, kv, lists = torch.randn(5, HEADS, CKV + KPE), torch.randn(PAGES * PAGE, 1, CKV + KPE), lists_of(5, 1)
    with pytest.raises(CapabilityError, match="indexer_topk=512"):
        flash_mla_sparse_fwd(q, kv, lists, SCALE, CKV, indexer_topk=512)
    with pytest.raises(FlashpageError, match="kv has shape"):
        flash_mla_sparse_fwd(q, kv[..., :9], lists, SCALE, CKV)
