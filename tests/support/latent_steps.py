"""Batches over latent rows of equal options and different lengths over one memory, as in an engine's captured steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from cases.case import Case
from cases.latent import latent_case
from comparison import Outputs, compare
from inputs import make_inputs, reference_states

import flashpage
from flashpage import MLAPlanMetadata

WORKSPACE_BYTES = 128 << 20
UNUSED = 2**30  # entry of tables that must not be read
MOST_ROWS = 3  # of a request
LENS = ((1500, 7, 0, 64), (1, 1, 1, 1), (40, 900, 16, 300), (0, 0, 0, 0), (129, 65, 2000, 0))
ROWS = ((1, 3, 1, 2), (1, 1, 1, 1), (3, 1, 0, 2), (0, 0, 0, 0), (2, 2, 3, 1))


def decode_cases(num_q_heads: int, **options: Any) -> list[Case]:
    """One row a request."""
    options |= {"num_q_heads": num_q_heads, "cache": "interleaved"}
    return [latent_case(f"step-{i}", "a step", (1,) * len(lens), lens, **options) for i, lens in enumerate(LENS)]


def append_cases(num_q_heads: int) -> list[Case]:
    """Up to MOST_ROWS rows a request, fewer in all than MOST_ROWS for each."""
    options: dict[str, Any] = {"num_q_heads": num_q_heads, "cache": "interleaved", "causal": True}
    return [
        latent_case(f"appended-{i}", "a step", *lens, **options) for i, lens in enumerate(zip(ROWS, LENS, strict=True))
    ]


class LatentSteps:
    """Memory of constant address into which any step can be loaded. Memory of no row or token is NaN."""

    def __init__(self, cases: Sequence[Case], device: str) -> None:
        self.cases, self.device = list(cases), device
        self.inputs = [make_inputs(case) for case in cases]
        caches = [inputs.cache.buffers[0].squeeze(2) for inputs in self.inputs]
        self.own_cache = [cache.to(device) for cache in caches]
        case, self.batch = cases[0], len(cases[0].kv_lens)
        dtype, pages = caches[0].dtype, max(map(len, caches))
        self.query = torch.empty(self.batch * MOST_ROWS, case.num_q_heads, case.head_dim, dtype=dtype, device=device)
        self.cache = torch.empty(pages, *caches[0].shape[1:], dtype=dtype, device=device)
        self.out = torch.empty(*self.query.shape[:2], case.value_dim, dtype=dtype, device=device)
        self.lse = torch.empty(self.query.shape[:2], device=device)
        integers = {"dtype": torch.int32, "device": device}
        columns = max(-(-n // case.page_size) for each in cases for n in each.kv_lens)
        self.indptr = torch.zeros(self.batch + 1, **integers)
        self.tables = torch.empty(self.batch, columns + 3, **integers)
        self.lens = torch.empty(self.batch, **integers)

    def __len__(self) -> int:
        return len(self.cases)

    @property
    def sizes(self) -> dict[str, Any]:
        case = self.cases[0]
        tail = case.head_dim - case.value_dim
        sizes = {"num_heads": case.num_q_heads, "head_dim_ckv": case.value_dim, "head_dim_kpe": tail}
        options = {"page_size": case.page_size, "causal": case.causal, "sm_scale": case.score_scale}
        return sizes | options | {"q_data_type": getattr(torch, case.q_dtype)}

    def rows(self, i: int) -> int:
        return sum(self.cases[i].q_lens)

    def load(self, i: int) -> None:
        """Step i's rows, tokens, lengths and tables, in the current stream's order."""
        inputs, case = self.inputs[i], self.cases[i]
        for memory, own in ((self.query, torch.cat(inputs.q)), (self.cache, self.own_cache[i])):
            memory.fill_(math.nan)
            memory[: len(own)] = own.to(self.device)
        self.out.fill_(math.nan)
        self.lse.fill_(math.nan)
        tables = torch.full(self.tables.shape, UNUSED, dtype=torch.int32)
        for request, pages in enumerate(inputs.indices.tensor_split(inputs.indptr[1:-1].tolist())):
            tables[request, : len(pages)] = pages
        for memory, own in (
            (self.tables, tables),
            (self.lens, torch.tensor(case.kv_lens)),
            (self.indptr, inputs.qo_indptr),
        ):
            memory.copy_(own)

    def wrapper(self, *, graph: bool) -> flashpage.BatchMLAPagedAttentionWrapper:
        workspace, integers = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=self.device), {}
        if graph:
            sizes = {"qo_indptr": self.batch + 1, "kv_indptr": self.batch + 1, "kv_len_arr": self.batch}
            sizes["kv_indices"] = len(self.cache)
            integers = {name: torch.zeros(n, dtype=torch.int32, device=self.device) for name, n in sizes.items()}
        return flashpage.BatchMLAPagedAttentionWrapper(workspace, use_cuda_graph=graph, **integers)

    def plan(self, wrapper: flashpage.BatchMLAPagedAttentionWrapper, i: int, form: str = "csr") -> None:
        """Plans step i on the host."""
        inputs, lens = self.inputs[i], torch.tensor(self.cases[i].kv_lens)
        if form == "csr":
            metadata = MLAPlanMetadata.csr(inputs.qo_indptr, inputs.indptr, inputs.indices.to(self.device), lens)
        else:
            metadata = MLAPlanMetadata.dense(inputs.qo_indptr, self.tables, lens)
        wrapper.plan(metadata=metadata, **self.sizes)

    def plan_on_device(self, wrapper: flashpage.BatchMLAPagedAttentionWrapper) -> None:
        """Plans the loaded step, of whose rows the host knows only the bound."""
        wrapper.plan(metadata=MLAPlanMetadata.dense(self.indptr, self.tables, self.lens, MOST_ROWS), **self.sizes)

    def run(self, wrapper: flashpage.BatchMLAPagedAttentionWrapper, rows: int | None = None) -> None:
        """Runs the loaded step with its first `rows` rows of q, or with all rows that there may be."""
        query, out, lse = (memory[:rows] for memory in (self.query, self.out, self.lse))
        wrapper.run(query=query, kv_cache=self.cache, out=out, lse=lse)

    def check(self, i: int) -> None:
        """Compares with the reference. Rows that the step does not have stay as they were."""
        rows = self.rows(i)
        compare(self.cases[i], Outputs(self.out[:rows], self.lse[:rows]), reference_states(self.inputs[i]))
        assert bool(self.out[rows:].isnan().all()) and bool(self.lse[rows:].isnan().all())
