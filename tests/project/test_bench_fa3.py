"""FA3 in vLLM's build under the names that torch calls (tests/bench/torch_fa3.py), with a stand-in for its operator."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import attention

_fa3 = pytest.importorskip("torch.nn.attention._fa3", reason="this torch has no FA3 to activate")
BENCH = Path(__file__).resolve().parents[1] / "bench"
# _vllm_fa3_C::fwd as vLLM declares it: `o_scale` is in newer releases alone.
VLLM = (
    "Tensor! q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor!? out, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k, int? max_seqlen_q, "
    "int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos, "
    "Tensor? rotary_sin, Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, {o_scale}"
    "float softmax_scale, bool is_causal, int window_size_left, int window_size_right, float softcap, "
    "bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, int sm_margin, "
    "Tensor? s_aux, int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k"
)


@pytest.fixture
def fa3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(BENCH))
    import torch_fa3

    yield torch_fa3
    while torch_fa3._libraries:
        torch_fa3._libraries.pop()._destroy()


class Operator:
    """vLLM's operator: notes what it gets, and returns dense attention of one request."""

    def __init__(self, dispatch_key: str, o_scale: str = "") -> None:
        self.calls: list[dict[str, Any]] = []
        self.library = torch.library.Library("_vllm_fa3_C", "DEF")
        self.library.define(f"fwd({VLLM.format(o_scale=o_scale)}) -> Tensor[]")
        self.library.impl("fwd", self.fwd, dispatch_key)
        self.names = [argument.name for argument in torch.ops._vllm_fa3_C.fwd.default._schema.arguments]

    def fwd(self, *given: Any) -> list[torch.Tensor]:
        named = dict(zip(self.names, given, strict=True))
        self.calls.append(named)
        q, k, v = (named[name].flatten(0, -3).transpose(0, 1) for name in "qkv")
        scores = q @ k.transpose(1, 2) * named["softmax_scale"]
        out = named["out"] if named["out"] is not None else torch.empty_like(named["q"])
        out.copy_((scores.softmax(-1) @ v).transpose(0, 1).view(out.shape))
        return [out, scores.logsumexp(-1), q.new_empty(0), q.new_empty(0)]


@pytest.fixture
def operator(request: pytest.FixtureRequest) -> Iterator[Operator]:
    operator = Operator(*request.param)
    yield operator
    operator.library._destroy()


@pytest.mark.parametrize("operator", [("CPU",), ("CPU", "Tensor? o_scale, ")], indirect=True)
@pytest.mark.parametrize("scale", [None, 0.5])
def test_torchs_call(scale: float | None, operator: Operator, fa3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All 34 arguments of torch's call arrive under their names."""
    fa3.define(torch.ops._vllm_fa3_C.fwd, "CPU")
    monkeypatch.setattr(_fa3, "_FA3_CUDA_FWD", torch.ops.flash_attn_3.fwd)
    q, k, v = (torch.randn(rows, 2, 8) for rows in (5, 7, 7))
    ends = [torch.tensor([0, n], dtype=torch.int32) for n in (5, 7)]
    to = torch.empty_like(q)
    out, lse = _fa3._fa3_run_forward(q, k, v, *ends, 5, 7, scale, False, 3, None, None, to)
    (called,) = operator.calls
    expected = torch.nn.functional.scaled_dot_product_attention(*(t.transpose(0, 1) for t in (q, k, v)), scale=scale)
    torch.testing.assert_close(out.transpose(0, 1), expected)
    assert out.data_ptr() == to.data_ptr() and lse.shape == (2, 5)
    assert (called["max_seqlen_q"], called["max_seqlen_k"]) == (5, 7)
    assert (called["window_size_left"], called["window_size_right"]) == (3, -1)
    assert torch.equal(called["cu_seqlens_k"], ends[1]) and called["seqused_k"] is called["page_table"] is None
    assert (called["cp_world_size"], called["cp_rank"], called["s_aux"]) == (1, 0, None)
    out, _ = _fa3._fa3_run_forward(q, k, v, *ends, 5, 7, scale, False, 3, None, None)
    torch.testing.assert_close(out, to)


@pytest.mark.parametrize("operator", [("CPU",)], indirect=True)
def test_a_dense_batch_has_lengths(operator: Operator, fa3: Any) -> None:
    """vLLM's build refuses batches without any."""
    q, k = torch.randn(1, 5, 2, 8), torch.randn(1, 7, 2, 8)
    forward = fa3.forward_over(torch.ops._vllm_fa3_C.fwd, operator.names)
    numbers = dict.fromkeys(("window_size_left", "window_size_right", "attention_chunk", "num_splits", "sm_margin"), 0)
    choices = {"is_causal": False, "is_rotary_interleaved": True, "softcap": 0.0}
    given = dict.fromkeys(fa3.NAMES) | numbers | choices | {"q": q, "k": k, "v": k}
    for _ in range(2):
        assert forward(*given.values())[0].shape == q.shape
    first, second = (called["seqused_k"] for called in operator.calls)
    assert first is second and first.tolist() == [7] and first.dtype == torch.int32


@pytest.mark.parametrize("operator", [("CPU",)], indirect=True)
def test_arguments_that_vllm_lacks(operator: Operator, fa3: Any) -> None:
    forward = fa3.forward_over(torch.ops._vllm_fa3_C.fwd, operator.names)
    given = dict.fromkeys(fa3.NAMES) | {"q": torch.randn(5, 2, 8), "seqused_k": "its lengths", "attention_chunk": 4}
    with pytest.raises(NotImplementedError, match="has no attention_chunk"):
        forward(*given.values())


@pytest.mark.parametrize("operator", [("CUDA",)], indirect=True)
def test_activated_and_restored(operator: Operator, fa3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch imports the module that brought vLLM's operator; after it torch's own kernels are back."""
    monkeypatch.setitem(sys.modules, "flash_attn_interface", types.ModuleType("flash_attn_interface"))
    monkeypatch.setattr(attention._registry, "_FLASH_ATTENTION_IMPLS", dict(attention._registry._FLASH_ATTENTION_IMPLS))

    def is_here() -> bool:
        name = "aten::_scaled_dot_product_flash_attention"
        return torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")

    before = is_here()
    for _ in range(2):
        fa3.register()
        attention.activate_flash_attention_impl("FA3")
        assert is_here() and attention.current_flash_attention_impl() == "FA3"
        attention.restore_flash_attention_impl()
        assert is_here() == before
    assert len(fa3._libraries) == 1


def test_why_it_is_not_here(fa3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", types.ModuleType("flash_attn_interface"))
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError, match=r"neither flash_attn_3::fwd nor _vllm_fa3_C::fwd; vllm\.vllm_flash_attn"):
        fa3.register()
