"""`lse_mode`: LSEs in base 2 or as natural logarithms, from everything that returns or merges them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashpage
from flashpage import RunError

pytestmark = pytest.mark.usefixtures("quick_kernels")

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 64, 16
LATENT = {"num_heads": HEADS, "head_dim_ckv": 64, "head_dim_kpe": 32, "page_size": PAGE, "sm_scale": 0.1}
Calls = dict[str, Callable[..., Any]]  # each takes lse_mode and returns an output and an LSE


def data(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def workspace() -> torch.Tensor:
    return torch.empty(1 << 20, dtype=torch.uint8)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@functools.cache
def calls() -> Calls:
    """Every way to an LSE, planned: NAMES."""
    f32: dict[str, Any] = {"q_data_type": torch.float32}
    heads = (HEADS, KV_HEADS, DIM, PAGE)
    pages, cache = (ints(0, 2, 3), ints(5, 2, 7), ints(3, 16)), data(8, 2, PAGE, KV_HEADS, DIM)
    k, v, q = data(32, KV_HEADS, DIM), data(32, KV_HEADS, DIM), data(5, HEADS, DIM)
    found: Calls = {}
    decode = flashpage.BatchDecodeWithPagedKVCacheWrapper(workspace())
    decode.plan(*pages, *heads, **f32)
    found["decode"] = lambda **mode: decode.run(q[:2], cache, return_lse=True, **mode)
    found["decode.run_return_lse"] = lambda **mode: decode.run_return_lse(q[:2], cache, **mode)
    found["decode.forward"] = lambda **mode: decode.forward(q[:2], cache, return_lse=True, **mode)
    found["decode.forward_return_lse"] = lambda **mode: decode.forward_return_lse(q[:2], cache, **mode)
    paged = flashpage.BatchPrefillWithPagedKVCacheWrapper(workspace())
    paged.plan(ints(0, 2, 5), *pages, *heads, **f32)
    found["paged"] = lambda **mode: paged.run(q, cache, return_lse=True, **mode)
    found["paged.forward"] = lambda **mode: paged.forward(q, cache, return_lse=True, **mode)
    ragged = flashpage.BatchPrefillWithRaggedKVCacheWrapper(workspace())
    ragged.plan(ints(0, 2, 5), ints(0, 20, 30), *heads[:3], **f32)
    found["ragged"] = lambda **mode: ragged.run(q, k[:30], v[:30], return_lse=True, **mode)
    found["ragged.forward_return_lse"] = lambda **mode: ragged.forward_return_lse(q, k[:30], v[:30], **mode)
    told = {"q_data_type": torch.float32, "kv_data_type": torch.float32, "head_dim_qk": DIM, "head_dim_vo": DIM}
    sink = flashpage.BatchAttentionWithAttentionSinkWrapper(workspace(), **told)
    sink.plan(ints(0, 2, 5), *pages, *heads, **f32)
    found["sink"] = lambda **mode: sink.run(q, cache, data(HEADS), return_lse=True, **mode)
    both = flashpage.BatchAttention("NHD", "cpu")
    types = {"q_data_type": torch.float32, "kv_data_type": torch.float32}
    both.plan(ints(0, 2, 5), *pages[:2], ints(19, 16), HEADS, KV_HEADS, DIM, DIM, PAGE, **types)
    found["mixed"] = lambda **mode: both.run(q, cache, **mode)
    for levels in (1, 2):
        cascade = flashpage.MultiLevelCascadeAttentionWrapper(levels, workspace())
        rows = [ints(0, 5), ints(0, 2, 5)][-levels:]
        shared = [(ints(0, 1), ints(1), ints(16)), pages][-levels:]
        cascade.plan(rows, *map(list, zip(*shared, strict=True)), *heads, **f32)
        found[f"cascade-{levels}"] = lambda cascade=cascade, **mode: cascade.run(q, cache, return_lse=True, **mode)
    pod = flashpage.BatchPODWithPagedKVCacheWrapper(workspace())
    pod.plan(ints(0, 2, 5), *pages, ints(0, 1, 2), *pages, *heads, **f32)
    for i, name in enumerate(("prefill", "decode")):
        found[f"pod-{name}"] = lambda i=i, **mode: pod.run(q, cache, q[:2], cache, return_lse=True, **mode)[i]
    blocks = flashpage.BlockSparseAttentionWrapper(workspace())
    blocks.plan(ints(0, 1, 2), ints(0, 1), 4, 32, 2, 16, HEADS, KV_HEADS, DIM, **f32)
    found["sparse"] = lambda **mode: blocks.run(q[:4], k, v, return_lse=True, **mode)
    variable = flashpage.VariableBlockSparseAttentionWrapper(workspace())
    shown = torch.ones(KV_HEADS, 2, 2, dtype=torch.bool)
    sizes = torch.tensor([[2, 3]] * KV_HEADS), torch.tensor([[10, 22]] * KV_HEADS)
    variable.plan(shown, *sizes, HEADS, KV_HEADS, DIM, **f32)
    by_head = [t.transpose(0, 1).contiguous() for t in (q, k, v)]
    found["variable"] = lambda **mode: variable.run(*by_head, return_lse=True, **mode)
    tables = cache.transpose(2, 3), None, ints(5, 2, 7, 0).view(2, 2), ints(19, 16)  # the fourth page is no token's
    by_tables = functools.partial(flashpage.decode.trtllm_batch_decode_with_kv_cache, q[:2], *tables, 32)
    found["tables, decode"] = lambda **mode: by_tables(return_lse=True, **mode)
    sizes_of_context = 3, 19, DIM**-0.5, 1.0, 2, ints(0, 2, 5), ints(0, 19, 35)
    context = functools.partial(flashpage.prefill.trtllm_batch_context_with_kv_cache, q, *tables, *sizes_of_context)
    found["tables, context"] = lambda **mode: context(return_lse=True, **mode)
    lists = flashpage.BatchMLASparseAttentionWrapper(workspace())
    lists.plan(ints(3, 1, 20, 7, 9, -1).view(2, 3), **LATENT, **f32, kv_data_type=torch.float32)
    latent = data(2, HEADS, 96), data(2, PAGE, 96)
    found["lists"] = lambda **mode: lists.run(query=latent[0], kv_cache=latent[1], return_lse=True, **mode)
    variant = flashpage.Variant(logit="score")
    for name in ("single_prefill_with_kv_cache", "single_decode_with_kv_cache"):
        rows, plain = q[0] if "decode" in name else q, getattr(flashpage, name)
        jit = getattr(flashpage, f"{name}_with_jit_module")
        found[name] = lambda rows=rows, plain=plain, **mode: plain(rows, k, v, return_lse=True, **mode)
        found[f"{name}_with_jit_module"] = lambda rows=rows, jit=jit, **mode: jit(
            variant, rows, k, v, return_lse=True, **mode
        )
    assert tuple(found) == NAMES
    return found


NAMES = (
    *("decode", "decode.run_return_lse", "decode.forward", "decode.forward_return_lse", "paged", "paged.forward"),
    *("ragged", "ragged.forward_return_lse", "sink", "mixed", "cascade-1", "cascade-2"),
    *("pod-prefill", "pod-decode", "sparse", "variable", "tables, decode", "tables, context", "lists"),
    *("single_prefill_with_kv_cache", "single_prefill_with_kv_cache_with_jit_module"),
    *("single_decode_with_kv_cache", "single_decode_with_kv_cache_with_jit_module"),
)


@pytest.mark.parametrize("name", NAMES)
def test_natural_logarithm(name: str) -> None:
    out, lse = calls()[name]()
    for mode, factor in (("base2", 1.0), ("basee", math.log(2)), ("base2", 1.0)):
        found, found_lse = calls()[name](lse_mode=mode)
        assert torch.equal(found, out)
        assert torch.equal(found_lse, lse * factor), mode
    with pytest.raises(RunError, match="lse_mode='e' is unknown: pass 'base2' or 'basee'"):
        calls()[name](lse_mode="e")


def test_given_lse_is_written_in_place() -> None:
    """A given LSE is in the wanted base, whether or not the run returns it."""
    q, k, v = data(5, HEADS, DIM), data(7, KV_HEADS, DIM), data(7, KV_HEADS, DIM)
    wrapper = flashpage.BatchPrefillWithRaggedKVCacheWrapper(workspace())
    wrapper.plan(ints(0, 5), ints(0, 7), HEADS, KV_HEADS, DIM, q_data_type=torch.float32)
    lse, natural = torch.empty(5, HEADS), torch.empty(5, HEADS)
    wrapper.run(q, k, v, lse=lse)
    wrapper.run(q, k, v, lse=natural, lse_mode="basee")
    assert torch.equal(natural, lse * math.log(2))
    scores = torch.einsum("qhd,khd->qhk", q, k.repeat_interleave(2, 1)) * DIM**-0.5
    torch.testing.assert_close(natural, scores.logsumexp(-1))
    returned = wrapper.run(q, k, v, lse=natural, return_lse=True, lse_mode="basee")[1]
    assert returned is natural and torch.equal(natural, lse * math.log(2))


@pytest.mark.parametrize("name", ["paged", "ragged"])
def test_flashinfers_name(name: str) -> None:
    """`lse_base`: "log2" and "ln"."""
    assert torch.equal(calls()[name](lse_base="ln")[1], calls()[name](lse_mode="basee")[1])
    assert torch.equal(calls()[name](lse_base="log2", lse_mode="basee")[1], calls()[name](lse_mode="basee")[1])
    with pytest.raises(RunError, match="lse_base='e' is unknown: pass 'log2' or 'ln'"):
        calls()[name](lse_base="e")
    with pytest.raises(RunError, match="are both given"):
        calls()[name](lse_base="ln", lse_mode="basee")


def states(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and natural LSEs; one row sees nothing in the first state."""
    v, s = data(6, count, HEADS, DIM), data(6, count, HEADS)
    s[2, 0] = -math.inf
    return v, s


