"""flashpage's attention backend: plans over a token pool."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..base.errors import FlashpageError
from ..kernels.options import RunOptions, check_soft_cap, check_window
from ..plan.lengths import Lengths, Names
from ..plan.page_indices import NO_PAGES, Mask, Pages
from ..wrappers.base import DECODE, PAGED, RAGGED, Attention
from ..wrappers.graph_buffers import take_graph_buffers
from ..wrappers.merge import merge_state
from ..wrappers.plan_arguments import Checked, DecodeArguments, LatentArguments, PrefillArguments
from .backend import AttentionBackend
from .forward_batch import AttentionLayer, ForwardBatch, ForwardMode
from .graph_plans import GraphPlans, GraphSizes
from .indices import IndicesUpdater, indptr_of
from .kv_parts import KvPart, part_of, parts_of
from .token_pool import RequestTable, TokenPool

WORKSPACE_BYTES = 128 << 20


def make_attention(workspace: torch.Tensor, names: Names, buffers: dict[str, torch.Tensor | None] | None) -> Attention:
    """Makes an attention object. `buffers`: memory that captured runs read; None: runs are not captured."""
    attention = Attention(workspace, is_graph=buffers is not None, names=names, owner="PagedAttention")
    if buffers is not None:
        take_graph_buffers(attention, None, buffers)
    return attention


@dataclasses.dataclass(frozen=True)
class DecodeMetadata:
    """The plans of a DECODE step."""

    planned: dict[KvPart, Attention]


@dataclasses.dataclass(frozen=True)
class PrefillMetadata:
    """The plans of an EXTEND or VERIFY step."""

    planned: dict[KvPart, Attention]
    ragged: Attention | None = None  # for the new tokens; the paged plans then see only the earlier tokens
    extend_no_prefix: bool = False  # there are no earlier tokens: the ragged plan has everything


class PagedAttention(AttentionBackend):
    """Attention over a token pool.

    A model whose layers see different tokens (a window or all; the decoder's or the encoder's) has a plan and a page
    table for each part. Eager steps share one set of plans; captured steps have one set for each batch size.

    Args:
        layers: of the model. Plans get the options of the first layer of each part; other layers pass theirs to run.
        q_dtype: of queries and outputs.
        ragged_extend: True: attend to new tokens as given and to earlier ones in the pool, then merge. False: read all
            tokens from the pool, in one run.
        workspace: memory for partial results, uint8; None: allocates 128 MiB.
        make: makes the attention objects (make_attention).
    """

    supports_graphs = True

    def __init__(
        self,
        table: RequestTable,
        pool: TokenPool,
        layers: Sequence[AttentionLayer],
        q_dtype: torch.dtype,
        *,
        ragged_extend: bool = False,
        workspace: torch.Tensor | None = None,
        make: Callable[[torch.Tensor, Names, dict[str, torch.Tensor | None] | None], Any] = make_attention,
    ) -> None:
        self.table, self.pool, self.q_dtype = table, pool, q_dtype
        self.device = table.slots.device
        if workspace is None:
            workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
        self.workspace = workspace
        self._make = functools.partial(make, workspace)
        self._has_cross = any(layer.is_cross for layer in layers)
        self.parts = parts_of(layers)
        windows = {part: layer.window_left for part, layer in self.parts.items()}
        self.indices = IndicesUpdater(table, pool.page_size, windows)
        _check_pool(layers, pool)
        self._ragged_extend = ragged_extend and set(self.parts) == {KvPart.ALL} and not pool.is_latent
        self._decode = {part: self._make(DECODE, None) for part in self.parts}
        self._extend = {part: self._make(PAGED, None) for part in self.parts}
        self._verify = {part: self._make(PAGED, None) for part in self.parts}
        self._ragged = self._make(RAGGED, None)
        self._checked: dict[Any, Checked] = collections.defaultdict(Checked)  # by part and by the layers' other options
        self._graphs: GraphPlans | None = None
        self.metadata: DecodeMetadata | PrefillMetadata | None = None

    # ---------------------------------------------------------------- metadata

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        if batch.mode is ForwardMode.DECODE:
            self.metadata = self.plan_decode(batch, self._decode)
        elif batch.mode is ForwardMode.VERIFY:
            self.metadata = self.plan_extend(batch, self._verify)
        elif self._ragged_extend:
            self.metadata = self._plan_ragged(batch)
        else:
            self.metadata = self.plan_extend(batch, self._extend)

    def plan_decode(
        self, batch: ForwardBatch, planned: dict[KvPart, Attention], out: dict[KvPart, torch.Tensor] | None = None
    ) -> DecodeMetadata:
        """Plans one row a request for each part; `out`: memory for page numbers that captured steps read."""
        for part, attention in planned.items():
            indptr, indices, last_page_len = self.indices.update(batch, part, out=None if out is None else out[part])
            arguments = self._decode_arguments(self.parts[part])
            lengths = Lengths(None, indptr, last_page_len)
            attention.plan(lengths, Pages(indices), *self._checked[part, "decode"].of(arguments))
        return DecodeMetadata(planned)

    def plan_extend(
        self,
        batch: ForwardBatch,
        planned: dict[KvPart, Attention],
        out: dict[KvPart, torch.Tensor] | None = None,
        prefix_only: bool = False,
    ) -> PrefillMetadata:
        """Plans any number of rows a request for each part; every row sees all of the encoder's tokens."""
        q_indptr = indptr_of(batch.new_lens.numpy(), self.device)
        for part, attention in planned.items():
            room = None if out is None else out[part]
            indptr, indices, last_page_len = self.indices.update(batch, part, out=room, prefix_only=prefix_only)
            is_own = part is not KvPart.ENCODER
            mask = None if batch.tree_mask is None or not is_own else Mask(batch.tree_mask)
            arguments = self._prefill_arguments(part, mask is not None, is_own and mask is None and not prefix_only)
            checked = self._checked[part, mask is not None, prefix_only].of(arguments)
            attention.plan(Lengths(q_indptr, indptr, last_page_len), Pages(indices), *checked, mask)
        return PrefillMetadata(planned)

    def _plan_ragged(self, batch: ForwardBatch) -> PrefillMetadata:
        q_indptr = indptr_of(batch.new_lens.numpy(), self.device)
        arguments = self._prefill_arguments(KvPart.ALL, False, True, is_ragged=True)
        checked = self._checked[KvPart.ALL, "ragged"].of(arguments)
        self._ragged.plan(Lengths(q_indptr, q_indptr), NO_PAGES, *checked)
        no_prefix = bool(torch.equal(batch.seq_lens, batch.new_lens))
        if not no_prefix:
            self.plan_extend(batch, self._extend, prefix_only=True)
        return PrefillMetadata(self._extend, self._ragged, no_prefix)

    def _decode_arguments(self, layer: AttentionLayer) -> DecodeArguments | LatentArguments:
        if layer.v_head_dim is not None:
            return self._latent_arguments(layer, layer.v_head_dim, q_len_per_req=1)
        return DecodeArguments(
            layer.num_q_heads,
            layer.num_kv_heads,
            layer.head_dim,
            self.pool.page_size,
            q_data_type=self.q_dtype,
            kv_data_type=self.pool.dtype,
            **_options(layer),
        )

    def _latent_arguments(self, layer: AttentionLayer, ckv: int, **options: Any) -> LatentArguments:
        return LatentArguments(
            num_heads=layer.num_q_heads,
            head_dim_ckv=ckv,
            head_dim_kpe=layer.head_dim - ckv,
            page_size=self.pool.page_size,
            sm_scale=layer.head_dim**-0.5 if layer.sm_scale is None else layer.sm_scale,
            q_data_type=self.q_dtype,
            kv_data_type=self.pool.dtype,
            **options,
        )

    def _prefill_arguments(
        self, part: KvPart, has_mask: bool, is_causal: bool, is_ragged: bool = False
    ) -> PrefillArguments | LatentArguments:
        layer = self.parts[part]
        if layer.v_head_dim is not None:
            return self._latent_arguments(layer, layer.v_head_dim, has_mask=has_mask, causal=is_causal)
        return PrefillArguments(
            "ragged" if is_ragged else "paged",
            layer.num_q_heads,
            layer.num_kv_heads,
            layer.head_dim,
            0 if is_ragged else self.pool.page_size,
            has_mask=has_mask,
            causal=is_causal,
            q_data_type=self.q_dtype,
            kv_data_type=self.q_dtype if is_ragged else self.pool.dtype,
            **_options(layer),
        )

    # ---------------------------------------------------------------- forward

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        self._save(k, v, layer, batch, save_kv_cache)
        assert isinstance(self.metadata, DecodeMetadata), "call init_forward_metadata before the layers"
        attention = self.metadata.planned[part_of(layer, self._has_cross)]
        out: torch.Tensor = attention.run(
            q, self.pool.kv(layer.index), values=_values(layer, False), scales=_scales(layer)
        )
        return out

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        self._save(k, v, layer, batch, save_kv_cache)
        metadata = self.metadata
        assert isinstance(metadata, PrefillMetadata), "call init_forward_metadata before the layers"
        part = part_of(layer, self._has_cross)
        attention, cache, scales = metadata.planned[part], self.pool.kv(layer.index), _scales(layer)
        if metadata.ragged is None:
            is_causal = part is not KvPart.ENCODER and batch.tree_mask is None
            out: torch.Tensor = attention.run(q, cache, values=_values(layer, is_causal), scales=scales)
            return out
        assert k is not None and v is not None
        of_new = _values(layer, True)
        if metadata.extend_no_prefix:
            found: torch.Tensor = metadata.ragged.run(q, (k, v), values=of_new)
            return found
        new = metadata.ragged.run(q, (k, v), return_lse=True, values=of_new)
        before = attention.run(q, cache, return_lse=True, values=_values(layer, False), scales=scales)
        merged: torch.Tensor = merge_state(*new, *before)[0]
        return merged

    def _save(
        self, k: torch.Tensor | None, v: torch.Tensor | None, layer: AttentionLayer, batch: ForwardBatch, wanted: bool
    ) -> None:
        slots = batch.encoder_slots if layer.is_cross else batch.out_slots
        if wanted and k is not None and v is not None and slots is not None:
            self.pool.write(layer.index, slots, k, v, layer.k_scale, layer.v_scale)

    # ---------------------------------------------------------------- captured steps

    def init_cuda_graph_state(self, max_batch: int, max_rows: int) -> None:
        if self._graphs is None:
            sizes = GraphSizes(max_batch, max_rows, self.table.max_context, self.pool.page_size)
            self._graphs = GraphPlans(sizes, self.parts, self.workspace, self._make)
        elif not self._graphs.has_room_for(max_batch, max_rows):
            raise FlashpageError(
                f"max_batch={max_batch} or max_rows={max_rows} exceeds the memory of captured steps, which stays. "
                "Make the runner with the largest batches first, or give this one its own backend."
            )

    def init_forward_metadata_capture_cuda_graph(self, batch: ForwardBatch) -> None:
        assert self._graphs is not None, "call init_cuda_graph_state before a capture"
        self._graphs.make(batch)
        self.metadata = self._plan_captured(batch, self._graphs)

    def init_forward_metadata_replay_cuda_graph(self, batch: ForwardBatch) -> None:
        assert self._graphs is not None, "call init_cuda_graph_state before a replay"
        self.metadata = self._plan_captured(batch, self._graphs)

    def _plan_captured(self, batch: ForwardBatch, graphs: GraphPlans) -> DecodeMetadata | PrefillMetadata:
        """Plans the batch into the buffers that its captured runs read."""
        plan = self.plan_decode if batch.mode is ForwardMode.DECODE else self.plan_extend
        return plan(batch, graphs.planned(batch), graphs.indices)


