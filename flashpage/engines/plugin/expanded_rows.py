"""Prompts of layers with latent rows (MLA): rows over expanded keys and values of the step's own tokens, and over those
of earlier tokens in chunks. The engine expands them and merges the results."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...plan.lengths import Lengths
from ...plan.page_indices import NO_PAGES
from ...wrappers.base import RAGGED, Attention
from ...wrappers.plan_arguments import Checked, PrefillArguments
from .group_plans import Workspaces

OWN_TOKENS = -1  # in place of the number of a chunk
_WORKSPACE_BYTES = {"cuda": 128 << 20, "cpu": 16 << 20}


class ExpandedTensors(NamedTuple):
    """The tensors of one layer and one chunk."""

    query: torch.Tensor  # [rows, num_heads, head_dim]
    key: torch.Tensor  # [tokens, num_heads, head_dim]
    value: torch.Tensor  # [tokens, num_heads, dim of V]
    output: torch.Tensor | None = None  # [rows, num_heads, dim of V], written; None: allocated


class ExpandedRows:
    """The step's new tokens have one plan, each chunk of earlier tokens one of its own; layers share them.

    Args:
        owner: the engine, for messages.
    """

    def __init__(self, workspaces: Workspaces, owner: str) -> None:
        self._workspaces, self._owner = workspaces, owner
        self._checked = {is_causal: Checked() for is_causal in (False, True)}
        self._attentions: dict[int, Attention] = {}  # by chunk
        self._planned: set[int] = set()  # in this step

    def begin(self) -> None:
        """Begins a step."""
        self._planned.clear()

    def run(
        self,
        chunk: int,
        starts: tuple[torch.Tensor, torch.Tensor],
        tensors: ExpandedTensors,
        scale: float,
        has_lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention, and LSEs [rows, heads] of base e.

        Args:
            chunk: number of a chunk, all of whose tokens each row sees; OWN_TOKENS: the step's own tokens, causal.
            starts: where the rows and the tokens of each request begin, [requests + 1] each.
        """
        q, k, v, out = tensors
        is_causal = chunk == OWN_TOKENS
        attention = self._attentions.get(chunk)
        if attention is None:
            workspace = self._workspaces.at_least(_WORKSPACE_BYTES[q.device.type], q.device)
            owner = f"flashpage's {self._owner} backend"
            attention = self._attentions[chunk] = Attention(workspace, names=RAGGED, owner=owner)
        if chunk not in self._planned:
            arguments = PrefillArguments(
                *("ragged", q.shape[1], k.shape[1], q.shape[2], 0, v.shape[2]),
                causal=is_causal,
                sm_scale=scale,
                q_data_type=q.dtype,
            )
            checked = self._checked[is_causal].of(arguments)
            attention.plan(Lengths(*(indptr.to("cpu", torch.int32) for indptr in starts)), NO_PAGES, *checked)
            self._planned.add(chunk)
        found = attention.run_of("basee")(q, (k, v), out, None, has_lse)
        return (found[0], found[1]) if has_lse else (found, None)