def merged(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    lse = s.logsumexp(1)
    return ((s - lse.unsqueeze(1)).exp().unsqueeze(-1) * v).sum(1), lse


def test_merges_take_natural_logarithms() -> None:
    v, s = states(3)
    torch.testing.assert_close(flashpage.merge_states(v, s, lse_mode="basee"), merged(v, s))
    v, s = states(2)
    pair = (v[:, 0], s[:, 0], v[:, 1], s[:, 1])
    torch.testing.assert_close(flashpage.merge_state(*pair, lse_mode="basee"), merged(v, s))
    with pytest.raises(AssertionError):
        torch.testing.assert_close(flashpage.merge_state(*pair), merged(v, s))


@pytest.mark.parametrize("is_masked", [False, True])
def test_merge_in_place_takes_natural_logarithms(is_masked: bool) -> None:
    """Rows that a mask leaves out keep their LSEs to the bit."""
    v, s = states(2)
    mask = torch.tensor([1, 0, 1, 1, 0, 1]).bool() if is_masked else None
    kept = torch.zeros(6, dtype=torch.bool) if mask is None else ~mask
    v_a, s_a, v_b, s_b = v[:, 0].clone(), s[:, 0].clone(), v[:, 1].clone(), s[:, 1].clone()
    flashpage.merge_state_in_place(v_a, s_a, v_b, s_b, mask, lse_mode="basee")
    expected = merged(v, s)
    for found, whole, before in zip((v_a, s_a), expected, (v[:, 0], s[:, 0]), strict=True):
        torch.testing.assert_close(found[~kept], whole[~kept])
        assert torch.equal(found[kept], before[kept])
    assert torch.equal(s_b, s[:, 1])


@pytest.mark.parametrize("name", ["merge_state", "merge_states", "merge_state_in_place"])
def test_merges_refuse_other_modes(name: str) -> None:
    v, s = states(2)
    given = (v, s) if name == "merge_states" else tuple(t.contiguous() for t in (v[:, 0], s[:, 0], v[:, 1], s[:, 1]))
    with pytest.raises(RunError, match="lse_mode=2 is unknown"):
        getattr(flashpage, name)(*given, lse_mode=2)
