"""Columns side by side, whatever the strides and the bits."""

from __future__ import annotations

import pytest
import torch

from flashpage.engines.plugin import joined as module
from flashpage.engines.plugin.joined import joined


def bits(*shape: int) -> torch.Tensor:
    """Random bits as bfloat16, many of them no numbers."""
    return torch.randint(-(2**15), 2**15, shape, dtype=torch.int16).view(torch.bfloat16)


@pytest.mark.parametrize(
    ("first", "second", "is_wide"),
    [
        (bits(5, 4, 512), bits(5, 4, 64), True),
        (bits(4, 5, 512).transpose(0, 1), bits(5, 4, 192)[..., 128:], True),
        (bits(5, 4, 256)[..., :128], bits(5, 1, 576)[..., 512:], True),  # a part for all heads
        (bits(5, 4, 20), bits(5, 4, 12), False),
        (bits(5, 4, 65)[..., 1:], bits(5, 4, 64), False),
        (bits(5, 4, 132)[..., 4:], bits(5, 4, 64), False),  # rows begin at multiples of 8 bytes
    ],
)
def test_bits_are_those_of_the_parts(
    first: torch.Tensor, second: torch.Tensor, is_wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    judge = module._is_even
    monkeypatch.setattr(module, "_is_even", lambda tensor: found.append(judge(tensor)) or found[-1])
    out = joined((first, second))
    shape = (5, 4)
    expected = torch.cat([first.expand(*shape, -1), second.expand(*shape, -1)], -1)
    assert torch.equal(out.view(torch.int16), expected.contiguous().view(torch.int16))
    assert all(found) is is_wide
