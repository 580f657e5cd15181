"""Decode context parallelism under vLLM: two ranks as threads of this process, with collectives of the same form."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from vllm_step import Common, Form, Scene, close, run

from flashpage.engines.vllm.plugin.context_parallel import ContextRows, Ranks
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


@pytest.mark.parametrize("interleave", [1, 4])
@pytest.mark.parametrize("q_lens", [[1, 1, 1], [1, 20, 3]])
def test_context_parallel(interleave: int, q_lens: list[int], device: str) -> None:
    """Two ranks with half of the query heads and some of the tokens each."""
    kv_lens, both = [70, 20, 49], Form(heads=(8, 1, 64), soft_cap=4.0)
    scene, meeting, results = Scene(both, q_lens, kv_lens, device), Meeting(), [None, None]
    form = Form(heads=(4, 1, 64), soft_cap=4.0)

    def of_rank(rank: int) -> None:
        own = Scene(form, q_lens, kv_lens, device)
        own.q = scene.q[:, rank * 4 : rank * 4 + 4].contiguous()
        own.kv = scene.kv
        ranks = meeting.ranks(rank, interleave, 4)
        # The cache holds this rank's tokens of each request one after the other.
        mine = [(torch.arange(n) // interleave % 2 == rank).nonzero()[:, 0] for n in kv_lens]
        local = Scene(form, q_lens, [max(len(at), m) for at, m in zip(mine, q_lens, strict=True)], device)
        for kv, all_kv, at in zip(local.kv, scene.kv, mine, strict=True):
            kv[:, : len(at)] = all_kv[:, at]
        local.cache = local._written()
        planner = GroupPlanner(local.plans(), ranks)
        common: Common = own.common()
        common.block_table_tensor = local.table.to(device)
        step = planner.plan(common)
        assert isinstance(step.parts[0], ContextRows)
        tensors = own.tensors()._replace(cache=local.tensors().cache)
        results[rank] = run(step, planner.plans.layers[0], tensors).clone()

    threads = [threading.Thread(target=of_rank, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    close(torch.cat(results, dim=1), scene.expected())


def test_local_lengths() -> None:
    """Each token is on one rank."""
    lens = torch.tensor([0, 1, 2, 3, 7, 8, 9, 100])
    for size in (2, 3):
        for stripe in (1, 4):
            found = [Ranks(size, rank, stripe, lambda q: q, lambda o, s: (o, s)) for rank in range(size)]
            for rank, ranks in enumerate(found):
                owners = [int((torch.arange(n) // stripe % size == rank).sum()) for n in lens]
                assert ranks.local_lengths(lens).tolist() == owners
