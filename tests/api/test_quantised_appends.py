"""Appends that quantise: what they write, by lists and by slots, as operators of torch, and what is refused."""

from __future__ import annotations

from typing import Any

import format_rows
import pytest
import torch
from format_pages import LENGTHS, NAMES, Pages, planned_decode

import flashpage
from flashpage import RunError
from flashpage.kernels.kv_formats import FORMATS


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("name", NAMES)
def test_appended_rows_are_the_nearest_numbers(name: str, layout: str) -> None:
    """As the reference quantises them, but for numbers that lie in the middle of two."""
    pages = Pages(name, layout)
    pages.append(k_scale=2.0, v_scale=0.5)
    for side, (rows, divisor) in enumerate(((pages.key, 2.0), (pages.value, 0.5))):
        of_side = name if side == 0 else pages.base
        numbers, scales = format_rows._quantised(of_side, rows.double() / divisor)
        found, found_scales = pages.stored(side)
        if pages.base == "int4_token":  # a last bit of the scale may differ, where the quotient was rounded
            words, wanted = found_scales.view(torch.int32), scales.view(torch.int32)
            assert torch.equal(words & 15, wanted & 15) and int((words - wanted).abs().max()) <= 16
        else:
            assert torch.allclose(found_scales.float(), scales.float(), rtol=1e-6, atol=0)
        differing = (found.view(torch.uint8) != numbers.view(torch.uint8)).float().mean()
        assert differing < 2e-3


@pytest.mark.parametrize("slot_type", [torch.int32, torch.int64])
def test_slots_are_pages_and_tokens(slot_type: torch.dtype) -> None:
    by_lists, by_slots = Pages("nvfp4", "HND"), Pages("nvfp4", "HND")
    by_lists.append()
    slots = by_slots.slots().to(slot_type)
    keys = torch.cat([by_slots.key, by_slots.key[:5]])  # rows without a slot
    flashpage.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
        *(keys, torch.cat([by_slots.value, by_slots.value[:5]]), slots, by_slots.cache, by_slots.scales),
        *(torch.ones(1), torch.ones(1)),
        kv_layout="HND",
    )
    assert all(torch.equal(a, b) for a, b in zip(by_lists.cache, by_slots.cache, strict=True))
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(by_lists.scales, by_slots.scales, strict=True))
    padding = (keys * 3, keys * 3, torch.full((4,), -1), by_slots.cache, by_slots.scales)
    flashpage.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(*padding, 1.0, 1.0, kv_layout="HND")
    assert torch.equal(by_lists.cache[0], by_slots.cache[0])


def test_flashinfers_append() -> None:
    pages, ours = Pages("nvfp4"), Pages("nvfp4")
    ours.append(k_scale=0.7, v_scale=1.1)
    fused, fused_scales = torch.stack(pages.cache, 1), torch.stack(pages.scales, 1)
    flashpage.nvfp4_quantize_append_paged_kv_cache(
        *(pages.key, pages.value, *pages.places, fused, fused_scales),
        *(pages.indices, pages.indptr, pages.last, 0.7, 1.1),
    )
    assert torch.equal(fused, torch.stack(ours.cache, 1))
    assert torch.equal(fused_scales.view(torch.uint8), torch.stack(ours.scales, 1).view(torch.uint8))


REFUSED_APPENDS: dict[str, tuple[dict[str, Any], str]] = {
    "no scales": (
        {"kv_cache_sf": None},
        r"kv_cache_sf=None: rows of nvfp4 have scales: pass kv_cache_sf=\(k_sf, v_sf\) of float8_e4m3fn",
    ),
    "a scale of 0": ({"k_scale": 0.0}, "k_scale=0.0: pass a positive finite number, by which"),
    "NaN": ({"v_scale": float("nan")}, "v_scale"),
    "no format": ({"kv_format": None}, "kv_cache_sf, k_scale and v_scale need kv_format"),
    "another": (
        {"kv_format": "int8_token"},
        r"paged_kv_cache\[0\] has dtype torch.uint8: pass int8, as int8_token is stored",
    ),
    "not quantised": ({"kv_format": None, "kv_cache_sf": None}, "pass kv_format, such as 'nvfp4', and kv_cache_sf"),
}


