"""One rank of test_parallel_ranks.py, as a process: `parallel_rank.py RANK WORLD FOLDER DEVICE`."""

from __future__ import annotations

import datetime
import math
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from parallel_batch import CASES, WORKSPACE_BYTES, ParallelBatch, ParallelCase

import flashpage
from flashpage import FlashpageError, parallel

TIMEOUT = datetime.timedelta(seconds=60)
GROWN = ParallelCase("grown", kv_lens=(40, 3, 0))
NEW_TOKENS = 20  # of each request, one in each step


def workspace(device: str) -> torch.Tensor:
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def run_case(case: ParallelCase, world: int, group: Any, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs twice, with allocated outputs and with given ones, which must be equal."""
    batch = ParallelBatch(case, case.world(world))
    wrapper = parallel.ContextParallelAttention(
        workspace(device),
        case.kv_layout,
        group,
        order=case.order,
        interleave=case.interleave,
        pages=case.pages,
        heads=case.heads,
    )
    rows = {"qo_indptr": batch.q_indptr} if case.q_lens else {}
    kv_indptr, kv_indices = batch.pages(wrapper.rank)
    wrapper.plan(kv_indptr, kv_indices.to(device), batch.seq_lens, *batch.sizes(), **rows, **batch.options())
    q, cache = batch.q.to(device), batch.caches[wrapper.rank].argument(device)
    sinks = None if batch.sinks is None else batch.sinks.to(device)
    out, lse = wrapper.run(q, cache, sinks=sinks, return_lse=True)
    given = torch.full_like(out, torch.nan), torch.full_like(lse, torch.nan)
    assert wrapper.run(q, cache, sinks=sinks, out=given[0], lse=given[1]) is given[0]
    assert torch.equal(given[0], out) and torch.equal(given[1], lse)
    return out, lse


def grow(device: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Decode steps: each rank appends its share of the new tokens to its own pages."""
    tokens = grown_tokens()
    size, num_kv_heads, dim = GROWN.page_size, GROWN.num_kv_heads, GROWN.head_dim
    batch, most = len(GROWN.kv_lens), -(-max(len(k) for _, k, _ in tokens) // size)
    cache = torch.full((batch * most, 2, size, num_kv_heads, dim), torch.nan, dtype=torch.bfloat16, device=device)
    table = torch.arange(batch * most, dtype=torch.int32).reshape(batch, most)
    wrapper = parallel.ContextParallelAttention(workspace(device), pages="own")
    layout, steps = wrapper.layout(size), []

    def append(begin: torch.Tensor, end: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends tokens [begin, end) of each request; returns this rank's pages."""
        request = torch.repeat_interleave(torch.arange(batch), end - begin)
        position = torch.cat([torch.arange(int(b), int(e)) for b, e in zip(begin, end, strict=True)])
        here = layout.is_local(position, end[request])
        request, position = request[here], position[here]
        counts = (layout.tokens(end) + size - 1) // size
        indptr = torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)]).int()
        indices = torch.cat([table[i, :n] for i, n in enumerate(counts.tolist())])
        last = ((layout.tokens(end) - 1) % size + 1).int()
        k, v = (
            torch.stack([tokens[r][part][p] for r, p in zip(request.tolist(), position.tolist(), strict=True)])
            if len(request)
            else torch.empty((0, num_kv_heads, dim), dtype=torch.bfloat16)
            for part in (1, 2)
        )
        places = layout.tokens_before(position, end[request]).int()
        lists = (part.to(device) for part in (k, v, request.int(), places))
        flashpage.append_paged_kv_cache(*lists, cache, *(part.to(device) for part in (indices, indptr, last)))
        return indptr, indices.to(device)

    lens = torch.tensor(GROWN.kv_lens)
    append(torch.zeros_like(lens), lens)
    for step in range(NEW_TOKENS):
        pages = append(lens, lens + 1)
        lens = lens + 1
        q = torch.stack([q[step] for q, _, _ in tokens]).to(device)
        wrapper.plan(*pages, lens, GROWN.num_q_heads, num_kv_heads, dim, size, q_data_type=torch.bfloat16)
        steps.append(wrapper.run(q, cache, return_lse=True))
    return steps


def grown_tokens() -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """For each request, q of its new tokens, and K and V of all tokens."""
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    heads = (GROWN.num_q_heads, GROWN.num_kv_heads, GROWN.num_kv_heads)
    return [
        tuple(random(n, h, GROWN.head_dim) for n, h in zip((NEW_TOKENS, end, end), heads, strict=True))
        for end in (n + NEW_TOKENS for n in GROWN.kv_lens)
    ]


def states_of(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """States of rows without tokens on some ranks and on all ranks, in sizes that are no multiple of a vector."""
    generator = torch.Generator().manual_seed(rank)
    out = torch.randn(5, 4, 24, generator=generator).half()
    lse = 4 * torch.randn(5, 4, generator=generator)
    lse[rank % 5], lse[4] = -torch.inf, -torch.inf
    out[lse.isinf()] = 0
    return out, lse


def edges(device: str) -> dict[str, Any]:
    """No rows, rows of no request, and sinks that are refused."""
    found: dict[str, Any] = {}
    cache = torch.randn(2, 2, 4, 4, 16, device=device).half()
    for heads in ("all", "own"):
        wrapper = parallel.ContextParallelAttention(workspace(device), heads=heads)
        for name, first, rows in (("empty", 0, 0), ("unused", 2, 4)):
            lists = torch.tensor([0, 2]).int(), torch.tensor([0, 1]).int().to(device), torch.tensor([7])
            q_indptr = torch.tensor([first, rows]).int()
            wrapper.plan(*lists, 4, 4, 16, 4, qo_indptr=q_indptr, q_data_type=torch.float16)
            q = torch.ones(rows, 4, 16, device=device).half()
            found[f"{name}-{heads}"] = wrapper.run(q, cache, return_lse=True)
        try:
            wrapper.run(q, cache, sinks=torch.ones(4, device=device).double())
        except FlashpageError as error:
            found[f"sinks-{heads}"] = str(error)
    return found


def _on_host(found: Any) -> Any:
    if isinstance(found, (list, tuple)):
        return type(found)(_on_host(part) for part in found)
    return found.cpu() if isinstance(found, torch.Tensor) else found


def main(rank: int, world: int, folder: Path, kind: str) -> None:
    torch.set_num_threads(1)
    device = kind if kind == "cpu" else f"{kind}:{rank}"
    if kind == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("gloo" if kind == "cpu" else "nccl", f"file://{folder}/store", TIMEOUT, world, rank)
    pairs = [dist.new_group([first, first + 1], TIMEOUT) for first in range(0, world, 2)]
    mine = pairs[rank // 2]
    found: dict[str, Any] = {"grown": grow(device)}
    with torch.no_grad():
        for case in CASES:
            if case.runs_on(kind):
                found[case.name] = run_case(case, world, mine if case.group else None, device)
        for heads in ("all", "own"):
            found[f"states-{heads}"] = parallel.merge_over_group(
                *(part.to(device) for part in states_of(rank)), heads=heads
            )
        out, lse = (part.to(device) for part in states_of(rank))
        found["states-basee"] = parallel.merge_over_group(out, lse * math.log(2), lse_mode="basee")
        found |= edges(device)
    if world > 2:
        try:
            parallel.merge_over_group(*states_of(rank), pairs[1 - rank // 2])
        except FlashpageError as error:
            found["foreign group"] = str(error)
    found = {name: _on_host(value) for name, value in found.items()}
    torch.save(found, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
