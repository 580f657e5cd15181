"""Random plans of a wrapper for graphs: batches in turn, through one capture on a card. Each run is compared with the
fp64 reference, so a replay that reads an earlier plan's numbers is seen."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from caches import Cache, Shape, poison, write_pages
from cases.case import Case
from comparison import Outputs, compare
from fuzz import Format, lengths
from fuzz_wrappers import plain, small, types, workspace
from hypothesis import strategies as st
from inputs import Inputs, make_inputs, reference_states

import flashpage
from flashpage import decode

SPARE = 3  # pages that no request has


@dataclasses.dataclass(frozen=True)
class GraphRow:
    """Batches with the same options; the first one has the most rows."""

    batches: tuple[Case, ...]
    has_buffers: bool  # which fix the number of requests; otherwise the wrapper has capacities
    name: str = "fuzz"

    def check(self, device: str) -> None:
        _Runs(self, device).check(self.batches, device)


class CapturedRuns:
    """Runs of a wrapper into the same memory, by a graph once they are captured."""

    out: torch.Tensor
    lse: torch.Tensor
    graph: Any = None

    def plan(self, inputs: Inputs) -> None:
        """Plans a batch, and writes its rows and pages where captured runs read them."""
        raise NotImplementedError

    def _run(self) -> None:
        raise NotImplementedError

    def check(self, batches: tuple[Case, ...], device: str) -> None:
        """Compares the batches in turn with the reference; on a card the first run is captured."""
        for i, case in enumerate(batches):
            inputs = make_inputs(case)
            self.plan(inputs)
            if device != "cpu" and i == 0:
                self.capture()
            compare(case, self.outputs(sum(case.q_lens)), reference_states(inputs))

    def capture(self) -> None:
        self._run()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._run()

    def outputs(self, rows: int) -> Outputs:
        """Runs, or replays; the outputs in the rows of the batch."""
        poison(self.out)
        poison(self.lse)
        if self.graph is None:
            self._run()
        else:
            self.graph.replay()
        return Outputs(self.out[:rows], self.lse[:rows])


class _Runs(CapturedRuns):
    """A wrapper, and the memory that its captured runs read and write."""

    def __init__(self, row: GraphRow, device: str) -> None:
        self.device, case, batches = device, row.batches[0], row.batches
        self.is_decode = case.entry == "decode"
        pages = max(self._pages(batch) for batch in batches)
        shape = Shape(pages + SPARE, case.page_size, case.num_kv_heads, case.head_dim, case.value_dim)
        self.cache = Cache.make(case.cache, shape, case.kv_layout, getattr(torch, case.kv_type))
        self.there = dataclasses.replace(self.cache, buffers=tuple(b.to(device) for b in self.cache.buffers))
        self.q = torch.zeros(sum(case.q_lens), case.num_q_heads, case.head_dim, dtype=torch.float32)
        self.q = self.q.to(device, getattr(torch, case.q_dtype))
        self.out = torch.empty(*self.q.shape[:2], case.value_dim, dtype=getattr(torch, case.out_type), device=device)
        self.lse = torch.empty(self.q.shape[:2], dtype=torch.float32, device=device)
        self.wrapper = self._wrapper(row, pages)

    @staticmethod
    def _pages(case: Case) -> int:
        return sum(-(-n // case.page_size) for n in case.kv_lens)

    def _wrapper(self, row: GraphRow, pages: int) -> Any:
        case, ints = row.batches[0], {"dtype": torch.int32, "device": self.device}
        most = max(len(batch.kv_lens) for batch in row.batches)
        memory = workspace(self.device)
        if not row.has_buffers:
            kind = flashpage.BatchDecodeWithPagedKVCacheWrapper
            sizes = {"max_batch": most, "max_pages": max(1, pages)}
            if not self.is_decode:
                kind, sizes = flashpage.BatchPrefillWithPagedKVCacheWrapper, sizes | {"max_rows": len(self.q)}
            return kind(memory, case.kv_layout, use_cuda_graph=True, **sizes)
        indptr, indices = torch.zeros(most + 1, **ints), torch.zeros(max(1, pages), **ints)
        last = torch.zeros(most, **ints)
        if self.is_decode:
            return decode.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(memory, indptr, indices, last, case.kv_layout)
        return flashpage.BatchPrefillWithPagedKVCacheWrapper(
            memory,
            case.kv_layout,
            use_cuda_graph=True,
            qo_indptr_buf=torch.zeros(most + 1, **ints),
            paged_kv_indptr_buf=indptr,
            paged_kv_indices_buf=indices,
            paged_kv_last_page_len_buf=last,
        )

    def plan(self, inputs: Inputs) -> None:
        """Plans a batch, and writes its rows and pages where captured runs read them."""
        case = inputs.case
        for buffer in self.cache.buffers:
            poison(buffer)
        lists = write_pages(self.cache, case.kv_lens, inputs.k, inputs.v, seed=len(case.kv_lens))
        for buffer, new in zip(self.there.buffers, self.cache.buffers, strict=True):
            buffer.copy_(new)
        self.q[: sum(case.q_lens)] = torch.cat(inputs.q).to(self.device)
        heads = (case.num_q_heads, case.num_kv_heads, case.head_dim, case.page_size)
        values = {"window_left": case.window_left, "sm_scale": case.sm_scale, "pos_encoding_mode": case.position}
        values |= {"logits_soft_cap": case.soft_cap or None, **types(case)}
        indptr, indices, last = lists
        if self.is_decode:
            self.wrapper.plan(indptr, indices, last, *heads, q_len_per_req=case.q_lens[0], **values)
        else:
            lengths = (inputs.qo_indptr, indptr, indices, last)
            self.wrapper.plan(*lengths, *heads, head_dim_vo=case.value_dim, causal=case.causal, **values)

    def _run(self) -> None:
        self.wrapper.run(self.q, self.there.argument(self.device), out=self.out, lse=self.lse, return_lse=True)


@st.composite
def graphs(draw: st.DrawFn, chosen: list[Format]) -> GraphRow:
    is_decode, has_buffers = draw(st.booleans()), draw(st.booleans())
    form = draw(plain(chosen, has_dims=not is_decode))
    group, kv_heads, most = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2])), draw(st.integers(1, 5))
    options = {"window_left": draw(st.sampled_from([-1, -1, 0, 30])), "sm_scale": draw(st.sampled_from([None, 0.2]))}
    q_len = draw(st.sampled_from([1, 1, 2])) if is_decode else 0
    options["causal"] = q_len > 1 if is_decode else draw(st.booleans())
    options |= {"page_size": draw(st.sampled_from([1, 16])), "kv_layout": draw(st.sampled_from(["NHD", "HND"]))}
    options["cache"] = draw(st.sampled_from(["tuple", "fused", "gapped"])) if not form["head_dim_vo"] else "tuple"
    heads = {"num_q_heads": group * kv_heads, "num_kv_heads": kv_heads, "entry": "decode" if is_decode else "paged"}
    batches = []
    for _ in range(draw(st.integers(2, 4))):
        count = most if has_buffers else draw(st.integers(1, most))
        q_lens = (q_len,) * count if is_decode else draw(lengths(count, 70))
        q_lens, kv_lens = small(q_lens, draw(lengths(count, 300)), group * kv_heads)
        q_lens = (q_len,) * count if is_decode else q_lens
        batches.append(Case("fuzz", "drawn", kv_lens, q_lens, **form, **heads, **options))
    batches.sort(key=lambda case: -sum(case.q_lens))
    return GraphRow(tuple(batches), has_buffers)
