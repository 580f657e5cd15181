"""DeepSeek V4's rows of 584 bytes through FlashMLA's function: padded pages, two caches, lengths, and sinks."""

from __future__ import annotations

import math

import pytest
import torch

from flashpage.flash_mla import flash_mla_with_kvcache, get_mla_metadata

pytestmark = pytest.mark.usefixtures("quick_kernels", "on_the_device")

ROW, SCALES, NUMBERS, ROTATED, SCALE = 584, 8, 448, 64, 0.1
BATCH, ROWS = 3, 2
NO_NUMBER = 255  # a byte of e4m3 and of bf16 that is NaN


def v4_cache(pages: int, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache whose pages begin at multiples of 576 bytes, as vLLM's do, and its exact rows. Scales follow the rows of
    a page; bytes of no row are NaN."""
    numbers = torch.randn(pages * page_size, NUMBERS).clamp(-4, 4).to(torch.float8_e4m3fn)
    rotated = torch.randn(pages * page_size, ROTATED).bfloat16()
    exponents = torch.randint(125, 129, (pages * page_size, SCALES - 1), dtype=torch.uint8)
    stride = -(-page_size * ROW // 576) * 576
    memory = torch.full((pages, stride), NO_NUMBER, dtype=torch.uint8)
    rows = torch.cat([numbers.view(torch.uint8), rotated.view(torch.uint8)], 1).reshape(pages, -1)
    unused = torch.full((pages * page_size, 1), NO_NUMBER, dtype=torch.uint8)
    memory[:, : page_size * ROW] = torch.cat([rows, torch.cat([exponents, unused], 1).reshape(pages, -1)], 1)
    scales = torch.exp2(exponents.float() - 127).repeat_interleave(64, 1)
    exact = torch.cat([numbers.float() * scales, rotated.float()], 1)
    return memory.as_strided((pages, page_size, 1, ROW), (stride, ROW, ROW, 1)), exact.double()


def lists_of(tokens: int, count: int) -> torch.Tensor:
    return torch.stack([torch.randperm(tokens)[:count] for _ in range(BATCH * ROWS)]).view(BATCH, ROWS, count).int()


@pytest.mark.parametrize("page_sizes", [(64, 16), (16, 64)], ids=str)
@pytest.mark.parametrize("heads", [64, 128])
def test_two_caches(heads: int, page_sizes: tuple[int, int]) -> None:
    torch.manual_seed(0)
    caches, exact = zip(*(v4_cache(384 // size, size) for size in page_sizes), strict=True)
    lists, lengths = [lists_of(384, 128), lists_of(384, 40)], [torch.tensor([128, 100, 0]), torch.tensor([40, 0, 0])]
    lists[0][0, 0, 5], lists[1][1, 1, 7:] = -1, -1
    q, sink = torch.randn(BATCH, ROWS, heads, 512).bfloat16(), torch.randn(heads)
    out, lse = flash_mla_with_kvcache(
        *(q, caches[0], None, None, 512, get_mla_metadata()[0], None, SCALE),
        is_fp8_kvcache=True,
        indices=lists[0],
        attn_sink=sink,
        extra_k_cache=caches[1],
        extra_indices_in_kvcache=lists[1],
        topk_length=lengths[0].int(),
        extra_topk_length=lengths[1].int(),
    )
    assert out.dtype is torch.bfloat16
    for request in range(BATCH - 1):
        for row in range(ROWS):
            listed = [
                each[request, row, : int(ends[request])].long() for each, ends in zip(lists, lengths, strict=True)
            ]
            k = torch.cat([rows[mine[mine >= 0]] for rows, mine in zip(exact, listed, strict=True)])
            scores = q[request, row].double() @ k.T * SCALE
            norm = scores.logsumexp(-1)
            expected = scores.softmax(-1) @ k * torch.sigmoid(norm - sink.double())[:, None]
            error = (out[request, row].double() - expected).norm() / expected.norm()
            assert error < 2**-8
            torch.testing.assert_close(lse[request, :, row].double(), norm, atol=1e-4, rtol=0)
    assert not out[-1].any() and bool((lse[-1] == -math.inf).all())  # no token is listed
