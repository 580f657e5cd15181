"""Runs of several layers whose launches share the copy that a plan keeps in the float workspace, on a card."""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from graphs import capture

_LAYERS = 8

Outputs = tuple[torch.Tensor, ...]


class Batch(Protocol):
    """A planned batch of two layers."""

    workspace: torch.Tensor

    def run(self, layer: int = 0, **options: Any) -> Outputs: ...


def assert_all_same_bits(found: Outputs, expected: Outputs) -> None:
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def check_layers_that_follow(batch: Batch, **options: Any) -> None:
    """Layers that are launched at once give what each gives alone."""
    expected = [batch.run(layer) for layer in range(2)]
    torch.cuda.synchronize()
    assert not torch.equal(expected[0][0], expected[1][0])
    for _ in range(4):
        found = [batch.run(i % 2, **options) for i in range(_LAYERS)]
        torch.cuda.synchronize()
        for i, outputs in enumerate(found):
            assert_all_same_bits(outputs, expected[i % 2])


def check_captured_layers(batch: Batch) -> None:
    """So do those of a graph, whatever was left in the workspace."""
    order = (0, 1, 1, 0)
    expected = [batch.run(layer) for layer in range(2)]
    found: list[Outputs] = []

    def layers() -> None:
        found[:] = [batch.run(layer) for layer in order]

    replay = capture(layers)
    for _ in range(3):
        batch.workspace.fill_(255)
        for outputs in found:
            outputs[0].fill_(math.nan)
        replay()
        torch.cuda.synchronize()
        for outputs, layer in zip(found, order, strict=True):
            assert_all_same_bits(outputs, expected[layer])
