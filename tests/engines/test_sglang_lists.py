"""flashpage inside SGLang's backend for lists of tokens, without SGLang; tests/support/sglang_lists.py runs with it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from reference import Options, attention

from flashpage.engines.sglang import listed

ROWS, HEADS, TOPK, SCALE = 3, 2, 128, 0.05
RUNS = {
    "flashmla_sparse": listed._flashmla_sparse,
    "flashmla_kv": listed._flashmla_kv,
    "fa3": listed._fa3,
}


def given(name: str, q: torch.Tensor, cache: torch.Tensor, lists: torch.Tensor, counts: Any) -> dict[str, Any]:
    """SGLang's arguments of a method."""
    found: dict[str, Any] = {"kv_cache": cache, "v_head_dim": 512, "sm_scale": SCALE}
    if name == "fa3":
        unused = {"cu_seqlens_q": None, "cu_seqlens_k": None, "max_seqlen_q": 1, "logit_cap": 0.0, "page_size": 1}
        parts = {"q_nope": q[..., :512], "q_rope": q[..., 512:]}
        return found | parts | unused | {"page_table": lists, "cache_seqlens": counts}
    found |= {"q_all": q, "page_table_1": lists}
    if name == "flashmla_sparse":
        return found | {"topk_length": counts}
    return found | {"layer": SimpleNamespace(tp_q_head_num=HEADS, head_dim=q.shape[-1]), "metadata": None}


def refuse(*_: Any, **__: Any) -> str:
    return "SGLang's own"


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("columns", [576, 512])
def test_lists(name: str, columns: int) -> None:
    """Entries after the counts that SGLang gives are not read; with -1 there the counts are not needed."""
    torch.manual_seed(0)
    q, cache = torch.randn(ROWS, HEADS, columns).bfloat16(), torch.randn(200, 1, columns).bfloat16()
    lists = torch.stack([torch.randperm(200)[:TOPK] for _ in range(ROWS)]).int()
    counts = torch.tensor([TOPK, 5, 60], dtype=torch.int32)
    for padded, has_counts in ((lists, name != "flashmla_kv"), (lists.clone(), False)):
        if not has_counts:
            padded.masked_fill_(torch.arange(TOPK) >= counts[:, None], -1)
        arguments = given(name, q, cache, padded, counts if has_counts else None)
        out = RUNS[name](refuse, None, **arguments).reshape(ROWS, HEADS, 512)
        for row, mine, tokens, count in zip(out, q, lists, counts.tolist(), strict=True):
            seen = cache[tokens[:count].long()]
            expected = attention(mine[None], seen, seen[..., :512], Options(SCALE)).out[0]
            assert (row.double() - expected).norm() / expected.norm() < 0.01


def test_a_sink() -> None:
    """Newer versions give one for each head."""
    torch.manual_seed(0)
    q, cache = torch.randn(ROWS, HEADS, 576).bfloat16(), torch.randn(200, 1, 576).bfloat16()
    lists, sinks = torch.arange(ROWS * TOPK, dtype=torch.int32).view(ROWS, TOPK) % 200, torch.tensor([2.0, 5.0])
    arguments = given("flashmla_sparse", q, cache, lists, None) | {"attn_sink": sinks}
    out = listed._flashmla_sparse(refuse, None, **arguments)
    for row, mine, tokens in zip(out, q, lists, strict=True):
        seen = cache[tokens.long()]
        expected = attention(mine[None], seen, seen[..., :512], Options(SCALE, sinks=sinks)).out[0]
        assert (row.double() - expected).norm() / expected.norm() < 0.01


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("flashmla_sparse", {"kv_cache": torch.zeros(200, 1, 528, dtype=torch.uint8)}),  # no rotated columns
        ("flashmla_sparse", {"kv_cache": torch.zeros(200, 1, 576, dtype=torch.float8_e4m3fn)}),
        ("flashmla_sparse", {"kv_cache": torch.zeros(200, 1, 576).half()}),  # another type than q's
        ("flashmla_sparse", {"q_all": torch.zeros(ROWS, HEADS, 576).to(torch.float8_e4m3fn)}),
        ("fa3", {"q_nope": torch.zeros(ROWS, HEADS, 512).half()}),
        ("flashmla_sparse", {"v_head_dim": 256}),
        ("flashmla_kv", {"kv_format": "V32"}),
        ("flashmla_kv", {"of_a_later_version": 1}),
        ("fa3", {"logit_cap": 30.0}),
        ("fa3", {"page_size": 64}),
    ],
)
def test_what_stays_sglangs(name: str, changes: dict[str, Any]) -> None:
    lists = torch.zeros(ROWS, TOPK, dtype=torch.int32)
    arguments = given(name, torch.zeros(ROWS, HEADS, 576).bfloat16(), torch.zeros(200, 1, 576).bfloat16(), lists, None)
    assert RUNS[name](refuse, None, **arguments | changes) == "SGLang's own"
