"""Plans of engines whose results must not depend on the rest of the batch: their memory, and their bits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_step import Form, Scene, close

from flashpage import jit, native
from flashpage.engines.plugin import group_plans
from flashpage.engines.plugin.expanded_rows import OWN_TOKENS, ExpandedRows, ExpandedTensors
from flashpage.engines.plugin.group_plans import SPLIT_TOKENS, GroupPlans, GroupSizes, Workspaces
from flashpage.engines.plugin.layers import LayerOptions
from flashpage.kernels import devices
from flashpage.plan.lengths import starts_of

DIMS = 192, 128


class NotedSizes(Workspaces):
    """Allocates nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []

    def at_least(self, size: int, device: torch.device) -> torch.Tensor:
        self.asked.append(size)
        return torch.empty(0)


@pytest.mark.parametrize(("heads", "tokens", "most"), [((32, 8), 8192, 1.0), ((40, 8), 131_072, 6.0)], ids=str)
def test_no_workspace_for_one_request_with_all_tokens(
    heads: tuple[int, int], tokens: int, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request has the tokens of one alone: GiB, for steps of 256 requests and 8192 rows on a card."""
    monkeypatch.setattr(devices, "of", lambda _: devices.H200)
    info = native.KernelInfo(num_sms=132, ctas_per_sm=1)
    monkeypatch.setattr(jit, "get_kernel", lambda spec, device=None: SimpleNamespace(spec=spec, info=info, handle=0))
    memory = NotedSizes()
    types = 16, torch.bfloat16, torch.bfloat16
    sizes = GroupSizes(*types, max_requests=256, max_rows=8192, max_tokens=tokens, split_tokens=SPLIT_TOKENS)
    plans = GroupPlans([LayerOptions((*heads, 128), 0.1)], sizes, torch.device("cuda:0"), memory)
    assert plans._workspace is not None
    assert 0.1 < memory.asked[0] / 2**30 < most


@pytest.mark.parametrize("changes", [{}, {"graph_requests": 3}, {"graph_rows": 24, "captures_all": True}], ids=str)
@pytest.mark.parametrize("less", [0, 1, 15])
def test_the_workspace_suffices(
    changes: dict[str, Any], less: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables have room for whole pages, so that a request may seem longer than the longest one."""
    monkeypatch.setitem(group_plans._LEAST_WORKSPACE, torch.device(device).type, 1)
    scene = Scene(Form(), [1, 1, 1] if "graph_requests" in changes else [1, 20, 3], [96, 61, 33], device)
    tokens = scene.sizes().max_tokens - less
    largest = {"max_requests": 3, "max_rows": scene.rows, "max_tokens": tokens}
    planner = scene.planner(split_tokens=16, has_exact_lengths=False, **largest, **changes)
    tensors = scene.tensors()
    for part in planner.plan(scene.common()).parts:
        part.run(planner.plans.layers[0], tensors)
    close(tensors.output[: scene.rows], scene.expected())


@pytest.mark.parametrize("has_graphs", [False, True])
def test_a_step_without_rows(has_graphs: bool) -> None:
    """Without graphs no plan is made for captured steps, whose capacity would be 0."""
    scene = Scene(Form(), [1], [5], "cpu")
    planner = scene.planner(few_rows=3, **({"graph_rows": 24} if has_graphs else {}))
    common = scene.common()
    common.num_reqs = common.num_actual_tokens = common.max_query_len = 0
    common.query_start_loc = common.query_start_loc_cpu = common.query_start_loc_cpu[:1]
    common.seq_lens, common.block_table_tensor = common.seq_lens[:0], common.block_table_tensor[:0]
    assert [part.end for part in planner.plan(common).parts] == [0]


class Prompts:
    """Rows over expanded keys and values in one dtype that shows each changed bit."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        dims = (DIMS[0], DIMS[0], DIMS[1])
        self.q, self.k, self.v = (torch.randn(30_000, 1, d, dtype=dtype, device=device) for d in dims)

    def run(self, rows: list[int], tokens: list[int], chunk: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and LSE of the first request."""
        expanded = ExpandedRows(Workspaces(), "a test's", is_batch_invariant=True)
        starts = starts_of(torch.tensor(rows)), starts_of(torch.tensor(tokens))
        tensors = ExpandedTensors(self.q[: sum(rows)], self.k[: sum(tokens)], self.v[: sum(tokens)])
        expanded.begin()
        out, lse = expanded.run(chunk, starts, tensors, 0.07, True)
        assert lse is not None
        return out[: rows[0]], lse[: rows[0]]


@pytest.mark.parametrize(
    ("own", "other"),
    [((4, 20_000), (40, 9000)), ((40, 20_000), (40, 9000)), ((16, 12_000), (1, 17_000))],
    ids=str,
)
def test_a_chunk_of_a_prompt(own: tuple[int, int], other: tuple[int, int], device: str) -> None:
    """A chunk has the same bits alone and next to another request."""
    prompts = Prompts(device)
    alone, beside = prompts.run([own[0]], [own[1]]), prompts.run([own[0], other[0]], [own[1], other[1]])
    assert all(map(torch.equal, alone, beside))


@pytest.mark.parametrize("rows", [3, 700])
def test_own_tokens_of_a_prompt(rows: int, device: str) -> None:
    prompts, each = Prompts(device), [rows, 2000, 1]
    alone, beside = prompts.run([rows], [rows], OWN_TOKENS), prompts.run(each, each, OWN_TOKENS)
    assert all(map(torch.equal, alone, beside))
