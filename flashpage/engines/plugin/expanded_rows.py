"""Prompts of layers with latent rows (MLA): rows over expanded keys and values of the step's own tokens, and over those
of earlier tokens in chunks. The engine expands them and merges the results."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ... import jit
from ...kernels.options import Options, RunOptions
from ...kernels.spec import KernelSpec
from ...plan.lengths import Lengths
from ...plan.page_indices import NO_PAGES
from ...wrappers.base import RAGGED, Attention
from ...wrappers.plan_arguments import PrefillArguments
from .group_plans import Workspaces
from .prebuild import attention_kernels

OWN_TOKENS = -1  # in place of the number of a chunk
_WORKSPACE_BYTES = {"cuda": 128 << 20, "cpu": 16 << 20}


class ExpandedTensors(NamedTuple):
    """The tensors of one layer and one chunk."""

    query: torch.Tensor  # [rows, num_heads, head_dim]
    key: torch.Tensor  # [tokens, num_heads, head_dim]
    value: torch.Tensor  # [tokens, num_heads, dim of V]
    output: torch.Tensor | None = None  # [rows, num_heads, dim of V], written; None: allocated


class _Kind(NamedTuple):
    """What needs a plan of its own. Layers of one kind share theirs, whatever their scales."""

    chunk: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dim_v: int
    dtype: torch.dtype


class ExpandedRows:
    """The step's new tokens have one plan, each chunk of earlier tokens one of its own.

    Args:
        owner: the engine, for messages.
        is_batch_invariant: no request is cut, so that results do not depend on the rest of the batch.
    """

    def __init__(self, workspaces: Workspaces, owner: str, *, is_batch_invariant: bool = False) -> None:
        self._workspaces, self._owner, self._is_batch_invariant = workspaces, owner, is_batch_invariant
        self._attentions: dict[_Kind, Attention] = {}
        self._planned: set[_Kind] = set()  # in this step
        self._options: dict[tuple[_Kind, float], tuple[Options, RunOptions]] = {}

    def prebuild(self, heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
        """Builds the kernels, so that no prompt waits for a compiler.

        Args:
            heads: query heads and KV heads.
            dims: head dim of Q and K, and of V.
        """
        specs: dict[KernelSpec, None] = {}
        for chunk in (OWN_TOKENS, 0):
            options, _ = self._checked(_Kind(chunk, *heads, *dims, dtype), 1.0)
            specs |= dict.fromkeys(attention_kernels(options, device))
        jit.prebuild(specs, device)

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
            starts: where the rows and the tokens of each request begin, [requests + 1] int32 each, on the host.
        """
        q, k, v, out = tensors
        kind = _Kind(chunk, q.shape[1], k.shape[1], q.shape[2], v.shape[2], q.dtype)
        options, values = self._checked(kind, scale)
        attention = self._attentions.get(kind)
        if attention is None:
            workspace = self._workspaces.at_least(_WORKSPACE_BYTES[q.device.type], q.device)
            owner = f"flashpage's {self._owner} backend"
            attention = self._attentions[kind] = Attention(workspace, names=RAGGED, owner=owner)
        if kind not in self._planned:
            attention.plan(Lengths(*starts), NO_PAGES, options, values)
            self._planned.add(kind)
        found = attention.run_of("basee")(q, (k, v), out, None, has_lse, values)
        return (found[0], found[1]) if has_lse else (found, None)

    def _checked(self, kind: _Kind, scale: float) -> tuple[Options, RunOptions]:
        found = self._options.get((kind, scale))
        if found is None:
            arguments = PrefillArguments(
                *("ragged", kind.num_heads, kind.num_kv_heads, kind.head_dim, 0, kind.dim_v),
                causal=kind.chunk == OWN_TOKENS,
                sm_scale=scale,
                q_data_type=kind.dtype,
                disable_split_kv=self._is_batch_invariant,
            )
            found = self._options[kind, scale] = arguments.checked()
        return found
