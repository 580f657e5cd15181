"""Masks of speculative decoding: a request's guesses form a tree, and each guess sees its ancestors."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def tree_mask(parents: Sequence[Sequence[int]], seq_lens: Sequence[int]) -> torch.Tensor:
    """The custom_mask of BatchPrefillWithPagedKVCacheWrapper that verifies guesses.

    Args:
        parents: for each request, the index of each guess's parent among its guesses; -1: the guess follows the
            request's known tokens. A parent stands before its children.
        seq_lens: length of each request, its guesses included; guess i is its token seq_len - guesses + i.

    Returns:
        Boolean values, guesses x seq_len for each request, flattened and joined: True where guess i sees the token.
    """
    if len(parents) != len(seq_lens):
        raise ValueError(
            f"parents has {len(parents)} requests but seq_lens has {len(seq_lens)}: pass the same requests."
        )
    masks = []
    for request, (of_request, seq_len) in enumerate(zip(parents, seq_lens, strict=True)):
        known = seq_len - len(of_request)
        if known < 0:
            raise ValueError(
                f"seq_lens[{request}]={seq_len} is less than its {len(of_request)} guesses: it counts them, too."
            )
        mask = torch.zeros(len(of_request), seq_len, dtype=torch.bool, device="cpu")
        mask[:, :known] = True
        for i, parent in enumerate(of_request):
            if not -1 <= parent < i:
                raise ValueError(f"parents[{request}][{i}]={parent} must be -1 or an earlier guess, below {i}.")
            if parent >= 0:
                mask[i] |= mask[parent]
            mask[i, known + i] = True
        masks.append(mask.flatten())
    return torch.cat(masks) if masks else torch.zeros(0, dtype=torch.bool, device="cpu")
