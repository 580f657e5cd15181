"""The attention backend of this library: flashpage's wrappers over a token pool."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from ..base.errors import FlashpageError
from ..wrappers.merge import merge_state
from ..wrappers.paged_decode import BatchDecodeWithPagedKVCacheWrapper
from ..wrappers.paged_prefill import BatchPrefillWithPagedKVCacheWrapper
from ..wrappers.ragged_prefill import BatchPrefillWithRaggedKVCacheWrapper
from .backend import AttentionBackend
from .forward_batch import AttentionLayer, ForwardBatch, ForwardMode
from .graph_wrappers import GraphSizes, GraphWrappers
from .indices import IndicesUpdater, indptr_of
from .kv_parts import KvPart, part_of, parts_of
from .token_pool import RequestTable, TokenPool

WORKSPACE_BYTES = 128 << 20


class OwnWrappers:
    """What a library must have: three wrappers and `merge_state`, here flashpage's."""

    BatchDecodeWithPagedKVCacheWrapper = BatchDecodeWithPagedKVCacheWrapper
    BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper
    BatchPrefillWithRaggedKVCacheWrapper = BatchPrefillWithRaggedKVCacheWrapper
    merge_state = staticmethod(merge_state)


@dataclasses.dataclass(frozen=True)
class DecodeMetadata:
    """Planned wrappers of a DECODE step."""

    wrappers: dict[KvPart, Any]


@dataclasses.dataclass(frozen=True)
class PrefillMetadata:
    """Planned wrappers of an EXTEND or VERIFY step."""

    wrappers: dict[KvPart, Any]
    ragged: Any = None  # over the new tokens; the paged wrappers then see the tokens before them alone
    extend_no_prefix: bool = False  # there are none before them: the ragged wrapper has all


