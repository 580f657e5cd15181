"""Lengths and block tables on the device, for `plan_on_device`."""

from __future__ import annotations

from typing import Any

import torch
from steps import Steps

UNUSED = 2**30  # entry of block tables that must not be read


class OnDevice:
    """Lengths and block tables with constant addresses, large enough for every step, and each step's own."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        batch = steps.capacity["max_batch"]
        columns = max(int(inputs.indptr.diff().max()) for inputs in steps.inputs) + 1
        shapes = ((batch + 1,), (batch,), (batch, columns + 3), (1,))
        self.own = [[tensor.to(steps.device) for tensor in self._of(i, shapes)] for i in range(len(steps))]
        self.qo_indptr, self.seq_lens, tables, self.num_requests = (torch.empty_like(t) for t in self.own[0])
        self.all = (self.qo_indptr, self.seq_lens, tables, self.num_requests)
        self.block_tables = tables[:, :columns]

    def _of(self, i: int, shapes: tuple[tuple[int, ...], ...]) -> list[torch.Tensor]:
        """Lengths and tables of step i; entries of no request hold values that would be noticed."""
        case, inputs = self.steps.cases[i], self.steps.inputs[i]
        rows, lens, tables, requests = (torch.full(shape, UNUSED, dtype=torch.int32) for shape in shapes)
        count = len(case.kv_lens)
        lens[:count] = torch.tensor(case.kv_lens)
        rows[: count + 1] = torch.arange(count + 1) if case.entry == "decode" else inputs.qo_indptr
        for request, pages in enumerate(inputs.indices.tensor_split(inputs.indptr[1:-1].tolist())):
            tables[request, : len(pages)] = pages
        requests.fill_(count)
        return [rows, lens, tables, requests]

    def load(self, i: int) -> None:
        """Copies step i's, in the order of the current stream."""
        for memory, own in zip(self.all, self.own[i], strict=True):
            memory.copy_(own)

    def plan(self, wrapper: Any, i: int, **values: Any) -> None:
        """Plans from the loaded lengths; `i` only selects the kind of step."""
        case = self.steps.cases[i]
        sizes = (case.num_q_heads, case.num_kv_heads, case.head_dim, case.page_size)
        values = {
            "q_data_type": self.steps.q.dtype,
            "sm_scale": case.sm_scale,
            "num_requests": self.num_requests,
        } | values
        if case.entry == "decode":
            wrapper.plan_on_device(self.seq_lens, self.block_tables, *sizes, **values)
        else:
            values = {"causal": case.causal, "max_rows": len(self.steps.q)} | values
            wrapper.plan_on_device(self.qo_indptr, self.seq_lens, self.block_tables, *sizes, **values)
