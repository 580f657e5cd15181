"""Batches whose requests share tokens: levels of pages, the tokens of each request, and the expected results."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from caches import Cache, Shape, write_pages
from cases.case import Case
from comparison import Outputs, Report, compare
from reference import Options, State, attention, visible_tokens

import flashpage

WORKSPACE_BYTES = 32 << 20
Tree = Sequence[Sequence[tuple[int, int]]]  # for each level the (rows, tokens) of its requests, in the rows' order


def indptr_of(lengths: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


@dataclasses.dataclass(frozen=True)
class CascadeCase:
    """A case: a tree of shared tokens, and options."""

    name: str
    tree: Tree
    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    dtype: str = "bfloat16"
    kv_dtype: str = ""
    kv_layout: str = "NHD"
    cache: str = "fused"  # tests/support/caches.py, FORMS
    causal: bool = False
    window_left: int = -1
    chunk: int = 0
    soft_cap: float = 0.0
    sm_scale: float | None = None

    def __str__(self) -> str:
        return self.name


class CascadeBatch:
    """A case's tensors on the CPU, with NaN in every slot that holds no token."""

    def __init__(self, case: CascadeCase) -> None:
        self.case = case
        generator = torch.Generator().manual_seed(len(case.name))
        dtype, kv_dtype = getattr(torch, case.dtype), getattr(torch, case.kv_dtype or case.dtype)
        lengths = [tokens for level in case.tree for _, tokens in level]
        self.rows = sum(rows for rows, _ in case.tree[-1])

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        self.q = random(self.rows, case.num_q_heads, case.head_dim).to(dtype)
        k, v = ([random(n, case.num_kv_heads, case.head_dim).to(kv_dtype) for n in lengths] for _ in range(2))
        pages = sum(-(-n // case.page_size) for n in lengths) + 3
        shape = Shape(pages, case.page_size, case.num_kv_heads, case.head_dim, case.head_dim)
        self.cache = Cache.make(case.cache, shape, case.kv_layout, kv_dtype)
        indptr, indices, last = write_pages(self.cache, tuple(lengths), k, v, seed=len(case.name))
        self.levels, self._tokens, first = [], [], 0
        for level in case.tree:
            end = first + len(level)
            used = indices[indptr[first] : indptr[end]]
            rows = indptr_of([rows for rows, _ in level])
            self.levels.append((rows, indptr[first : end + 1] - indptr[first], used, last[first:end]))
            self._tokens.append((rows, k[first:end], v[first:end]))
            first = end

    def arrays(self, device: str = "cpu", host_lengths: bool = True) -> list[list[torch.Tensor]]:
        """The four lists of `plan`; page numbers on the device."""
        where = ("cpu", "cpu", device, "cpu") if host_lengths else (device,) * 4
        return [[level[i].to(to) for level in self.levels] for i, to in enumerate(where)]

    def options(self) -> dict[str, Any]:
        """Keywords of `plan`."""
        case = self.case
        return {
            "causal": case.causal,
            "window_left": case.window_left,
            "chunk": case.chunk,
            "logits_soft_cap": case.soft_cap or None,
            "sm_scale": case.sm_scale,
            "q_data_type": self.q.dtype,
            "kv_data_type": getattr(torch, case.kv_dtype or case.dtype),
        }

    def sizes(self) -> tuple[int, int, int, int]:
        return self.case.num_q_heads, self.case.num_kv_heads, self.case.head_dim, self.case.page_size

    def request(self, i: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows of request i of the last level, and all of its tokens, level after level."""
        begin, end = (int(self._tokens[-1][0][j]) for j in (i, i + 1))
        keys, values = [], []
        for rows, k, v in self._tokens:
            owner = int((rows[1:] <= begin).sum()) if end > begin else 0
            keys.append(k[owner])
            values.append(v[owner])
        return self.q[begin:end], torch.cat(keys), torch.cat(values)

    def hide_pages(self) -> list[torch.Tensor]:
        """Poisons the pages of which no row sees a token; returns the numbers of the other pages, level by level."""
        visible = [torch.zeros(sum(len(keys) for keys in k), dtype=torch.bool) for _, k, _ in self._tokens]
        for i in range(len(self.case.tree[-1])):
            q, keys, _ = self.request(i)
            rows, tokens = torch.arange(len(q)) + len(keys) - len(q), torch.arange(len(keys))
            seen = visible_tokens(self._reference(), rows[:, None], tokens[None]).any(0)
            for level, (first, count) in enumerate(self._places(i)):
                visible[level][first : first + count] |= seen[:count]
                seen = seen[count:]
        shown = []
        for (_, k, _), (_, indptr, indices, _), tokens in zip(self._tokens, self.levels, visible, strict=True):
            of_requests = tokens.split([len(keys) for keys in k])
            pages = [
                indices[int(indptr[i]) + page]
                for i, seen in enumerate(of_requests)
                for page, of_page in enumerate(seen.split(self.case.page_size))
                if bool(of_page.any())
            ]
            shown.append(torch.stack(pages) if pages else indices[:0])
        hidden = torch.ones(self.cache.shape.pages, dtype=torch.bool)
        hidden[torch.cat(shown).long()] = False
        for kv in self.cache.rows():
            kv[hidden] = math.nan
        return shown

    def _places(self, i: int) -> list[tuple[int, int]]:
        """For each level, where the tokens of request i of the last level begin among the level's, and their number."""
        begin, end = (int(self._tokens[-1][0][j]) for j in (i, i + 1))
        found = []
        for rows, k, _ in self._tokens:
            owner = int((rows[1:] <= begin).sum()) if end > begin else 0
            found.append((sum(len(keys) for keys in k[:owner]), len(k[owner])))
        return found

    def _reference(self) -> Options:
        case = self.case
        return Options(
            sm_scale=case.head_dim**-0.5 if case.sm_scale is None else case.sm_scale,
            causal=case.causal,
            window_left=case.window_left,
            chunk=case.chunk,
            soft_cap=case.soft_cap,
        )

    def expected(self) -> list[State]:
        options = self._reference()
        return [attention(*self.request(i), options) for i in range(len(self.case.tree[-1]))]

    def check(self, out: torch.Tensor, lse: torch.Tensor) -> Report:
        """Compares with the reference on all tokens. Each level's output was rounded once before the merge."""
        case = self.case
        requests = [self.request(i) for i in range(len(case.tree[-1]))]
        as_case = Case(
            case.name,
            "a cascade",
            tuple(len(k) for _, k, _ in requests),
            tuple(len(q) for q, _, _ in requests),
            num_q_heads=case.num_q_heads,
            num_kv_heads=case.num_kv_heads,
            head_dim=case.head_dim,
            q_dtype=case.dtype,
            kv_dtype=case.kv_dtype,
            sm_scale=case.sm_scale,
            soft_cap=case.soft_cap,
        )
        slack = 1.0 + 0.7 * (len(case.tree) > 1)
        states = [
            dataclasses.replace(s, magnitude=s.magnitude * slack, spread=s.spread * slack) for s in self.expected()
        ]
        return compare(as_case, Outputs(out, lse), states)


DECODE = (((5, 300),), ((1, 70), (1, 0), (1, 16), (1, 1), (1, 129)))


def wrapper_for(batch: CascadeBatch, device: str, **options: Any) -> Any:
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    return flashpage.MultiLevelCascadeAttentionWrapper(len(batch.levels), workspace, batch.case.kv_layout, **options)


def planned(batch: CascadeBatch, device: str = "cpu", host_lengths: bool = True, **changed: Any) -> Any:
    wrapper = wrapper_for(batch, device)
    wrapper.plan(*batch.arrays(device, host_lengths), *batch.sizes(), **(batch.options() | changed))
    return wrapper


def buffers_for(batches: list[CascadeBatch], device: str) -> dict[str, list[torch.Tensor]]:
    """Graph buffers for the largest batch; all batches have the same number of requests in each level."""
    levels = batches[0].levels

    def zeros(sizes: list[int]) -> list[torch.Tensor]:
        return [torch.zeros(size, dtype=torch.int32, device=device) for size in sizes]

    return {
        "qo_indptr_buf_arr": zeros([len(level[0]) for level in levels]),
        "paged_kv_indptr_buf_arr": zeros([len(level[1]) for level in levels]),
        "paged_kv_indices_buf_arr": zeros([max(len(b.levels[i][2]) for b in batches) for i in range(len(levels))]),
        "paged_kv_last_page_len_buf_arr": zeros([len(level[3]) for level in levels]),
    }


GRAPH_TREES = (
    DECODE,
    (((5, 0),), ((1, 1), (1, 2), (1, 3), (1, 4), (1, 500))),
    (((5, 17),), ((1, 0), (1, 0), (1, 0), (1, 0), (1, 0))),
    (((4, 130),), ((1, 7), (1, 0), (0, 0), (1, 65), (1, 20))),
)


GRAPH_PREFILLS = (
    (((20, 40),), ((7, 30), (1, 5), (12, 130))),
    (((20, 0),), ((1, 64), (9, 9), (10, 70))),
    (((14, 100),), ((14, 77), (0, 0), (0, 3))),
)


def graph_batches(trees: Sequence[Tree] = GRAPH_TREES, **options: Any) -> list[CascadeBatch]:
    return [CascadeBatch(CascadeCase(f"graph-{i}", tree, **options)) for i, tree in enumerate(trees)]


GRAPH_CASES = {  # arguments of graph_batches
    "plain": {},
    "window": {"window_left": 60},
    "chunk": {"chunk": 64},
    "chunk-prefill": {"trees": GRAPH_PREFILLS, "chunk": 33},  # a row sees what follows it in its chunk, and no more
    "chunk-prefill-causal": {"trees": GRAPH_PREFILLS, "chunk": 50, "causal": True, "window_left": 40},
}
