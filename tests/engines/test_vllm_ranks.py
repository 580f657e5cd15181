"""Decode context parallelism under vLLM: two ranks as threads of this process, with collectives of the same form. And
the variables that vLLM copies to Ray's workers."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from vllm_step import Common, Form, Scene, close, run

from flashpage.engines.plugin.parts import LayerTensors, RaggedRows
from flashpage.engines.vllm import plugin
from flashpage.engines.vllm.plugin.context_parallel import ContextRows, OwnPages, Ranks
from flashpage.engines.vllm.plugin.planner import GroupPlanner


class Meeting:
    """Collectives of two ranks that are threads of this process."""

    def __init__(self) -> None:
        self.barrier, self.given = threading.Barrier(2), [None, None]

    def exchange(self, rank: int, given: Any) -> list[Any]:
        self.given[rank] = given
        self.barrier.wait(30)
        found = list(self.given)
        self.barrier.wait(30)
        return found

    def ranks(self, rank: int, interleave: int, heads: int) -> Ranks:
        def gather(q: torch.Tensor) -> torch.Tensor:
            return torch.cat(self.exchange(rank, q), dim=1)

        def combine(out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            outs, lses = (torch.stack(part) for part in zip(*self.exchange(rank, (out, lse)), strict=True))
            total = torch.logsumexp(lses * 0.6931471805599453, 0) / 0.6931471805599453
            weights = torch.where(lses > -torch.inf, torch.exp2(lses - total), torch.zeros_like(lses))
            own = slice(rank * heads, (rank + 1) * heads)
            return (outs.float() * weights.unsqueeze(-1)).sum(0)[:, own].to(out.dtype).contiguous(), total[:, own]

        return Ranks(2, rank, interleave, gather, combine)


WAYS = {  # rows of each request, sizes, what attends to the step's own tokens
    "decode": ([1, 1, 1], {}, None),
    "decode in a graph": ([1, 1, 1], {"graph_requests": 8}, None),
    "any rows": ([1, 20, 3], {}, RaggedRows),
    "drafts in a graph": ([1, 3, 3], {"graph_rows": 64, "few_rows": 3}, OwnPages),
    "one row, where drafts are captured": ([1, 1, 1], {"graph_rows": 64, "few_rows": 3}, OwnPages),
    "too many rows for the graph": ([1, 20, 3], {"graph_rows": 64, "few_rows": 3}, RaggedRows),
}


class TwoRanks:
    """Two ranks with half of the query heads and some of the tokens each."""

    def __init__(
        self, q_lens: list[int], interleave: int, device: str, kv_lens: tuple[int, ...] = (70, 20, 49)
    ) -> None:
        self.q_lens, self.kv_lens, self.device, self.interleave = q_lens, list(kv_lens), device, interleave
        self.scene = Scene(Form(heads=(8, 1, 64), soft_cap=4.0, sinks=True), q_lens, self.kv_lens, device)

    def of(self, rank: int, ranks: Ranks, sizes: dict[str, Any]) -> tuple[GroupPlanner, Common, LayerTensors]:
        """A rank's planner, step and tensors; the cache holds its tokens of each request one after the other."""
        scene, heads = self.scene, slice(rank * 4, rank * 4 + 4)
        form = Form(heads=(4, 1, 64), soft_cap=4.0, sinks=True)
        own = Scene(form, self.q_lens, self.kv_lens, self.device)
        own.q, own.kv, own.sinks = scene.q[:, heads].contiguous(), scene.kv, scene.sinks[heads]
        mine = [(torch.arange(n) // self.interleave % 2 == rank).nonzero()[:, 0] for n in self.kv_lens]
        lens = [max(len(at), m) for at, m in zip(mine, self.q_lens, strict=True)]
        local = Scene(form, self.q_lens, lens, self.device)
        for kv, all_kv, at in zip(local.kv, scene.kv, mine, strict=True):
            kv[:, : len(at)] = all_kv[:, at]
        local.cache = local._written()
        common = own.common()
        common.block_table_tensor = local.table.to(self.device)
        return GroupPlanner(local.plans(**sizes), ranks), common, own.tensors()._replace(cache=local.tensors().cache)


@pytest.mark.parametrize("interleave", [1, 4])
@pytest.mark.parametrize("name", WAYS)
def test_context_parallel(name: str, interleave: int, device: str) -> None:
    """The second step is planned from the lengths that are on the device then, if anything can plan it again."""
    q_lens, sizes, own_type = WAYS[name]
    both, meeting, results = TwoRanks(q_lens, interleave, device), Meeting(), [None, None]

    def of_rank(rank: int) -> None:
        planner, common, tensors = both.of(rank, meeting.ranks(rank, interleave, 4), sizes)
        lens = common.seq_lens.clone()
        if own_type is not RaggedRows:
            common.seq_lens.copy_(common.query_start_loc.diff())
        step = planner.plan(common)
        (part,) = step.parts
        assert isinstance(part, ContextRows) and isinstance(part.own, own_type or type(None))
        common.seq_lens.copy_(lens)
        if own_type is not RaggedRows:
            step.plan_again()
        results[rank] = run(step, planner.plans.layers[0], tensors).clone()

    in_threads(of_rank)
    close(torch.cat(results, dim=1), both.scene.expected())


def in_threads(of_rank: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=of_rank, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["decode in a graph", "drafts in a graph"])
def test_replays_of_ranks(name: str) -> None:
    """Captured for the shortest requests, planned outside of the graph and replayed for longer ones. The collectives of
    a capture know the other rank's part already, as no thread can wait in one."""
    q_lens, sizes, _ = WAYS[name]
    both, meeting = TwoRanks(q_lens, 4, "cuda:0"), Meeting()
    queries, parts, results = [None, None], [None, None], [None, None]

    def eager(rank: int) -> None:
        ranks = meeting.ranks(rank, 4, 4)

        def combine(out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            parts[rank] = out.clone(), lse.clone()
            return ranks.combine(out, lse)

        def gather(q: torch.Tensor) -> torch.Tensor:
            queries[rank] = ranks.gather(q)
            return queries[rank]

        own = dataclasses.replace(ranks, gather=gather, combine=combine)
        planner, common, tensors = both.of(rank, own, sizes)
        results[rank] = run(planner.plan(common), planner.plans.layers[0], tensors).clone()

    in_threads(eager)
    close(torch.cat(results, dim=1), both.scene.expected())
    for rank in range(2):
        other_out, other_lse = parts[1 - rank]

        def combine(out: torch.Tensor, lse: torch.Tensor, rank: int = rank, other: Any = (other_out, other_lse)) -> Any:
            total = torch.logaddexp2(lse, other[1])
            found = out * torch.exp2(lse - total)[..., None] + other[0] * torch.exp2(other[1] - total)[..., None]
            own = slice(rank * 4, rank * 4 + 4)
            return found[:, own].to(out.dtype).contiguous(), total[:, own]

        ranks = Ranks(2, rank, 4, lambda q, rank=rank: queries[rank], combine)
        planner, common, tensors = both.of(rank, ranks, sizes)
        lens, layer = common.seq_lens.clone(), planner.plans.layers[0]
        common.seq_lens.copy_(common.query_start_loc.diff())
        step = planner.plan(common)
        run(step, layer, tensors)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for part in step.parts:
                part.run(layer, tensors)
        common.seq_lens.copy_(lens)
        planner.plan(common)
        graph.replay()
        close(tensors.output[: both.scene.rows], both.scene.expected()[:, rank * 4 : rank * 4 + 4])


def test_local_lengths() -> None:
    """Each token is on one rank."""
    lens = torch.tensor([0, 1, 2, 3, 7, 8, 9, 100])
    for size in (2, 3):
        for stripe in (1, 4):
            found = [Ranks(size, rank, stripe, lambda q: q, lambda o, s: (o, s)) for rank in range(size)]
            for rank, ranks in enumerate(found):
                owners = [int((torch.arange(n) // stripe % size == rank).sum()) for n in lens]
                assert ranks.local_lengths(lens).tolist() == owners


@pytest.mark.parametrize("given", ["", "FLASHPAGE_", " MY_, FLASHPAGE_ ,YOUR_", "MY_"])
def test_ray_copies_our_variables(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other prefixes stay, and a process that registers twice, or inherits the variable, does not change it."""
    name = "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"
    monkeypatch.setenv(name, given)
    for _ in range(2):
        plugin._let_ray_copy_variables()
        found = os.environ[name].split(",")
        others = {prefix.strip() for prefix in given.split(",")} - {"", "FLASHPAGE_"}
        assert found.count("FLASHPAGE_") == 1 and set(found) - {"FLASHPAGE_"} == others
