"""A case's batch as engines hold it, for tests/engines/test_engine_*.py, which read its tensors and compare outputs."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from cases.case import Case
from comparison import Outputs, compare
from harness import Runner
from inputs import Inputs, make_inputs, reference_states

import flashpage

WORKSPACE_BYTES = 32 << 20
LENS = (70, 0, 16, 1, 129)
CHUNKS = ((17, 17), (20, 65), (0, 3), (3, 40))  # rows and tokens: prompts and appended chunks


class EngineBatch:
    """Tensors of one case on a device."""

    def __init__(self, case: Case, device: str) -> None:
        self.case, self.device = case, device
        self.inputs: Inputs = make_inputs(case)
        runner = Runner(self.inputs, device, flashpage)
        self.q = runner.q()
        self.kv = runner.kv()[0]
        self.sizes = (case.num_q_heads, case.num_kv_heads, case.head_dim)
        self.seq_lens = torch.tensor(case.kv_lens, dtype=torch.int32)

    def on_device(self, *names: str) -> list[torch.Tensor]:
        return [getattr(self.inputs, name).to(self.device) for name in names]

    def workspace(self) -> torch.Tensor:
        return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)

    def check(self, found: Any, **changed: Any) -> None:
        """Compares an output, or an output and its lse; `changed`: values of the case that the run replaced."""
        out, lse = found if isinstance(found, tuple) else (found, None)
        case = dataclasses.replace(self.case, **changed)
        compare(case, Outputs(out, lse), reference_states(dataclasses.replace(self.inputs, case=case)))

    def zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.int32, device=self.device)


def decode_case(**options: Any) -> Case:
    lens = options.pop("kv_lens", LENS)
    rows = options.pop("q_len", 1)
    entry = {"entry": "decode", "causal": rows > 1}
    return Case("engine-decode", "a step", lens, (rows,) * len(lens), **(entry | options))


def prefill_case(**options: Any) -> Case:
    rows, lens = zip(*options.pop("chunks", CHUNKS), strict=True)
    return Case("engine-prefill", "a step", lens, rows, **({"causal": True} | options))


def slots(**options: Any) -> dict[str, Any]:
    """Pools of single slots, (K, V) of three dimensions each, and more page numbers than needed."""
    return {"page_size": 1, "cache": "tuple_3d"} | options
