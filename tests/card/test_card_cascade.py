"""Cascade attention on a card: captured once and replayed for later plans; chains of dependent launches."""

from __future__ import annotations

import math

import pytest
import torch
from cascade_batch import GRAPH_CASES, CascadeBatch, buffers_for, graph_batches, planned, wrapper_for

pytestmark = pytest.mark.cuda
DEVICE = "cuda:0"


@pytest.mark.parametrize("name", GRAPH_CASES)
def test_a_capture_serves_later_plans(name: str) -> None:
    batches = graph_batches(**GRAPH_CASES[name])
    wrapper = wrapper_for(batches[0], DEVICE, use_cuda_graph=True, **buffers_for(batches, DEVICE))
    for batch in batches:
        batch.hide_pages()  # not even a replay reads them
    caches = [batch.cache.argument(DEVICE) for batch in batches]
    cache = torch.full_like(max(caches, key=len), math.nan)
    q = batches[0].q.to(DEVICE)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], device=DEVICE)

    def load(i: int) -> None:
        cache.fill_(math.nan)
        cache[: len(caches[i])] = caches[i]
        q[: batches[i].rows] = batches[i].q.to(DEVICE)
        out.fill_(math.nan)
        lse.fill_(math.nan)

    def plan(batch: CascadeBatch) -> None:
        wrapper.plan(*batch.arrays(DEVICE), *batch.sizes(), **batch.options())

    load(0)
    plan(batches[0])
    wrapper.run(q, cache, out=out, lse=lse)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        wrapper.run(q, cache, out=out, lse=lse)
    for i in (*range(len(batches)), 0):
        load(i)
        plan(batches[i])
        graph.replay()
        rows = batches[i].rows
        batches[i].check(out[:rows], lse[:rows])


def test_layers_follow_each_other() -> None:
    """Each layer's queries are the last layer's output, which the merge writes."""
    batch = graph_batches()[0]
    wrapper, cache = planned(batch, DEVICE), batch.cache.argument(DEVICE)

    def layers(wait: bool) -> torch.Tensor:
        x = batch.q.to(DEVICE)
        for _ in range(20):
            x = wrapper.run(x, cache)
            if wait:
                torch.cuda.synchronize()
        return x

    expected = layers(wait=True)
    for _ in range(20):
        assert torch.equal(layers(wait=False), expected)
