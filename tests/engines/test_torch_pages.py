"""Pages under PyTorch's varlen_attn: eager calls and captured ones, whose lengths and tables change on the device.

torch 2.11 has no pages in varlen_attn: there the function is called that newer releases call.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from typing import Any

import graphs
import pytest
import reference
import torch
from torch.nn.attention import varlen
from torch_operators import under_operators

from flashpage.engines.pytorch import forward, registration

HEADS, KV_HEADS, DIM = 8, 2, 64
UNUSED = 2**30  # entry of a table that must not be read
HAS_PAGES = "block_table" in inspect.signature(varlen.varlen_attn).parameters
# Rows and tokens of each request, step by step; all steps have the same rows in all.
STEPS = {
    "decode": (
        ((1, 1, 1, 1), (20, 5, 33, 1)),
        ((1, 1, 1, 1), (600, 1, 64, 17)),
        ((1, 1, 1, 1), (2, 257, 16, 700)),
    ),
    "append": (
        ((3, 17, 1, 4), (20, 17, 33, 90)),
        ((1, 1, 20, 3), (500, 1, 20, 64)),
        ((0, 12, 13, 0), (40, 12, 300, 0)),  # the first is left out of this step, the last has ended
    ),
    "growth": (((1, 1, 1, 1), (600, 21, 64, 49)),),
}
WINDOWS = {"all": (-1, -1), "causal": (-1, 0), "window": (40, 0)}


@pytest.fixture
def active(device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The device, with flashpage under its operators; it must not leave a call to torch's own kernel."""
    done, ours_of = [], forward.varlen

    def counted(*given: Any) -> torch.Tensor:
        done.append(False)
        lse = ours_of(*given)
        done[-1] = True
        return lse

    monkeypatch.setattr(forward, "varlen", counted)
    with under_operators(device):
        yield device
    assert done and all(done)


