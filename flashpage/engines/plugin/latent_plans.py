"""Plans of layers whose queries are absorbed: they read latent rows (MLA)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...kernels.options import Options, RunOptions
from ...wrappers.plan_arguments import LatentArguments
from .group_plans import GroupPlans, GroupSizes, Use, Workspaces
from .layers import LayerKind, LayerOptions


class LatentPlans(GroupPlans):
    """The attention objects of a group of layers over latent rows.

    Args:
        ckv: columns of a row that are V too; the others have the rotated part of K.
    """

    def __init__(
        self,
        ckv: int,
        layers: Sequence[LayerOptions],
        sizes: GroupSizes,
        device: torch.device,
        workspaces: Workspaces | None = None,
        *,
        owner: str = "vLLM",
    ) -> None:
        super().__init__(layers, sizes, device, workspaces, owner=owner)
        self.ckv = ckv

    def _checked(self, use: Use, kind: LayerKind, is_causal: bool) -> tuple[Options, RunOptions]:
        sizes, values = self.sizes, next(layer.values for layer in self.layers if layer.kind == kind)[is_causal]
        return LatentArguments(
            num_heads=kind.num_heads,
            head_dim_ckv=self.ckv,
            head_dim_kpe=kind.head_dim - self.ckv,
            page_size=sizes.page_size,
            sm_scale=values.sm_scale,
            causal=is_causal and not use.is_decode,
            q_data_type=sizes.q_dtype,
            kv_data_type=sizes.kv_dtype,
            fixed_split_size=max(1, sizes.split_tokens // sizes.page_size) if sizes.split_tokens else None,
            q_len_per_req=1 if use.is_decode else 0,
        ).checked()
