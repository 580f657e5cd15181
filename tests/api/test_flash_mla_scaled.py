"""flash_mla_with_kvcache over dense rows of e4m3 with one scale for the tensor."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from reference import Options, attention

from flashpage import FlashpageError
from flashpage.flash_mla import flash_mla_with_kvcache, get_mla_decoding_metadata, get_mla_metadata

pytestmark = pytest.mark.usefixtures("quick_kernels", "on_the_device")

HEADS, CKV, KPE, PAGE, SCALE = 8, 512, 64, 64, 0.05
E4M3 = torch.float8_e4m3fn
LENGTHS = (130, 64, 3)


def inputs(q_dtype: torch.dtype = torch.bfloat16, rows: int = 1, **changes: Any) -> dict[str, Any]:
    generator = torch.Generator(torch.get_default_device()).manual_seed(5)
    q = torch.randn(len(LENGTHS), rows, HEADS, CKV + KPE, generator=generator).to(torch.bfloat16)
    given = {
        "q": q.to(q_dtype),
        "k_cache": torch.randn(7, PAGE, 1, CKV + KPE, generator=generator).to(E4M3),
        "block_table": torch.tensor([[4, 1, 0], [2, 9, 9], [6, 9, 9]], dtype=torch.int32),
        "cache_seqlens": torch.tensor(LENGTHS, dtype=torch.int32),
        "head_dim_v": CKV,
        "tile_scheduler_metadata": get_mla_metadata()[0],
        "softmax_scale": SCALE,
        "is_fp8_kvcache": True,
        "descale_k": torch.tensor([0.375]),
    }
    return given | changes


def expected(given: dict[str, Any], causal: bool, q_scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    options, states = Options(sm_scale=SCALE, causal=causal), []
    for i, length in enumerate(LENGTHS):
        rows = given["k_cache"][given["block_table"][i, : -(-length // PAGE)].long()].flatten(0, 1)[:length]
        k = rows.cpu().double() * 0.375
        with torch.device("cpu"):
            states.append(attention(given["q"][i].cpu().double() * q_scale, k, k[..., :CKV], options))
    return torch.stack([state.out for state in states]), torch.stack([state.lse for state in states])


@pytest.mark.parametrize(("rows", "causal"), [(1, False), (2, True)])
@pytest.mark.parametrize("is_fp8", [True, None])
def test_queries_in_16_bits(rows: int, causal: bool, is_fp8: Any) -> None:
    given = inputs(rows=rows, causal=causal, is_fp8_kvcache=is_fp8)
    out, lse = flash_mla_with_kvcache(**given)
    exact, exact_lse = expected(given, causal)
    assert out.dtype is torch.bfloat16 and (out.cpu().double() - exact).norm() < 2**-7 * exact.norm()
    torch.testing.assert_close(lse.transpose(1, 2).cpu().double(), exact_lse * math.log(2), atol=4e-3, rtol=0)


@pytest.mark.parametrize("q_scale", [0.25, 0.3])
def test_queries_in_e4m3(q_scale: float) -> None:
    given = inputs(E4M3, use_legacy=True, descale_q=torch.tensor([q_scale]))
    meta = given["tile_scheduler_metadata"]
    meta.tile_scheduler_metadata, meta.num_splits = get_mla_decoding_metadata(
        given["cache_seqlens"], HEADS, 1, is_fp8_kvcache=True, use_legacy=True
    )
    out, lse = flash_mla_with_kvcache(**given)
    exact, exact_lse = expected(given, False, q_scale)
    assert out.dtype is torch.bfloat16 and (out.cpu().double() - exact).norm() < 2**-7 * exact.norm()
    torch.testing.assert_close(lse.transpose(1, 2).cpu().double(), exact_lse * math.log(2), atol=4e-3, rtol=0)
    if q_scale == 0.25:  # elements are exact in bf16
        in_bf16 = inputs() | {"q": given["q"].bfloat16() * 0.25}
        assert torch.equal(flash_mla_with_kvcache(**in_bf16)[0], out)


def test_scales_may_be_numbers() -> None:
    found = [flash_mla_with_kvcache(**inputs(descale_k=scale))[0] for scale in (0.375, torch.tensor([0.375]))]
    torch.testing.assert_close(*found, atol=1e-3, rtol=2**-7)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"descale_k": None}, "^descale_k=None: pass what elements of float8_e4m3fn are multiplied by"),
        ({"descale_k": torch.ones(2)}, r"^descale_k has shape \(2,\) and dtype torch.float32: pass float32 of \(1,\)"),
        ({"descale_k": torch.ones(1).double()}, "^descale_k has shape .* torch.float64"),
        ({"descale_k": 0.0}, "^descale_k=0.0"),
        ({"descale_k": torch.ones(1, device="meta")}, "^descale_k"),
        ({"descale_q": torch.ones(1)}, "^descale_q=a tensor .* but q has dtype torch.bfloat16: pass None"),
        ({"q": torch.zeros(3, 1, HEADS, CKV + KPE).to(E4M3)}, "^descale_q=None: pass what elements"),
        ({"is_fp8_kvcache": False}, "^is_fp8_kvcache=False but k_cache has dtype torch.float8_e4m3fn: pass None"),
        (
            {"k_cache": torch.zeros(7, PAGE, 1, CKV + KPE).bfloat16()},
            "^is_fp8_kvcache=True but k_cache has dtype torch.bf",
        ),
        (
            {"k_cache": torch.zeros(7, PAGE, 1, CKV + KPE).bfloat16(), "is_fp8_kvcache": None},
            "^descale_k=a tensor .* is not supported for rows of torch.bfloat16: pass None",
        ),
        (
            {"k_cache": torch.zeros(7, PAGE, 1, CKV + KPE).byte()},
            "^k_cache has rows of 576 torch.uint8, .*: pass indices, or rows of 576 float8_e4m3fn with descale_k",
        ),
        ({"k_cache": torch.zeros(7, PAGE, 1, 656).to(E4M3)}, "^k_cache has rows of 656 torch.float8_e4m3fn, which are"),
        (
            {"indices": torch.zeros(3, 1, 4).int(), "k_cache": torch.zeros(7, PAGE, 1, 656).byte()},
            "^descale_k=a tensor .* is not supported with indices: pass None, as rows of bytes hold their scales",
        ),
    ],
    ids=lambda value: value.split("=")[0].lstrip("^")[:30] if isinstance(value, str) else "",
)
def test_refused(change: dict[str, Any], says: str) -> None:
    device = torch.get_default_device()
    moved = {
        name: each.to(device) if isinstance(each, torch.Tensor) and not each.is_meta else each
        for name, each in change.items()
    }
    with pytest.raises(FlashpageError, match=says):
        flash_mla_with_kvcache(**(inputs() | moved))
