"""Random rows of functions that move bytes or merge states: appending to caches, merging, and plans of a graph."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from caches import Cache, Shape, poison
from fuzz import Format
from hypothesis import strategies as st
from reference import LOG2_E, merge
from tolerance import FP32, UNIT

from flashpage import cascade, page

_APPENDED = ["float32", "float16", "bfloat16", "float8_e4m3fn"]


@dataclasses.dataclass(frozen=True)
class AppendRow:
    """New tokens at any positions of requests, in any order."""

    pages: tuple[int, ...]  # of each request
    tokens: tuple[tuple[int, int], ...]  # request and position of each new token; (-1, -1): not written
    heads: int
    dims: tuple[int, int]  # of K and V
    page_size: int
    dtype: str
    layout: str
    cache: str  # tests/support/caches.py, FORMS
    is_int64: bool = False
    is_strided: bool = False  # keys and values are slices of one tensor
    name: str = "fuzz"

    def check(self, device: str) -> None:
        generator = torch.Generator().manual_seed(len(self.tokens))
        order = torch.randperm(sum(self.pages) + 2, generator=generator)[: sum(self.pages)]
        shape = Shape(sum(self.pages) + 2, self.page_size, self.heads, *self.dims)
        expected = Cache.make(self.cache, shape, self.layout, getattr(torch, self.dtype))
        found = dataclasses.replace(expected, buffers=tuple(b.to(device, copy=True) for b in expected.buffers))
        k, v = (self._new(dim, generator) for dim in self.dims)
        indptr = torch.tensor([0, *self.pages]).cumsum(0)
        rows = expected.rows()
        for i, (request, position) in enumerate(self.tokens):
            if request >= 0:
                slot = order[indptr[request] + position // self.page_size], position % self.page_size
                rows[0][slot], rows[1][slot] = k[i], v[i]
        kind = torch.int64 if self.is_int64 else torch.int32
        numbers = torch.tensor(self.tokens, dtype=kind).reshape(-1, 2)
        last = torch.ones(len(self.pages), dtype=kind)
        lists = [order.to(kind), indptr.to(kind), last]
        places = [numbers[:, 0].contiguous(), numbers[:, 1].contiguous()]
        page.append_paged_kv_cache(
            *(self._placed(t, device) for t in (k, v)),
            *(t.to(device) for t in places),
            found.argument(device),
            *(t.to(device) for t in lists),
            self.layout,
        )
        for mine, wanted in zip(found.buffers, expected.buffers, strict=True):
            assert torch.equal(mine.cpu().view(torch.uint8), wanted.view(torch.uint8)), "other bytes were written"

    def _new(self, dim: int, generator: torch.Generator) -> torch.Tensor:
        rows = torch.randn(len(self.tokens), self.heads, dim, generator=generator)
        return rows.to(getattr(torch, self.dtype))

    def _placed(self, rows: torch.Tensor, device: str) -> torch.Tensor:
        if not self.is_strided:
            return rows.to(device)
        count, heads, dim = rows.shape
        memory = poison(torch.empty(count, heads + 2, dim, dtype=rows.dtype, device=device))
        memory[:, 1 : heads + 1] = rows.to(device)
        return memory[:, 1 : heads + 1]


@st.composite
def appends(draw: st.DrawFn, chosen: list[Format]) -> AppendRow:
    page_size, dim = draw(st.sampled_from([1, 2, 16])), draw(st.sampled_from([8, 64, 128]))
    layout, forms = draw(st.sampled_from(["NHD", "HND"])), ["tuple", "permuted", "gapped", "fused"]
    if page_size == 1:
        forms += ["fused_4d", "tuple_3d"]
    cache = draw(st.sampled_from(forms))
    pages = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4).map(tuple))
    room = [(request, at) for request, count in enumerate(pages) for at in range(count * page_size)]
    tokens = draw(st.lists(st.sampled_from(room), unique=True, max_size=20)) if room else []
    for at in draw(st.lists(st.integers(0, len(tokens)), max_size=2)):
        tokens.insert(at, (-1, -1))
    heads, dims = draw(st.integers(1, 3)), (dim, dim if "fused" in cache else draw(st.sampled_from([dim, 32])))
    types = draw(st.sampled_from(_APPENDED)), layout, cache
    return AppendRow(pages, tuple(tokens), heads, dims, page_size, *types, draw(st.booleans()), draw(st.booleans()))


@dataclasses.dataclass(frozen=True)
class MergeRow:
    """States of which some saw no token."""

    way: str  # pair | in_place | many
    shape: tuple[int, int, int]  # rows, heads, head_dim
    states: int
    dtype: str
    empty: int  # seed of the states that saw nothing
    offset: int = 0  # elements before the first one
    has_mask: bool = False
    name: str = "fuzz"

    def check(self, device: str) -> None:
        rows, heads, dim = self.shape
        generator = torch.Generator().manual_seed(self.empty)
        v = torch.randn(rows, self.states, heads, dim, generator=generator).to(getattr(torch, self.dtype))
        s = torch.randn(rows, self.states, heads, generator=generator) * 4
        if self.empty:
            is_empty = torch.rand(rows, self.states, heads, generator=generator) < 0.3
            s[is_empty] = -torch.inf
            v[is_empty] = 0
        mask = torch.rand(rows, generator=generator) < 0.5 if self.has_mask else None
        out, lse = self._merged(v, s, mask, device)
        wanted, wanted_lse = merge(list(v.unbind(1)), list(s.unbind(1)))
        if mask is not None:
            wanted = torch.where(mask[:, None, None], wanted, v[:, 0].double())
            wanted_lse = torch.where(mask[:, None], wanted_lse, s[:, 0].double())
        magnitude = v.double().abs().amax(1)
        allowed = 1.05 * UNIT[self.dtype] * wanted.abs() + 16 * FP32 * magnitude + 2.0**-24
        assert bool(((out.cpu().double() - wanted).abs() <= allowed).all()), "out is wrong"
        same = lse.cpu().double() == wanted_lse
        near = (lse.cpu().double() - wanted_lse).abs() <= 8 * FP32 * (1 + wanted_lse.abs()) * LOG2_E
        assert bool((same | near).all()), "lse is wrong"

    def _merged(
        self, v: torch.Tensor, s: torch.Tensor, mask: torch.Tensor | None, device: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.way == "many":
            found: Any = cascade.merge_states(self._placed(v, device), self._placed(s, device))
            return found
        parts = [(v[:, i], s[:, i]) for i in range(2)]
        (v_a, s_a), (v_b, s_b) = ([self._placed(t, device) for t in part] for part in parts)
        if self.way == "pair":
            return cascade.merge_state(v_a, s_a, v_b, s_b)
        cascade.merge_state_in_place(v_a, s_a, v_b, s_b, mask=None if mask is None else mask.to(device))
        return v_a, s_a

    def _placed(self, values: torch.Tensor, device: str) -> torch.Tensor:
        """Contiguous, at the offset."""
        memory = poison(torch.empty(values.numel() + self.offset, dtype=values.dtype, device=device))
        return memory[self.offset :].view(values.shape).copy_(values)


@st.composite
def merges(draw: st.DrawFn, chosen: list[Format]) -> MergeRow:
    way = draw(st.sampled_from(["pair", "in_place", "many"]))
    shape = (draw(st.integers(0, 9)), draw(st.integers(1, 5)), draw(st.sampled_from([4, 8, 64, 128, 256])))
    states = draw(st.integers(1, 5)) if way == "many" else 2
    dtype, empty = draw(st.sampled_from(["float32", "float16", "bfloat16"])), draw(st.integers(0, 20))
    offset = draw(st.sampled_from([0, 0, 1, 4])) if way != "in_place" else 0
    return MergeRow(way, shape, states, dtype, empty, offset, way == "in_place" and draw(st.booleans()))
