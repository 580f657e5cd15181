"""PyTorch's flash operators over e4m3 queries, keys and values (`.quantized`), under which flashpage is registered."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch_operators import under_operators

from flashpage import CapabilityError

HEADS, KV_HEADS, DIM = 4, 2, 32
ATEN = torch.ops.aten
E4M3 = torch.float8_e4m3fn

pytestmark = pytest.mark.skipif(
    not hasattr(ATEN._flash_attention_forward, "quantized"), reason="this torch has no such operators"
)


@pytest.fixture
def active(device: str) -> Iterator[str]:
    """The device, with flashpage under its operators."""
    with under_operators(device):
        yield device


class Batch:
    """Requests of equally many rows and tokens, and factors of each KV head."""

    def __init__(self, device: str, rows: int = 9, tokens: int = 33, requests: int = 3) -> None:
        generator = torch.Generator().manual_seed(rows)
        shapes = (requests, HEADS, rows, DIM), *[(requests, KV_HEADS, tokens, DIM)] * 2
        self.parts = [torch.randn(shape, generator=generator).to(E4M3).to(device) for shape in shapes]
        self.descales = [torch.rand(requests, KV_HEADS, generator=generator).add(0.5).to(device) for _ in range(3)]
        self.near = 1e-2 if device == "cpu" else 8e-2  # a card rounds probabilities to e4m3

    def expected(self, descales: list[Any], is_causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs and natural LSEs in fp64."""
        q, k, v = (part.cpu().double() for part in self.parts)
        group = HEADS // KV_HEADS
        factors = [torch.ones(len(q), KV_HEADS) if each is None else each.cpu() for each in descales]
        q = q * factors[0].repeat_interleave(group, 1)[..., None, None]
        k, v = (
            (part * factor[..., None, None]).repeat_interleave(group, 1)
            for part, factor in zip((k, v), factors[1:], strict=True)
        )
        scores = q @ k.transpose(2, 3) * DIM**-0.5
        if is_causal:
            rows, tokens = scores.shape[2:]
            scores = scores.masked_fill(torch.ones(rows, tokens).tril(tokens - rows) == 0, -torch.inf)
        return scores.softmax(-1) @ v, scores.logsumexp(-1)

    def check(self, found: torch.Tensor, lse: torch.Tensor, descales: list[Any], is_causal: bool) -> None:
        out, expected_lse = self.expected(descales, is_causal)
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.cpu().double(), out, rtol=self.near, atol=self.near)
        torch.testing.assert_close(lse.cpu().double(), expected_lse, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("given", [(True, True, True), (False, True, False), (False, False, False)])
def test_dense(given: tuple[bool, ...], is_causal: bool, active: str, kernels: None) -> None:
    batch = Batch(active)
    descales = [each if is_given else None for each, is_given in zip(batch.descales, given, strict=True)]
    found = ATEN._scaled_dot_product_flash_attention.quantized(*batch.parts, *descales, 0.0, is_causal)
    assert len(found) == 9 and found[4:6] == (9, 33)
    batch.check(found[0], found[1], descales, is_causal)
    parts = (part.transpose(1, 2) for part in batch.parts)
    again = ATEN._flash_attention_forward.quantized(*parts, None, None, 9, 33, 0.0, is_causal, False, *descales)
    assert torch.equal(again[0].transpose(1, 2), found[0]) and torch.equal(again[1], found[1])


def test_ragged(active: str, kernels: None) -> None:
    """Requests whose rows and tokens stand one after the other, of which `seqused_k` uses all."""
    batch = Batch(active)
    q, k, v = (part.transpose(1, 2).flatten(0, 1) for part in batch.parts)
    ends = [torch.arange(4, dtype=torch.int32, device=active) * n for n in (9, 33)]
    used = torch.full((3,), 33, dtype=torch.int32, device=active)
    function = ATEN._flash_attention_forward.quantized
    out, lse, *_ = function(q, k, v, *ends, 9, 33, 0.0, True, False, *batch.descales, seqused_k=used)
    by_request = lse.unflatten(1, (3, 9)).transpose(0, 1)
    batch.check(out.unflatten(0, (3, 9)).transpose(1, 2), by_request, batch.descales, True)


def test_compiled(active: str, kernels: None) -> None:
    """torch's shape functions hold: a compiled function gives the eager one's bits."""
    batch = Batch(active)
    function = lambda *given: ATEN._scaled_dot_product_flash_attention.quantized(*given, 0.0, True)[0] * 2
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    given = (*batch.parts, *batch.descales)
    assert torch.equal(compiled(*given), function(*given))


@pytest.mark.cuda
def test_public_function_on_a_card(active: str) -> None:
    from torch.nn.attention.experimental import _scaled_dot_product_attention_quantized as public

    if active == "cpu":
        pytest.skip("torch's function takes tensors of a card alone")
    batch = Batch(active, rows=64, tokens=200)
    found = public._scaled_dot_product_attention_quantized(*batch.parts, True, None, *batch.descales)
    out, _ = batch.expected(batch.descales, True)
    torch.testing.assert_close(found.cpu().double(), out, rtol=batch.near, atol=batch.near)


@pytest.mark.parametrize(
    ("dtype", "shape", "says"),
    [
        (torch.bfloat16, (3, KV_HEADS), "of torch.bfloat16 and torch.bfloat16 here: torch's quantized operators take"),
        (E4M3, (3, HEADS), r"q_descale has shape \(3, 4\): pass \[3, 2\], one factor"),
        (E4M3, (2, KV_HEADS), r"q_descale has shape \(2, 2\)"),
    ],
)
def test_refused(dtype: torch.dtype, shape: tuple[int, int], says: str) -> None:
    """torch has no other kernel for these operators."""
    batch = Batch("cpu")
    with under_operators("cpu"), pytest.raises(CapabilityError, match=says):
        parts = (part.to(dtype) for part in batch.parts)
        ATEN._scaled_dot_product_flash_attention.quantized(*parts, torch.ones(shape), None, None, 0.0, True)


@pytest.mark.parametrize("count", [1, 3])
def test_factors_of_another_number_of_sequences(count: int) -> None:
    q, kv = (torch.ones(10, heads, 64).to(E4M3) for heads in (HEADS, KV_HEADS))
    ends, factors = torch.tensor([0, 4, 10], dtype=torch.int32), (None, torch.ones(count, KV_HEADS), None)
    with under_operators("cpu"), pytest.raises(CapabilityError, match=r"k_descale has shape .*: pass \[2, 2\]"):
        ATEN._flash_attention_forward.quantized(q, kv, kv, ends, ends, 6, 6, 0.0, True, False, *factors)