@pytest.mark.parametrize("given", REFUSED_APPENDS.values(), ids=REFUSED_APPENDS)
def test_appends_that_are_refused(given: tuple[dict[str, Any], str]) -> None:
    changed, says = given
    pages = Pages("nvfp4")
    with pytest.raises(flashpage.FlashpageError, match=says):
        pages.append(**changed)
    assert not any(part.any() for part in pages.cache)


def test_other_choices_of_scales_are_refused() -> None:
    pages = Pages("nvfp4")
    with pytest.raises(flashpage.CapabilityError, match="nvfp4_4over6=1 is not supported: a scale is the largest"):
        flashpage.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
            pages.key, pages.value, torch.tensor([16]), pages.cache, pages.scales, 1.0, 1.0, nvfp4_4over6=1
        )


def test_slots_within_the_cache() -> None:
    pages = Pages("nvfp4")
    with pytest.raises(RunError, match="slot_mapping reaches 160 but the cache has 160 slots"):
        flashpage.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
            pages.key, pages.value, torch.tensor([160]), pages.cache, pages.scales, 1.0, 1.0
        )


@pytest.mark.parametrize("name", NAMES)
def test_rows_with_nan_are_read_as_nan(name: str, device: str = "cpu") -> None:
    """A format without NaN keeps it in the scale, so that nothing hides what a model computed."""
    pages = Pages(name)
    pages.key[1, 0, 5] = pages.value[2, 1, 7] = float("nan")
    pages.append()
    for side, row, head in ((0, 1, 0), (1, 2, 1)):
        is_nan = pages.stored(side)[1].float().isnan()
        assert is_nan[row, head].any() and is_nan.any(-1).sum() == 1
    wrapper = planned_decode(pages, kv_format=name)
    out = wrapper.run(torch.randn(len(LENGTHS), 4, 64).bfloat16(), pages.cache, kv_cache_sf=pages.scales)
    assert out[0].isnan().any() and not out[1:].isnan().any()


@pytest.mark.parametrize("name", [None, *NAMES])
def test_pages_without_tokens(name: str | None) -> None:
    pages = Pages(name or "nvfp4")
    given: dict[str, Any] = {"kv_cache_sf": [scales[:, :0] for scales in pages.scales]}
    pages.cache = [rows[:, :0] for rows in pages.cache]
    if name is None:
        given = {"kv_format": None, "kv_cache_sf": None}
        pages.cache = [torch.zeros(4, 0, 2, 64, dtype=torch.bfloat16) for _ in "kv"]
    with pytest.raises(RunError, match="whose pages have no tokens: pass at least one"):
        pages.append(**given)


@pytest.mark.parametrize("name", NAMES)
def test_compiled_appends_quantise(name: str) -> None:
    """By lists and by slots, without a graph break."""
    wanted, found, by_slots = Pages(name), Pages(name), Pages(name)
    wanted.append(k_scale=2.0)
    torch._dynamo.reset()
    torch.compile(lambda: found.append(k_scale=2.0), fullgraph=True, backend="aot_eager")()
    slots, scale = by_slots.slots(), torch.tensor([2.0])

    def write() -> None:
        flashpage.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
            *(by_slots.key, by_slots.value, slots, by_slots.cache, by_slots.scales, scale, None), kv_format=name
        )

    torch.compile(write, fullgraph=True, backend="aot_eager")()
    for pages in (found, by_slots):
        for mine, other in zip((*pages.cache, *pages.scales), (*wanted.cache, *wanted.scales), strict=True):
            assert torch.equal(mine.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("k, v", [("bfloat16", "int8_token"), ("int4_token_rotated", "int4_token")])
def test_opcheck_of_quantising_appends(k: str, v: str) -> None:
    pages = Pages(v)
    cache, scales = pages.cache, pages.scales
    if k not in FORMATS:
        cache, scales = [torch.zeros(*cache[0].shape, dtype=getattr(torch, k)), cache[1]], scales[1:]
    lists = (pages.places[1], pages.places[0], pages.indices, pages.indptr)
    arguments = (pages.key, pages.value, *lists, cache, scales, k, v, "NHD", None, 1.5, None, None, False)
    torch.library.opcheck(torch.ops.flashpage.append_quantised.default, arguments)
