"""Batches with equal options and different lengths over one memory, like an engine's steps, graphs and streams."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from cases.case import Case, decode, prefill
from comparison import Outputs, compare
from inputs import Inputs, make_inputs, reference_states

import flashpage

WORKSPACE_BYTES = 64 << 20
DECODE_LENS = (  # of five requests: long ones are split and merged, empty ones are an engine's padding
    (3000, 7, 0, 64, 129),
    (1, 1, 1, 1, 1),
    (40, 2500, 16, 17, 300),
    (0, 0, 0, 0, 0),
    (700, 700, 700, 700, 700),
    (5000, 0, 0, 0, 1),
)
PREFILL_LENS = (  # rows and tokens of four requests
    ((1, 40, 5, 64), (2000, 40, 900, 64)),
    ((1, 1, 1, 1), (17, 1500, 16, 1)),
    ((100, 0, 0, 7), (300, 0, 5, 2500)),
    ((33, 33, 33, 33), (33, 33, 33, 33)),
)


def decode_cases(count: int = len(DECODE_LENS), name: str = "steps") -> list[Case]:
    """Steps with the lengths of DECODE_LENS, a few tokens more in each round; the name seeds their numbers."""
    cases = []
    for i in range(count):
        turn, base = divmod(i, len(DECODE_LENS))
        lens = [n + 5 * turn if n else 0 for n in DECODE_LENS[base]]
        cases.append(decode(f"{name}-decode-{i}", "a step", lens, cache="fused"))
    return cases


def prefill_cases(count: int = len(PREFILL_LENS), name: str = "steps", **options: Any) -> list[Case]:
    """Steps with the lengths of PREFILL_LENS, whose tokens grow in each round."""
    cases = []
    for i in range(count):
        turn, base = divmod(i, len(PREFILL_LENS))
        rows, lens = PREFILL_LENS[base]
        kv_lens = [n + 5 * turn if n else 0 for n in lens]
        options = {"causal": True, "cache": "fused"} | options
        cases.append(prefill(f"{name}-prefill-{i}", "a step", rows, kv_lens, **options))
    return cases


class Steps:
    """Each step's own tensors on a device, and memory of constant address into which any step can be loaded."""

    def __init__(self, cases: Sequence[Case], device: str) -> None:
        self.cases, self.device = list(cases), device
        self.inputs: list[Inputs] = [make_inputs(case) for case in cases]
        self.own_q = [torch.cat(inputs.q).to(device) for inputs in self.inputs]
        self.own_cache = [inputs.cache.argument(device) for inputs in self.inputs]
        self.indices = [inputs.indices.to(device) for inputs in self.inputs]
        self.rows = [len(q) for q in self.own_q]
        self.q, self.cache = _room(self.own_q), _room(self.own_cache)
        self.out, self.lse = torch.empty_like(self.q), torch.empty(self.q.shape[:2], device=device)
        if self.q.is_cuda:
            torch.cuda.synchronize(device)  # as steps are loaded on other streams, too

    def __len__(self) -> int:
        return len(self.cases)

    def load(self, i: int) -> None:
        """Loads step i's q and cache, in the current stream's order; everything else becomes NaN, outputs too."""
        for memory, own in ((self.q, self.own_q[i]), (self.cache, self.own_cache[i])):
            memory[: len(own)] = own
            memory[len(own) :] = math.nan
        self.out.fill_(math.nan)
        self.lse.fill_(math.nan)

    @property
    def capacity(self) -> dict[str, int]:
        """Capacities of the largest steps, as constructors take them."""
        pages = max(int(inputs.indptr[-1]) for inputs in self.inputs)
        return {
            "max_batch": max(len(case.kv_lens) for case in self.cases),
            "max_pages": pages,
            "max_rows": max(self.rows),
        }

    def wrapper(self, workspace: torch.Tensor | None = None, *, graph: bool = False, **options: Any) -> Any:
        """A wrapper for all steps; `graph`: with buffers for the largest."""
        if workspace is None:
            workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
        is_decode, buffers = self.cases[0].entry == "decode", {}
        if graph:
            batch = len(self.cases[0].kv_lens)
            sizes = {"paged_kv_indptr": batch + 1, "paged_kv_last_page_len": batch, "paged_kv_indices": len(self.cache)}
            ending = "_buffer" if is_decode else "_buf"
            if not is_decode:
                sizes["qo_indptr"] = batch + 1
            buffers = {name + ending: self._zeros(size) for name, size in sizes.items()}
            if self.inputs[0].masks:
                most = max(sum(mask.numel() // 8 + 1 for mask in inputs.masks or ()) for inputs in self.inputs)
                buffers["custom_mask_buf"] = self._zeros(most).to(torch.uint8)
        name = "BatchDecodeWithPagedKVCacheWrapper" if is_decode else "BatchPrefillWithPagedKVCacheWrapper"
        return getattr(flashpage, name)(workspace, "NHD", **({"use_cuda_graph": graph} | buffers | options))

    def plan(self, wrapper: Any, i: int, plan: Callable[..., None] | None = None, **values: Any) -> None:
        """Plans step i with host lengths and device page numbers, so that nothing waits."""
        inputs, case = self.inputs[i], self.cases[i]
        pages = (inputs.indptr, self.indices[i], inputs.last_page_len)
        sizes = (case.num_q_heads, case.num_kv_heads, case.head_dim, case.page_size)
        values = {"q_data_type": self.q.dtype, "sm_scale": case.sm_scale} | values
        plan = plan or wrapper.plan
        if case.entry == "decode":
            plan(*pages, *sizes, **values)
            return
        if inputs.masks:
            values["custom_mask"] = torch.cat([mask.flatten() for mask in inputs.masks]).to(self.device)
        plan(inputs.qo_indptr, *pages, *sizes, causal=case.causal, **values)

    def run(self, wrapper: Any, i: int, **values: Any) -> Outputs:
        """Runs step i from its own tensors, into new ones."""
        return Outputs(*wrapper.run(self.own_q[i], self.own_cache[i], return_lse=True, **values))

    def run_loaded(self, wrapper: Any, **values: Any) -> Outputs:
        """Runs the loaded step, into `out` and `lse`."""
        wrapper.run(self.q, self.cache, out=self.out, lse=self.lse, **values)
        return Outputs(self.out, self.lse)

    def check(self, i: int, outputs: Outputs, **changed: Any) -> None:
        """Compares with the reference; `changed`: values of the case that the run gave in place of the planned ones."""
        case = dataclasses.replace(self.cases[i], **changed)
        assert outputs.lse is not None
        mine = Outputs(outputs.out[: self.rows[i]], outputs.lse[: self.rows[i]])
        compare(case, mine, reference_states(dataclasses.replace(self.inputs[i], case=case)))

    def _zeros(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int32, device=self.device)


def _room(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Index memory for the longest step."""
    longest = max(tensors, key=len)
    return torch.full_like(longest, math.nan)


def assert_same_bits(a: Outputs, b: Outputs, rows: int | None = None) -> None:
    """Bitwise equality, in which NaN equals NaN."""
    assert a.lse is not None and b.lse is not None
    for x, y in ((a.out, b.out), (a.lse, b.lse)):
        integers = {2: torch.int16, 4: torch.int32}[x.element_size()]
        assert torch.equal(x[:rows].view(integers), y[:rows].view(integers))
