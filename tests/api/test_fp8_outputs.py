"""Outputs of e4m3: every number's rounding, their scale, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import flashpage
from flashpage.base.dtypes import DType
from flashpage.base.errors import CapabilityError, RunError
from flashpage.kernels import devices
from flashpage.kernels.choose import choose_for_card
from flashpage.kernels.options import Options
from flashpage.kernels.work import Problem

E4M3, DIM = torch.float8_e4m3fn, 64


def ragged(
    device: str, q_lens: list[int], kv_lens: list[int], **options: Any
) -> flashpage.BatchPrefillWithRaggedKVCacheWrapper:
    wrapper = flashpage.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(16 << 20, dtype=torch.uint8, device=device))
    indptrs = (torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (q_lens, kv_lens))
    options = {"q_data_type": torch.float16, "o_data_type": E4M3, **options}
    wrapper.plan(*indptrs, 1, 1, DIM, **options)
    return wrapper


def rounded(numbers: torch.Tensor) -> torch.Tensor:
    """As e4m3: numbers beyond the largest one become it, and NaN stays NaN."""
    return numbers.float().clamp(-448, 448).to(E4M3)


def check_equal(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found.float().cpu(), wanted.float().cpu(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (1, 2), (70, 1)], ids=["decode", "merged", "prefill"])
def test_every_fp16_number_is_rounded_as_torch_does(device: str, rows: int, tokens: int) -> None:
    """Requests whose tokens are equal: an output is the row of V. Two tokens are two pieces, which are merged."""
    v = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16, device=device).view(torch.float16).view(-1, 1, DIM)
    wanted = rounded(v).repeat_interleave(rows, 0)
    v = v.repeat_interleave(tokens, 0)
    q, k = torch.zeros_like(wanted, dtype=torch.float16), torch.zeros_like(v)
    requests = (1 << 16) // DIM
    split = {"fixed_split_size": 1} if tokens > 1 else {}
    wrapper = ragged(device, [rows] * requests, [tokens] * requests, **split)
    check_equal(wrapper.run(q, k, v), wanted)


def test_scales_may_differ_between_runs(device: str) -> None:
    """Numbers, and a tensor whose contents change, as they do between replays of a graph."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(30, 1, DIM, generator=generator).half().to(device) for _ in range(3))
    wrapper = ragged(device, [30], [30])
    exact = ragged(device, [30], [30], o_data_type=torch.float16).run(q, k, v).float()
    tensor = torch.ones(1, device=device)
    out = torch.empty(30, 1, DIM, dtype=E4M3, device=device)
    for number in (0.5, 0.25, 2.0**-12):
        tensor.fill_(number)
        step = (rounded(exact / number).float().abs() / 8).clamp(min=2.0**-9)
        for scale in (number, tensor):
            found = wrapper.run(q, k, v, o_scale=scale, out=out)
            assert found.data_ptr() == out.data_ptr()
            error = (found.float() - rounded(exact / number).float()).abs()
            assert (error <= step).all() and (error > 0).float().mean() < 0.02  # only where the fp16 output was rounded
    check_equal(wrapper.run(q, k, v), wrapper.run(q, k, v, o_scale=1))


def test_the_operator_takes_the_scale(device: str) -> None:
    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return function(*args, **(kwargs or {}))

    q, k, v = (torch.randn(9, 1, DIM).half().to(device) for _ in range(3))
    wrapper = ragged(device, [9], [9])
    for scale in (None, 0.125, torch.full((1,), 0.125, device=device)):
        with Watch():
            found = wrapper.run(q, k, v, o_scale=scale)
        assert found.dtype == E4M3
        check_equal(found, wrapper.run(q, k, v, o_scale=scale))


@pytest.mark.parametrize(
    ("o_scale", "message"),
    [
        (0.0, r"o_scale=0.0: pass a positive number"),
        (-1.0, r"o_scale=-1.0: pass a positive number"),
        (float("nan"), r"o_scale=nan cannot be used"),
        ("a", r"o_scale='a' is of type str"),
        (1e-38, r"o_scale=1e-38 is too small"),
        (torch.ones(2), r"o_scale has shape \(2,\): pass one entry"),
        (torch.zeros(1), r"o_scale=0.0: pass a positive number"),  # on the CPU a tensor is read by the host
    ],
)
def test_wrong_scales(o_scale: Any, message: str) -> None:
    q = torch.randn(9, 1, DIM).half()
    wrapper = ragged("cpu", [9], [9])
    with pytest.raises(RunError, match=message):
        wrapper.run(q, q, q, o_scale=o_scale)
    assert wrapper.run(q, q, q).dtype == E4M3


def test_outputs_of_16_bits_have_no_scale() -> None:
    q = torch.randn(9, 1, DIM).half()
    wrapper = ragged("cpu", [9], [9], o_data_type=None)
    message = "o_scale=0.5 but the plan's outputs are float16 and need no scale: pass o_data_type=torch.float8_e4m3fn"
    with pytest.raises(RunError, match=message):
        wrapper.run(q, q, q, o_scale=0.5)
    with pytest.raises(RunError, match=r"out has shape .* and dtype torch.float8_e4m3fn but this run writes"):
        wrapper.run(q, q, q, out=torch.empty(9, 1, DIM, dtype=E4M3))


def test_e5m2_and_latent_rows_are_refused() -> None:
    with pytest.raises(CapabilityError, match="o_data_type float8_e5m2 is not among"):
        ragged("cpu", [9], [9], o_data_type=torch.float8_e5m2)
    wrapper = flashpage.BatchMLAPagedAttentionWrapper(torch.empty(1 << 20, dtype=torch.uint8))
    metadata = flashpage.MLAPlanMetadata.csr(*(torch.tensor(n, dtype=torch.int32) for n in ([0, 1], [0, 1], [0], [1])))
    with pytest.raises(CapabilityError, match="it writes no outputs of float8_e4m3fn over latent rows"):
        wrapper.plan(
            metadata=metadata,
            num_heads=4,
            head_dim_ckv=64,
            head_dim_kpe=0,
            page_size=1,
            causal=False,
            sm_scale=1.0,
            q_data_type=torch.float16,
            kv_data_type=torch.float16,
            output_dtype=E4M3,
        )


@pytest.mark.parametrize(
    ("card", "rows", "head_dim", "kernel"),
    [
        ("H200", 4096, 128, "prefill_sm90"),
        ("H200", 4096, 80, "prefill_sm90"),
        ("H200", 4096, 72, "attention_sm80"),  # rows of 72 bytes do not leave in pieces of 16
        ("H200", 16, 72, "decode_sm90"),
        ("A100", 4096, 128, "attention_sm80"),
        ("L4", 4096, 128, "prefill_sm89"),
    ],
)
def test_kernels_that_write_them(card: str, rows: int, head_dim: int, kernel: str) -> None:
    """Of e4m3 queries over an e4m3 cache."""
    dtype = DType.FLOAT8_E4M3 if kernel != "attention_sm80" else DType.FLOAT16
    options = Options("paged", 8, 8, head_dim, head_dim, 16, dtype, dtype, DType.FLOAT8_E4M3)
    choice = choose_for_card(Problem(options, rows), devices.named(card))
    assert choice.spec.kernel == kernel and choice.spec.out_dtype is DType.FLOAT8_E4M3
    if head_dim == 72 and rows > 64:
        assert any("head_dim_vo 72 is not a multiple of 16" in reason for reason in choice.reasons)
