"""How many calls take plans and runs over latent rows whose options are known: a plan at most eight Python frames of
the package and one foreign call, a run six frames and one foreign call, or two if tensors are joined or left out."""

from __future__ import annotations

import functools

import pytest
import torch
from counted_calls import check, count, indptr, lengths, workspace

import flashpage
from flashpage.errors import RunError

MOST_PLAN_FRAMES = 8
FP32 = {"q_data_type": torch.float32}
LATENT = {"num_heads": 4, "head_dim_ckv": 64, "head_dim_kpe": 16, "page_size": 16, "sm_scale": 0.1} | FP32


def test_latent_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """q and the cache are one tensor each, or two side by side; a query in two places is copied."""
    q, cache = torch.randn(2, 4, 80), torch.randn(8, 16, 80)
    kv, pages, _ = lengths([40, 5])
    wrapper = flashpage.BatchMLAPagedAttentionWrapper(workspace())
    batch = flashpage.MLAPlanMetadata.csr(indptr([1, 1]), kv, pages, torch.tensor([40, 5]))
    wrapper.plan(metadata=batch, **LATENT)
    check(
        lambda: wrapper.plan(metadata=batch._replace(kv_len_arr=torch.tensor([41, 6])), **LATENT),
        lambda: wrapper.plan(metadata=batch, **LATENT),
        monkeypatch,
        MOST_PLAN_FRAMES,
    )
    (q_nope, q_pe), (ckv, kpe) = (side.split([64, 16], -1) for side in (q, cache))
    expected = wrapper.run(q_nope, q_pe, ckv, kpe)
    for given in (
        {"q_nope": q_nope, "q_pe": q_pe, "ckv_cache": ckv, "kpe_cache": kpe},
        {"query": q, "kv_cache": cache},
        {"query": [q_nope, q_pe], "kv_cache": cache},
        {"query": q, "ckv_cache": ckv, "kpe_cache": kpe},
    ):
        wrapper.run(**given)
        frames, foreign = count(lambda given=given: wrapper.run(**given), monkeypatch)
        assert foreign == ["fp_py_run"] and len(frames) <= 6, frames
        torch.testing.assert_close(wrapper.run(**given), expected)
    for tail in (q_pe.clone(), torch.zeros_like(q)[..., 64:]):  # in a place of its own: joined, and compared again
        wrapper.run(q_nope, tail, ckv, kpe)
        frames, foreign = count(lambda tail=tail: wrapper.run(q_nope, tail, ckv, kpe), monkeypatch)
        assert foreign == ["fp_py_run"] * 2, frames
        assert torch.equal(wrapper.run(q_nope, tail, ckv, kpe), expected) is bool(tail.any())
        torch.testing.assert_close(wrapper.run(q_nope, q_pe, ckv, kpe), expected)


def test_latent_runs_without_a_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty tensors of the columns that there are not cost a second comparison."""
    q, cache, none = torch.randn(2, 4, 64), torch.randn(8, 16, 64), torch.empty(0)
    kv, pages, _ = lengths([40, 5])
    wrapper = flashpage.BatchMLAPagedAttentionWrapper(workspace())
    batch = flashpage.MLAPlanMetadata.csr(indptr([1, 1]), kv, pages, torch.tensor([40, 5]))
    wrapper.plan(metadata=batch, **(LATENT | {"head_dim_kpe": 0}))
    given = (q, none.view(2, 4, 0), cache, none.view(8, 16, 0))
    expected = wrapper.run(query=q, kv_cache=cache)
    wrapper.run(*given)
    frames, foreign = count(lambda: wrapper.run(*given), monkeypatch)
    assert foreign == ["fp_py_run"] * 2, frames
    torch.testing.assert_close(wrapper.run(*given), expected)


def test_sparse_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists of tokens, which may differ from layer to layer."""
    q, cache = torch.randn(2, 4, 80), torch.randn(8, 16, 80)
    wrapper = flashpage.BatchMLASparseAttentionWrapper(workspace())
    lists = torch.tensor([[3, 9, 100, -1], [0, 127, -1, 5]], dtype=torch.int32)
    wrapper.plan(lists, **LATENT)
    results = []
    for indices in (lists, lists.flip(0).contiguous(), lists):
        wrapper.run(query=q, kv_cache=cache, indices=indices)
        run = functools.partial(wrapper.run, query=q, kv_cache=cache, indices=indices)
        assert count(run, monkeypatch)[1] == ["fp_py_run"]
        results.append(run())
    torch.testing.assert_close(results[0], results[2])
    assert not torch.allclose(results[0], results[1])


def test_refused_runs_after_good_ones() -> None:
    """A run is refused for its own arguments, whatever ran before."""
    kv, pages, last = lengths([40, 5])
    decode = flashpage.BatchDecodeWithPagedKVCacheWrapper(workspace())
    decode.plan(kv, pages, last, 4, 2, 64, 16, **FP32)
    q, cache = torch.randn(2, 4, 64), torch.randn(8, 2, 16, 2, 64)
    latent = flashpage.BatchMLAPagedAttentionWrapper(workspace())
    batch = flashpage.MLAPlanMetadata.csr(indptr([1, 1]), kv, pages, torch.tensor([40, 5]))
    latent.plan(metadata=batch, **LATENT)
    rows, tokens = torch.randn(2, 4, 80), torch.randn(8, 16, 80)
    for good in (False, True, True):
        for given in ((q,), (), (q, None), (q, q), (q, None, 1)):
            with pytest.raises(RunError, match="^q=.*not a tensor"):
                decode.run(given, cache)
        for wrong, says in (
            ({"q_nope": rows, "kv_cache": tokens}, "^q_pe=None"),
            ({"query": rows, "ckv_cache": tokens}, "^kpe_cache=None"),
            ({"query": (rows, None), "kv_cache": tokens}, "^query has None"),
            ({"query": rows, "kv_cache": (tokens, None)}, "^kv_cache has None"),
            ({"query": rows, "kv_cache": 5}, "^kv_cache=5"),
        ):
            with pytest.raises(RunError, match=says):
                latent.run(**wrong)
        if good:
            decode.run(q, cache)
            latent.run(query=rows, kv_cache=tokens)
