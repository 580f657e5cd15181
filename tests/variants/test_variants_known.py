"""Facts derived from a user's logit text: soft caps, and tensors that are loaded for each token."""

from __future__ import annotations

import pytest
import torch

from flashpage.kernels.work import InnerLoop, inner_loop
from flashpage.variants import Variant
from flashpage.variants.source import soft_cap
from flashpage.variants.spec import logit_loads_by_token


@pytest.mark.parametrize(
    ("logit", "cap"),
    [
        ("cap * tanh(score / cap)", "cap"),
        ("tanh((score * (1.0 / cap))) * cap", "cap"),
        ("30.0 * tanh(score / 30.0)", "30.0f"),
        ("cap * tanh(score / 30.0)", ""),
        ("h * tanh(score / h)", ""),
        ("cap * tanh(score / cap) + 1", ""),
    ],
)
def test_soft_caps_are_known(logit: str, cap: str) -> None:
    scalars = {"cap": 3.0} if "cap" in logit else {}
    assert soft_cap(Variant(logit=logit, scalars=scalars).traced().spec) == cap


@pytest.mark.parametrize(
    ("logit", "by_token"),
    [
        ("score + t[h]", False),
        ("score + t[h + b * 2] * kv_idx", False),
        ("score + t [kv_idx]", True),
        ("score + t(t(kv_idx))", True),
        ("score + t[min(h, 3)]", True),  # the text inside is not analysed
        ("const auto other = t; return score + other(kv_idx);", True),
    ],
)
def test_loads_by_token(logit: str, by_token: bool) -> None:
    spec = Variant(logit=logit, tensors={"t": torch.ones(8)}).traced().spec
    assert logit_loads_by_token(spec) is by_token
    assert inner_loop("implicit", "none", spec) is (InnerLoop.LOADING if by_token else InnerLoop.TRANSFORM)