def _check_pool(layers: Sequence[AttentionLayer], pool: TokenPool) -> None:
    for layer in layers:
        if (layer.v_head_dim is not None) != pool.is_latent:
            raise FlashpageError(
                f"layer {layer.index} has v_head_dim={layer.v_head_dim} but the pool was made "
                f"{'with' if pool.is_latent else 'without'} v_head_dim: pass the same to both of them."
            )


def _options(layer: AttentionLayer) -> dict[str, Any]:
    """The options of a layer that may differ under one plan."""
    return {
        "window_left": layer.window_left,
        "logits_soft_cap": layer.logits_soft_cap,
        "sm_scale": layer.sm_scale,
    }


def _values(layer: AttentionLayer, is_causal: bool) -> RunOptions:
    return _checked_values(is_causal, layer.window_left, layer.logits_soft_cap, layer.sm_scale)


@functools.lru_cache(maxsize=256)
def _checked_values(is_causal: bool, window_left: int, logits_soft_cap: float, sm_scale: float | None) -> RunOptions:
    return RunOptions(
        is_causal, check_window(window_left), check_soft_cap(logits_soft_cap), sm_scale, None, None, "NONE"
    )


def _scales(layer: AttentionLayer) -> tuple[Any, Any, Any]:
    return None, layer.k_scale, layer.v_scale