class PagedAttention(AttentionBackend):
    """Attention over a token pool by the wrappers of flashpage, or of a library with the same interface.

    A model whose layers see different parts of the tokens (a window or all; the decoder's own or the encoder's) has a
    wrapper and a page table for each part. Steps without captured graphs use one set of wrappers, captured steps one
    set a batch size.

    Args:
        layers: of the model; the first one of each part has the options that plans are made for, others bring theirs
            to run.
        q_dtype: of queries and outputs.
        ragged_extend: new tokens are attended to as they come and the ones before them from the pool, and both merged;
            else everything from the pool, in one run.
        workspace: for partial results, uint8; None: 128 MiB of its own.
        library: a module, or another object, that has the names of OwnWrappers.
        options: for the library's wrappers, by the name of their class.
        fill_len: tokens of requests that pad a captured batch; for libraries that cannot do with 0.
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
        library: Any = OwnWrappers,
        options: dict[str, dict[str, Any]] | None = None,
        fill_len: int = 0,
    ) -> None:
        self.table, self.pool, self.q_dtype = table, pool, q_dtype
        self.device = table.slots.device
        if workspace is None:
            workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
        self.workspace, self.library, self._options, self._fill_len = workspace, library, options or {}, fill_len
        self._has_cross = any(layer.is_cross for layer in layers)
        self.parts = parts_of(layers)
        windows = {part: layer.window_left for part, layer in self.parts.items()}
        self.indices = IndicesUpdater(table, pool.page_size, windows)
        self._ragged_extend = ragged_extend and set(self.parts) == {KvPart.ALL}
        self._decode = {part: self.wrapper("BatchDecodeWithPagedKVCacheWrapper") for part in self.parts}
        self._extend = {part: self.wrapper("BatchPrefillWithPagedKVCacheWrapper") for part in self.parts}
        self._verify = {part: self.wrapper("BatchPrefillWithPagedKVCacheWrapper") for part in self.parts}
        self._ragged = self.wrapper("BatchPrefillWithRaggedKVCacheWrapper")
        self._graphs: GraphWrappers | None = None
        self.metadata: DecodeMetadata | PrefillMetadata | None = None

    def wrapper(self, name: str, **values: Any) -> Any:
        """One of the library's wrappers, on the shared workspace."""
        return getattr(self.library, name)(self.workspace, "NHD", **(self._options.get(name, {}) | values))

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
        self, batch: ForwardBatch, wrappers: dict[KvPart, Any], out: dict[KvPart, torch.Tensor] | None = None
    ) -> DecodeMetadata:
        """Plans a decode wrapper for each part; `out`: room for page numbers that captured steps read."""
        for part, wrapper in wrappers.items():
            pages = self.indices.update(batch, part, out=None if out is None else out[part])
            wrapper.plan(*pages, *self._sizes(part), **self._values(part))
        return DecodeMetadata(wrappers)

    def plan_extend(
        self, batch: ForwardBatch, wrappers: dict[KvPart, Any], out: dict[KvPart, torch.Tensor] | None = None
    ) -> PrefillMetadata:
        """Plans a paged prefill wrapper for each part; an encoder's tokens are seen by every row."""
        q_indptr = indptr_of(batch.new_lens)
        for part, wrapper in wrappers.items():
            pages = self.indices.update(batch, part, out=None if out is None else out[part])
            causal = part is not KvPart.ENCODER
            mask = batch.tree_mask if causal else None
            values = self._values(part)
            if mask is not None:
                values, causal = values | {"custom_mask": mask}, False
            wrapper.plan(q_indptr, *pages, *self._sizes(part), causal=causal, **values)
        return PrefillMetadata(wrappers)

    def _plan_ragged(self, batch: ForwardBatch) -> PrefillMetadata:
        q_indptr, part = indptr_of(batch.new_lens), KvPart.ALL
        heads = self._sizes(part)[:-1]
        self._ragged.plan(q_indptr, q_indptr, *heads, causal=True, **self._values(part, stored=False))
        no_prefix = bool(torch.equal(batch.seq_lens, batch.new_lens))
        if not no_prefix:
            pages = self.indices.update(batch, part, prefix_only=True)
            self._extend[part].plan(q_indptr, *pages, *self._sizes(part), causal=False, **self._values(part))
        return PrefillMetadata(self._extend, self._ragged, no_prefix)

    def _sizes(self, part: KvPart) -> tuple[int, int, int, int]:
        layer = self.parts[part]
        return layer.num_q_heads, layer.num_kv_heads, layer.head_dim, self.pool.page_size

    def _values(self, part: KvPart, stored: bool = True) -> dict[str, Any]:
        """Options of a plan; `stored`: over the pool."""
        layer = self.parts[part]
        return _run_values(layer) | {
            "q_data_type": self.q_dtype,
            "kv_data_type": self.pool.dtype if stored else self.q_dtype,
        }

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
        assert isinstance(self.metadata, DecodeMetadata), "init_forward_metadata comes before the layers"
        wrapper = self.metadata.wrappers[part_of(layer, self._has_cross)]
        return wrapper.forward(q, self.pool.kv(layer.index), **_run_values(layer), **_scales(layer))

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
        assert isinstance(metadata, PrefillMetadata), "init_forward_metadata comes before the layers"
        part = part_of(layer, self._has_cross)
        wrapper, cache, values = metadata.wrappers[part], self.pool.kv(layer.index), _run_values(layer)
        if metadata.ragged is None:
            causal = part is not KvPart.ENCODER and batch.tree_mask is None
            return wrapper.forward(q, cache, causal=causal, **values, **_scales(layer))
        if metadata.extend_no_prefix:
            return metadata.ragged.forward(q, k, v, causal=True, **values)
        new = metadata.ragged.forward_return_lse(q, k, v, causal=True, **values)
        before = wrapper.forward_return_lse(q, cache, causal=False, **values, **_scales(layer))
        return self.library.merge_state(*new, *before)[0]

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
            self._graphs = GraphWrappers(sizes, self.parts, self.workspace, self.wrapper)
        elif not self._graphs.has_room_for(max_batch, max_rows):
            raise FlashpageError(
                f"max_batch={max_batch}, max_rows={max_rows}: the memory for captured steps is smaller and stays where "
                "it is; make the runner with the largest batches first, or give this one a backend of its own."
            )

    def init_forward_metadata_capture_cuda_graph(self, batch: ForwardBatch) -> None:
        assert self._graphs is not None, "init_cuda_graph_state comes before captures"
        self._graphs.make(batch)
        self.metadata = self._plan_captured(batch, self._graphs)

    def init_forward_metadata_replay_cuda_graph(self, batch: ForwardBatch) -> None:
        assert self._graphs is not None, "init_cuda_graph_state comes before replays"
        self.metadata = self._plan_captured(batch, self._graphs)

    def _plan_captured(self, batch: ForwardBatch, graphs: GraphWrappers) -> DecodeMetadata | PrefillMetadata:
        """Plans the batch into the buffers that its captured runs read."""
        plan = self.plan_decode if batch.mode is ForwardMode.DECODE else self.plan_extend
        return plan(batch, graphs.wrappers(batch), graphs.indices)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return self._fill_len


def _run_values(layer: AttentionLayer) -> dict[str, Any]:
    """Options that come with run: those of the plan are the first layer's."""
    return {
        "window_left": layer.window_left,
        "logits_soft_cap": layer.logits_soft_cap,
        "sm_scale": layer.sm_scale,
    }


def _scales(layer: AttentionLayer) -> dict[str, Any]:
    return {"k_scale": layer.k_scale, "v_scale": layer.v_scale}
