"""latent_e4m3_sm90 on the host at the limits of its number formats: queries are two terms in e4m3, values fp16 relative
to a power of two, and probabilities fp16."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cases.case import Case
from cases.latent import latent_case
from inputs import Inputs, make_inputs
from latent_on_host import run

from flashpage.kernels import latent_e4m3_sm90

_COLUMNS, _SCALES, _ROW = 512, slice(512, 528), 656
_LOG2_E = math.log2(math.e)
_LEAST_FP32 = 1.17549435e-38


@pytest.fixture(params=[16, 32, 64])
def heads(request: pytest.FixtureRequest) -> int:
    """16 and 32 have transposed scores, by all and by two groups of columns at a time."""
    return request.param


def _case(name: str, heads: int, kv_len: int = 130, **options: Any) -> tuple[Case, Inputs]:
    values: dict[str, Any] = {"num_q_heads": heads, "page_size": 16, "row_format": "deepseek_v32", **options}
    case = latent_case(name, "limits of e4m3 and fp16", (1,), (kv_len,), **values)
    return case, make_inputs(case)


def _rows(case: Case, inputs: Inputs) -> list[torch.Tensor]:
    """The stored rows of the only request, as views of its cache."""
    pages = inputs.cache.buffers[0].view(-1, case.page_size, _ROW)
    return [pages[int(inputs.indices[t // case.page_size]), t % case.page_size] for t in range(case.kv_lens[0])]


def _set_scales(row: torch.Tensor, scale: float) -> None:
    row[_SCALES] = torch.full((4,), scale).view(torch.uint8)


def _expected(case: Case, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.stack(_rows(case, inputs))
    scales = rows[:, _SCALES].contiguous().view(torch.float32).double().repeat_interleave(128, 1)
    values = rows[:, :_COLUMNS].contiguous().view(torch.float8_e4m3fn).double() * scales
    keys = torch.cat([values, rows[:, 528:].contiguous().view(torch.bfloat16).double()], 1)
    scores = inputs.q[0][0].double() @ keys.T * case.score_scale
    all_scores = scores if inputs.sinks is None else torch.cat([scores, inputs.sinks.double()[:, None]], 1)
    lse = torch.logsumexp(all_scores, 1, keepdim=True)
    return (scores - lse).exp() @ values, lse[:, 0] * _LOG2_E


def _check(case: Case, inputs: Inputs, cut: int = 0, of: slice = slice(None)) -> None:
    out, lse, left = run(latent_e4m3_sm90.KERNEL, case, inputs, cut)
    expected, expected_lse = (part[of] for part in _expected(case, inputs))
    assert left == 0
    errors = (out[0, of].double() - expected).norm(dim=-1)
    assert (errors <= 4e-3 * expected.norm(dim=-1)).all()
    assert ((lse[0, of] - expected_lse).abs() <= 1e-4 * expected_lse.abs().clamp(min=1.0)).all()


@pytest.mark.parametrize("power", [7, 9, 20])
def test_a_sink_with_most_of_the_sum(heads: int, power: int) -> None:
    case, inputs = _case("sink", heads, 300, sinks=True)
    for row in _rows(case, inputs):
        _set_scales(row, 2.0**-power)
    assert inputs.sinks is not None
    inputs.sinks.fill_(math.log(300) + 4.3)
    inputs.q[0].zero_()
    _check(case, inputs)


@pytest.mark.parametrize("cut", [0, 48])
@pytest.mark.parametrize(("scale", "rows"), [(_LEAST_FP32, 130), (_LEAST_FP32, 64), (0.0, 64), (0.0, 16)])
def test_rows_of_zeros(heads: int, scale: float, rows: int, cut: int) -> None:
    """Their scales are whatever the cache's writer took."""
    case, inputs = _case("zeros", heads)
    for row in _rows(case, inputs)[:rows]:
        row.zero_()
        _set_scales(row, scale)
    _check(case, inputs, cut)


@pytest.mark.parametrize("scale", [2.0**-60, 2.0**100])
def test_scales_far_from_1(heads: int, scale: float) -> None:
    case, inputs = _case("far", heads, sm_scale=1.0 / scale / 24)
    inputs.q[0][..., _COLUMNS:] = 0
    for row in _rows(case, inputs):
        _set_scales(row, scale)
    _check(case, inputs)


@pytest.mark.parametrize(("factor", "first"), [(0.01, math.nan), (0.01, 1000.0), (1000.0, math.inf)])
def test_a_head_does_not_change_others(heads: int, factor: float, first: float) -> None:
    case, inputs = _case("heads", heads, sm_scale=1.0 / factor / 24)
    inputs.q[0].mul_(factor)
    inputs.q[0][0, 0] = first
    _check(case, inputs, of=slice(1, None))


@pytest.mark.parametrize("sm_scale", [1e-12, 0.0, -0.04])
def test_small_and_negative_scales_of_scores(heads: int, sm_scale: float) -> None:
    case, inputs = _case("small", heads, sm_scale=sm_scale)
    if sm_scale == 1e-12:
        inputs.q[0].mul_(1e-34)
    _check(case, inputs)


def test_queries_are_split_exactly(heads: int) -> None:
    """Scores of one token are sums of exact products: nothing but fp32 rounds them on the host."""
    case, inputs = _case("exact", heads, 1)
    row = _rows(case, inputs)[0]
    row.zero_()
    row[:_COLUMNS] = torch.ones(_COLUMNS).to(torch.float8_e4m3fn).view(torch.uint8)
    _set_scales(row, 1.0)
    _, lse, _ = run(latent_e4m3_sm90.KERNEL, case, inputs, 0)
    exact = inputs.q[0][0, :, :_COLUMNS].double().sum(1) * case.score_scale * _LOG2_E
    assert ((lse[0] - exact).abs() <= 1e-5).all()
