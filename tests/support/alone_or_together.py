"""Whether an engine's answers depend on the other requests of a step, where only attention can make them do so."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

SPLIT_TOKENS = 64  # shorter than an engine's own, as these requests are
THREADS = "16"  # for which long requests that are alone are cut into more parts
TOKENS = 1024  # of an engine's longest request
_linear = torch.nn.functional.linear


def by_rows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """A linear layer whose products do not depend on the number of rows. Engines' own ones are in Triton."""
    return torch.stack([_linear(row, weight, bias) for row in x])


def equal(ask: Callable[[list[list[int]]], list[Any]]) -> list[bool]:
    """Whether each request's answer has the same bits, asked alone and together with the others."""
    drawn = random.Random(1)
    prompts = [[drawn.randrange(3, 1000) for _ in range(length)] for length in (900, 700, 3)]
    return [ask([prompt]) == [answer] for prompt, answer in zip(prompts, ask(prompts), strict=True)]
