"""Batches whose tokens are spread over ranks: each rank's cache, NaN where it has no token, and expected results."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from caches import Cache, Shape, write_pages
from cascade_batch import indptr_of
from cases.case import Case
from comparison import Outputs, compare
from reference import Options, State, attention

WORKSPACE_BYTES = 8 << 20
RAGGED = (300, 0, 17, 16, 1, 129, 64, 33)


@dataclasses.dataclass(frozen=True)
class ParallelCase:
    """A batch, and where its tokens lie."""

    name: str
    kv_lens: tuple[int, ...] = RAGGED
    q_lens: tuple[int, ...] = ()  # (): one row a request, without qo_indptr
    order: str = "interleaved"
    interleave: int = 0
    pages: str = "all"
    heads: str = "all"
    group: str = ""  # "": the default; "pairs": groups of two neighbouring ranks
    num_q_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 64
    head_dim_vo: int = 0
    page_size: int = 16
    dtype: str = "bfloat16"
    kv_layout: str = "NHD"
    causal: bool = False
    window_left: int = -1
    sinks: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def rows(self) -> tuple[int, ...]:
        return self.q_lens or (1,) * len(self.kv_lens)

    def runs_on(self, kind: str) -> bool:
        """fp32 queries run only on the CPU."""
        return kind == "cpu" or self.dtype != "float32"

    def world(self, ranks: int) -> int:
        """Number of ranks that share a request, in a world of this size."""
        return 2 if self.group == "pairs" else ranks


APPEND = (3, 2, 20, 17, 1, 0, 5, 8)
CASES = [
    ParallelCase("decode"),
    ParallelCase("decode-contiguous", order="contiguous"),
    ParallelCase("decode-own-heads", heads="own"),
    ParallelCase("decode-own-pages", pages="own"),
    ParallelCase("single-tokens-own-pages", pages="own", interleave=1),
    ParallelCase("runs-of-two-pages", interleave=32),
    ParallelCase("pairs", group="pairs"),
    ParallelCase("fp16-HND-sinks", dtype="float16", kv_layout="HND", sinks=True),
    ParallelCase("fp32-page-1", dtype="float32", page_size=1, num_q_heads=4, num_kv_heads=4),
    ParallelCase("sinks-own-heads-contiguous", sinks=True, heads="own", order="contiguous"),
    ParallelCase("ranks-without-pages", kv_lens=(5, 16, 0), order="contiguous"),
    ParallelCase("no-tokens", kv_lens=(0, 0)),
    ParallelCase("no-requests", kv_lens=()),
    ParallelCase("no-rows", kv_lens=(40, 3), q_lens=(0, 0)),
    ParallelCase("append-causal", q_lens=APPEND, causal=True),
    ParallelCase("append-causal-contiguous-window", q_lens=APPEND, causal=True, window_left=20, order="contiguous"),
    ParallelCase("append-window-single-tokens", q_lens=APPEND, window_left=9, interleave=1, pages="own"),
    ParallelCase("append-causal-sinks", q_lens=APPEND, causal=True, sinks=True, heads="own"),
    ParallelCase("rows-that-see-all", q_lens=APPEND),
    ParallelCase("decode-window", window_left=40),
    ParallelCase("values-of-other-size", head_dim_vo=128),
]


def owner(case: ParallelCase, world: int, position: int, length: int) -> int:
    """The rank of each token, computed one by one."""
    if case.order == "interleaved":
        return position // (case.interleave or case.page_size) % world
    pages = -(-length // case.page_size)
    ends = [pages * (rank + 1) // world for rank in range(world)]
    return next(rank for rank in range(world) if position // case.page_size < ends[rank])


class ParallelBatch:
    """A case's tensors on the CPU, for groups of `world` ranks; equal in every process."""

    def __init__(self, case: ParallelCase, world: int) -> None:
        self.case = case
        generator = torch.Generator().manual_seed(len(case.name))
        dtype, value_dim = getattr(torch, case.dtype), case.head_dim_vo or case.head_dim

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        self.q = random(sum(case.rows), case.num_q_heads, case.head_dim).to(dtype)
        self.k = [random(n, case.num_kv_heads, case.head_dim).to(dtype) for n in case.kv_lens]
        self.v = [random(n, case.num_kv_heads, value_dim).to(dtype) for n in case.kv_lens]
        self.sinks = random(case.num_q_heads) if case.sinks else None
        self.q_indptr = indptr_of(case.rows)
        self.seq_lens = torch.tensor(case.kv_lens, dtype=torch.int32)
        owners = [torch.tensor([owner(case, world, t, n) for t in range(n)]) for n in case.kv_lens]
        self.caches: list[Cache] = []  # of each rank
        self._tables: list[
            tuple[torch.Tensor, torch.Tensor]
        ] = []  # for each rank: where pages begin, and their numbers
        for rank in range(world):
            k, v = (
                [part[where == rank] for part, where in zip(parts, owners, strict=True)] for parts in (self.k, self.v)
            )
            lengths = tuple(len(part) for part in k)
            pages = sum(-(-n // case.page_size) for n in lengths) + 2
            shape = Shape(pages, case.page_size, case.num_kv_heads, case.head_dim, value_dim)
            self.caches.append(Cache.make("tuple", shape, case.kv_layout, dtype))
            indptr, indices, _ = write_pages(self.caches[-1], lengths, k, v, seed=rank)
            self._tables.append((indptr, indices))
        self._owners = owners

    def pages(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """kv_indptr and kv_indices for a rank's plan: its own lists, or lists of all pages by their owner's number."""
        if self.case.pages == "own":
            return self._tables[rank]
        used = [iter(indices.tolist()) for _, indices in self._tables]
        size = self.case.page_size
        numbers = [next(used[int(rank)]) for where in self._owners for rank in where[::size]]
        counts = [-(-n // size) for n in self.case.kv_lens]
        return indptr_of(counts), torch.tensor(numbers, dtype=torch.int32)

    def options(self) -> dict[str, Any]:
        """Keywords of `plan`."""
        case = self.case
        found = {"causal": case.causal, "window_left": case.window_left, "q_data_type": self.q.dtype}
        return found | ({"head_dim_vo": case.head_dim_vo} if case.head_dim_vo else {})

    def sizes(self) -> tuple[int, int, int, int]:
        return self.case.num_q_heads, self.case.num_kv_heads, self.case.head_dim, self.case.page_size

    def check(self, out: torch.Tensor, lse: torch.Tensor, *, is_merged: bool = True) -> None:
        """Compares with the reference on all tokens. Each rank's output was rounded once before the merge."""
        case = self.case
        options = Options(case.head_dim**-0.5, case.causal, case.window_left, sinks=self.sinks)
        if not self.k:
            assert tuple(out.shape) == (0, case.num_q_heads, case.head_dim) and tuple(lse.shape) == tuple(out.shape[:2])
            return
        slack = 1.7 if is_merged else 1.0
        states: list[State] = []
        for i, (k, v) in enumerate(zip(self.k, self.v, strict=True)):
            state = attention(self.q[self.q_indptr[i] : self.q_indptr[i + 1]], k, v, options)
            states.append(dataclasses.replace(state, magnitude=state.magnitude * slack, spread=state.spread * slack))
        sizes = {"num_q_heads": case.num_q_heads, "num_kv_heads": case.num_kv_heads, "head_dim": case.head_dim}
        as_case = Case(case.name, "", case.kv_lens or (0,), case.rows, q_dtype=case.dtype, **sizes)
        compare(dataclasses.replace(as_case, head_dim_vo=case.head_dim_vo), Outputs(out, lse), states)
