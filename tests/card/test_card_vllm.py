"""vLLM's operators on a card, in addition to the table of test_vllm_ops.py: graphs, division of work, refusals."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from vllm_blocks import BlockCase, Blocks

from flashpage import RunError, vllm_ops

pytestmark = pytest.mark.cuda
DEVICE = "cuda:0"
LENS = (1500, 0, 513, 512, 1, 4000, 77)
CASE = BlockCase("shares", LENS, num_heads=8, num_kv_heads=2, head_size=128)


def run(blocks: Blocks, version: int, arguments: list[Any]) -> torch.Tensor:
    out = blocks.out(DEVICE)
    if version == 1:
        vllm_ops.paged_attention_v1(out, *arguments)
    else:
        vllm_ops.paged_attention_v2(out, *partials(blocks), *arguments)
    return out


def partials(blocks: Blocks) -> tuple[torch.Tensor, ...]:
    seqs, heads, size = blocks.query.shape
    shape = (seqs, heads, -(-max(blocks.case.seq_lens) // 512))
    sums = [torch.full(shape, math.nan, device=DEVICE) for _ in range(2)]
    return (*sums, torch.full((*shape, size), math.nan, dtype=blocks.dtype, device=DEVICE))


@pytest.mark.parametrize("version", [1, 2])
def test_captured_calls_follow_lengths(version: int) -> None:
    """One graph, captured for the longest sequence, on lengths and tables that change."""
    longest = Blocks(dataclasses.replace(CASE, seq_lens=(4000,) * 7))
    given = longest.arguments(DEVICE)
    out, rest = longest.out(DEVICE), partials(longest)

    def call() -> None:
        if version == 1:
            vllm_ops.paged_attention_v1(out, *given)
        else:
            vllm_ops.paged_attention_v2(out, *rest, *given)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for lens in (LENS, (1, 2, 3, 0, 0, 70, 900), (0,) * 7, (4000,) * 7, (0, 0, 0, 0, 0, 0, 3999), LENS):
        blocks = Blocks(dataclasses.replace(CASE, seq_lens=lens, name=f"lens-{sum(lens)}"))
        new = blocks.arguments(DEVICE)
        for at, unused in ((1, math.nan), (2, math.nan), (5, 2**30)):  # caches and tables of the captured size
            given[at].fill_(unused)
        for at in (1, 2):
            given[at][: len(new[at])] = new[at]
        given[5][:, : new[5].shape[1]] = new[5]
        given[0].copy_(new[0])
        given[6].copy_(new[6])
        out.fill_(math.nan)
        graph.replay()
        blocks.check(out, slack=1.0 if version == 1 else 1.7)


@pytest.mark.parametrize("version", [1, 2])
def test_same_bits_every_time(version: int) -> None:
    blocks = Blocks(CASE)
    arguments = blocks.arguments(DEVICE)
    first = run(blocks, version, arguments)
    assert all(torch.equal(run(blocks, version, arguments), first) for _ in range(20))


@pytest.mark.parametrize("version", [1, 2])
def test_streams_do_not_meet(version: int) -> None:
    blocks = Blocks(CASE)
    arguments = blocks.arguments(DEVICE)
    expected = run(blocks, version, arguments)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    found = []
    for i in range(30):
        with torch.cuda.stream(streams[i % 3]):
            found.append(run(blocks, version, arguments))
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in found)


def test_other_integers_and_scales() -> None:
    """int64 lengths and tables, tables that are slices, a scale in host memory."""
    blocks = Blocks(dataclasses.replace(CASE, kv_cache_dtype="fp8"))
    arguments = blocks.arguments(DEVICE)
    expected = run(blocks, 1, arguments)
    arguments[6] = arguments[6].long()
    arguments[5] = torch.cat([arguments[5], arguments[5]], 1)[:, : arguments[5].shape[1]]
    assert torch.equal(run(blocks, 1, arguments), expected)
    arguments[5] = arguments[5].long()
    arguments[11] = arguments[11].cpu()
    assert torch.equal(run(blocks, 1, arguments), expected)
    blocks.check(expected)


@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("version", [1, 2])
def test_scales_of_0_and_below(version: int, alibi: bool) -> None:
    """As on the CPU; tokens that are not there stay hidden."""
    blocks = Blocks(dataclasses.replace(CASE, alibi=alibi, name=f"scales-{alibi}"))
    for scale in (0.0, -0.05, 0.1):
        given, on_host = blocks.arguments(DEVICE), blocks.arguments("cpu")
        given[4] = on_host[4] = scale
        expected = blocks.out("cpu")
        vllm_ops.paged_attention_v1(expected, *on_host)
        found = run(blocks, version, given)
        torch.testing.assert_close(found.cpu(), expected, rtol=2e-2, atol=2e-2)


def test_lengths_past_the_table_are_not_read() -> None:
    blocks = Blocks(CASE)
    arguments = blocks.arguments(DEVICE)
    arguments[5] = arguments[5][:, :10].contiguous()
    found = run(blocks, 1, arguments)
    short = Blocks(dataclasses.replace(CASE, seq_lens=tuple(min(n, 160) for n in LENS)))
    arguments[6] = torch.tensor(short.case.seq_lens, dtype=torch.int32, device=DEVICE)
    assert torch.equal(run(blocks, 1, arguments), found) and not bool(found.isnan().any())


def test_caches_in_parts_of_larger_tensors() -> None:
    """Caches with gaps between blocks and heads; a cache whose blocks have gaps inside is refused."""
    blocks = Blocks(CASE)
    arguments = blocks.arguments(DEVICE)
    expected = run(blocks, 1, arguments)
    for at in (1, 2):
        wide = torch.full(
            (len(arguments[at]), 5, *arguments[at].shape[2:]), math.nan, dtype=blocks.dtype, device=DEVICE
        )
        wide[:, 1::2] = arguments[at]
        arguments[at] = wide[:, 1::2]
    assert torch.equal(run(blocks, 1, arguments), expected)
    arguments[2] = arguments[2].transpose(2, 3).contiguous().transpose(2, 3)
    with pytest.raises(RunError, match="a head's part of a block must be contiguous"):
        run(blocks, 1, arguments)


def test_what_v2_takes() -> None:
    blocks = Blocks(CASE)
    exp_sums, max_logits, tmp_out = partials(blocks)
    contiguous = "On a card all three outputs must be contiguous"
    for given, message in (
        ((exp_sums.transpose(0, 1).contiguous().transpose(0, 1), max_logits, tmp_out), contiguous),
        ((exp_sums, max_logits, torch.cat([tmp_out, tmp_out], 2)), contiguous),
        ((exp_sums, max_logits, tmp_out.float()), "tmp_out has .* dtype torch.float32: pass .* torch.bfloat16"),
    ):
        with pytest.raises(RunError, match=message):
            vllm_ops.paged_attention_v2(blocks.out(DEVICE), *given, *blocks.arguments(DEVICE))


def test_opcheck() -> None:
    blocks = Blocks(dataclasses.replace(CASE, seq_lens=(70, 0, 600)))
    arguments = blocks.arguments(DEVICE)
    arguments[1:3] = [t.nan_to_num() for t in arguments[1:3]]
    out, rest = torch.zeros_like(arguments[0]), [t.zero_() for t in partials(blocks)]
    torch.library.opcheck(torch.ops.flashpage.paged_attention_v1.default, (out, *arguments, 0, 0, 0, 64, 0))
    torch.library.opcheck(torch.ops.flashpage.paged_attention_v2.default, (out, *rest, *arguments, 0, 0, 0, 64, 0))
