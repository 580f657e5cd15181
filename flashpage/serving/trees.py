"""Masks of speculative decoding: a request's guesses form a tree, and each guess sees its ancestors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..base import checks
from ..base.errors import PlanError


def tree_mask(parents: Sequence[Sequence[int]], seq_lens: Sequence[int]) -> torch.Tensor:
    """The custom_mask of BatchPrefillWithPagedKVCacheWrapper that verifies guesses.

    Args:
        parents: for each request, the index of each guess's parent among its guesses; -1: the guess follows the
            request's known tokens. A parent stands before its children.
        seq_lens: length of each request, its guesses included; guess i is its token seq_len - guesses + i.

    Returns:
        Boolean values, guesses x seq_len for each request, flattened and joined: True where guess i sees the token.
    """
    masks = []
    for request, (of_request, seq_len) in enumerate(_requests(parents, seq_lens)):
        known = seq_len - len(of_request)
        mask = torch.zeros(len(of_request), seq_len, dtype=torch.bool, device="cpu")
        mask[:, :known] = True
        for i, parent in enumerate(of_request):
            if not -1 <= parent < i:
                raise PlanError(f"parents[{request}][{i}]={parent} must be -1 or an earlier guess, below {i}.")
            if parent >= 0:
                mask[i] |= mask[parent]
            mask[i, known + i] = True
        masks.append(mask.flatten())
    return torch.cat(masks) if masks else torch.zeros(0, dtype=torch.bool, device="cpu")


def _requests(parents: Any, seq_lens: Any) -> list[tuple[list[int], int]]:
    """The checked guesses and length of each request."""
    for name, value in (("parents", parents), ("seq_lens", seq_lens)):
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise PlanError(f"{name}={checks.shown(value)} is a {type(value).__name__}: pass a list of each request's.")
    if len(parents) != len(seq_lens):
        raise PlanError(f"parents has {len(parents)} requests and seq_lens {len(seq_lens)}: pass one of each.")
    found = []
    for i, (guesses, seq_len) in enumerate(zip(parents, seq_lens, strict=True)):
        if not isinstance(guesses, Sequence) or isinstance(guesses, str):
            raise PlanError(f"parents[{i}]={checks.shown(guesses)} is a {type(guesses).__name__}: pass a list.")
        numbers = [checks.whole(f"parents[{i}][{j}]", parent, -(2**31)) for j, parent in enumerate(guesses)]
        found.append((numbers, checks.whole(f"seq_lens[{i}]", seq_len, len(numbers))))
    return found