class Batch:
    """A cache with the lengths and tables of a batch, in memory that stays where it is."""

    def __init__(self, device: str, kind: str, page: int) -> None:
        self.steps, self.page = STEPS[kind], page
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        most = max(max(tokens) for _, tokens in self.steps)
        self.columns, requests = -(-most // page) + 1, len(self.steps[0][0])
        pages = max(sum(-(-n // page) for n in tokens) for _, tokens in self.steps) + 3
        self.generator = torch.Generator().manual_seed(page)
        self.q = self.drawn(sum(self.steps[0][0]), HEADS, DIM).to(device, dtype)
        shape = (pages, page, KV_HEADS, DIM)
        self.caches = [torch.empty(shape, dtype=dtype, device=device) for _ in "kv"]
        self.table = torch.empty(requests, self.columns, dtype=torch.int32, device=device)
        self.ends = torch.empty(requests + 1, dtype=torch.int32, device=device)
        self.used = torch.empty(requests, dtype=torch.int32, device=device)

    def drawn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def load(self, step: int) -> None:
        """Writes a step's lengths, another table, and another cache, with NaN where nothing may be read."""
        self.rows, tokens = self.steps[step]
        order = torch.randperm(len(self.caches[0]), generator=self.generator).tolist()
        table = torch.full(self.table.shape, UNUSED, dtype=torch.int32)
        self.dense = [[self.drawn(n, KV_HEADS, DIM) for n in tokens] for _ in "kv"]
        places = []
        for i, count in enumerate(tokens):
            own = [order.pop() for _ in range(-(-count // self.page))]
            table[i, : len(own)] = torch.tensor(own, dtype=torch.int32)
            at = torch.arange(count)
            places.append((torch.tensor(own, dtype=torch.int64)[at // self.page], at % self.page))
        for cache, dense in zip(self.caches, self.dense, strict=True):
            filled = torch.full(cache.shape, float("nan"))
            for place, values in zip(places, dense, strict=True):
                filled[place] = values
            cache.copy_(filled)
        self.table.copy_(table)
        self.used.copy_(torch.tensor(tokens, dtype=torch.int32))
        self.ends.copy_(torch.tensor([0, *self.rows]).cumsum(0))

    def attend(self, window: tuple[int, int], *, is_swapped: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs [rows, heads, dim] and natural LSEs [heads, rows]. `is_swapped`: K is V, as in another layer."""
        k, v = self.caches[::-1] if is_swapped else self.caches
        lengths = (self.ends, None, len(self.q), self.columns * self.page)
        pages: dict[str, Any] = {"seqused_k": self.used, "block_table": self.table}
        if HAS_PAGES:
            more = {"return_aux": varlen.AuxRequest(lse=True), "enable_gqa": True, "window_size": window}
            return varlen.varlen_attn(self.q, k, v, *lengths, **pages, **more)
        options = {"window_size_left": window[0], "window_size_right": window[1]}
        out, lse, *_ = registration._forward(self.q, k, v, *lengths, 0.0, window == (-1, 0), False, **options, **pages)
        return out, lse

    def check(
        self, found: tuple[torch.Tensor, torch.Tensor], window: tuple[int, int], *, is_swapped: bool = False
    ) -> None:
        """Compares with fp64."""
        close = 1e-5 if found[0].dtype == torch.float32 else 2e-2
        options = reference.Options(DIM**-0.5, causal=window[1] == 0, window_left=window[0])
        used, begin = self.used.tolist(), 0
        for i, rows in enumerate(self.rows):
            k, v = (dense[i][: used[i]] for dense in (self.dense[::-1] if is_swapped else self.dense))
            k, v = (t.to(self.q.dtype).double() for t in (k, v))
            own = slice(begin, begin + rows)
            state = reference.attention(self.q[own].cpu().double(), k, v, options)
            torch.testing.assert_close(found[0][own].cpu().double(), state.out, rtol=close, atol=close)
            lse = (state.lse * math.log(2)).T
            torch.testing.assert_close(found[1][:, own].cpu().double(), lse, rtol=close, atol=close)
            begin += rows


@pytest.mark.parametrize("page", [16, 256])
@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("kind", ["decode", "append"])
def test_eager(kind: str, window: tuple[int, int], page: int, active: str, kernels: None) -> None:
    batch = Batch(active, kind, page)
    for step in range(len(batch.steps)):
        batch.load(step)
        batch.check(batch.attend(window), window)


@pytest.mark.parametrize("page", [16, 256])
@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("kind", ["decode", "append"])
def test_captured(kind: str, window: tuple[int, int], page: int, active: str, kernels: None) -> None:
    """One graph of two layers serves batches of other lengths and tables, and gives the eager calls' bits."""
    batch, found = Batch(active, kind, page), []

    def layers() -> None:
        found[:] = [batch.attend(window, is_swapped=is_swapped) for is_swapped in (False, True)]

    batch.load(0)
    replay = graphs.capture(layers, active)
    captured = list(found)
    for step in (0, 1, 2, 1):
        batch.load(step)
        replay()
        captured = captured if active != "cpu" else list(found)
        for is_swapped, pair in enumerate(captured):
            batch.check(pair, window, is_swapped=bool(is_swapped))
            eager = batch.attend(window, is_swapped=bool(is_swapped))
            assert all(torch.equal(one, two) for one, two in zip(pair, eager, strict=True))


def test_a_graph_counts_tokens_itself(active: str, kernels: None) -> None:
    """Requests grow by a token in each replay, over ends of pages, as in a decode loop that stays on the device."""
    batch, found = Batch(active, "growth", 16), []
    window = WINDOWS["causal"]

    def step() -> None:
        batch.used.add_(1)
        found[:] = [batch.attend(window)]

    batch.load(0)
    batch.used.sub_(20)
    replay = graphs.capture(step, active)
    captured = list(found)
    for _ in range(19):
        replay()
        batch.check(captured[0] if active != "cpu" else found[0], window)
    assert batch.used.tolist() == list(batch.steps[0][1])
