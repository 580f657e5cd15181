"""flashpage under SGLang's interface of attention backends."""

from __future__ import annotations

from typing import Any

import sglang
import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from ...run.checks import NO_SCALES
from ..plugin.group_plans import SPLIT_TOKENS, GroupSizes, Workspaces
from ..plugin.layers import LayerOptions
from ..plugin.parts import LayerTensors, Part
from ..plugin.versions import warn_if_untested
from .groups import Group, chunk_of, group_of, options_of
from .planner import NO_BRANCHES, Branches, GroupPlanner
from .rows import StepRows, rows_of
from .support import check_keywords, check_layer, check_runner
from .tables import SlotTables
from .trees import TreeRows

warn_if_untested("sglang", sglang.__version__)


class FlashpageBackend(AttentionBackend):
    """Attention of a model runner's layers."""

    needs_cpu_seq_lens = False

    def __init__(self, runner: Any, branches: Branches = NO_BRANCHES) -> None:
        super().__init__()
        check_runner(runner)
        self.max_context_len = runner.model_config.context_len
        self.req_to_token_pool, self.token_to_kv_pool = runner.req_to_token_pool, runner.token_to_kv_pool
        slots = self.req_to_token_pool.req_to_token
        pool = self.token_to_kv_pool if isinstance(self.token_to_kv_pool, SWAKVPool) else None
        self._window_pool, self._config = pool, runner.model_config
        self._has_encoder = self._config.is_encoder_decoder
        self._window_layers = set() if pool is None else {i for i, (_, is_swa) in pool.layers_mapping.items() if is_swa}
        # An encoder's tokens, and the guesses of a branch, end within a page where others begin: kernels read such
        # models' tokens by their slots, as pages of one token.
        reads_slots = self._has_encoder or branches.width > 1
        self._page_size, self._is_fp8 = 1 if reads_slots else runner.page_size, runner.kv_cache_dtype.itemsize == 1
        self._branches, self._sizes = branches, _sizes(runner, self._page_size)
        has_own_stream = getattr(runner, "init_new_workspace", False)
        self._workspaces = Workspaces() if has_own_stream else Workspaces.of(runner)
        self._tables = SlotTables(slots, self._page_size, None if pool is None else pool.translate_loc_from_full_to_swa)
        arguments = runner.server_args
        self._trees = None
        if (arguments.speculative_eagle_topk or 0) > 1 and branches.step < 0:
            self._trees = TreeRows(self._sizes.max_requests, arguments.speculative_num_draft_tokens, slots.device)
        self._captures = 0, 0
        self._known: dict[int, tuple[Any, Group, LayerOptions]] = {}  # by id; a layer lives as long as its entry
        self._pages: dict[int, tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]] = {}
        self._planners: dict[Group, GroupPlanner] = {}
        by_group: dict[Group, list[LayerOptions]] = {}
        for layer in self._layers_of(runner):
            group, options = self._look_up(layer)
            by_group.setdefault(group, []).append(options)
        for group, known in by_group.items():
            self._add_planner(group, known).prebuild()
        self._rows: StepRows | None = None
        self._is_captured = False
        self._parts: dict[Group, Part] = {}
        self._new_slots: tuple[Any, Any] = (None, None)

    def _layers_of(self, runner: Any) -> list[Any]:
        """The layers with plans of their own."""
        model = getattr(runner, "model", None)
        return [] if model is None else [layer for layer in model.modules() if isinstance(layer, RadixAttention)]

    def _look_up(self, layer: Any) -> tuple[Group, LayerOptions]:
        found = self._known.get(id(layer))
        if found is None:
            group = self._group_of(layer)
            found = self._known[id(layer)] = layer, group, options_of(layer, group.chunk)
        return found[1:]

    def _group_of(self, layer: Any) -> Group:
        check_layer(layer, layer.qk_head_dim)
        group = group_of(layer, self._window_layers, self._has_encoder, self._branches.width > 1)
        return group._replace(chunk=chunk_of(layer, self._config))

    def _add_planner(self, group: Group, layers: list[LayerOptions]) -> GroupPlanner:
        planner = GroupPlanner(group, layers, self._sizes, self._tables, self._workspaces, self._trees, self._branches)
        planner.allow_captures(*self._captures)
        self._planners[group] = planner
        return planner

    # ---------------------------------------------------------------- plans

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self._take_tree(forward_batch)
        self._plan(forward_batch, False)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self._captures = max(max_bs, self._captures[0]), max(max_num_tokens, self._captures[1])
        if self._trees is not None and max_bs > self._sizes.max_requests:
            raise ValueError(
                f"graphs of {max_bs} requests, but at most {self._sizes.max_requests} run at once. "
                "Choose a smaller --cuda-graph-max-bs."
            )
        for planner in self._planners.values():
            planner.allow_captures(*self._captures)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Before a capture or a replay: plans are made inside of the graph."""
        self._take_tree(forward_batch)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Captured: each replay plans from the lengths that are then on the device."""
        self._plan(forward_batch, True)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def shared_read_ends(self, mode: Any) -> Any:
        """Newer versions ask when their scheduler may write to its tables: after the step, as kernels read them in
        place. Older ones may write during a captured decode or draft, to rows of requests that have ended and slots
        with equal contents, which changes no output that is used."""
        from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds

        return SharedReadEnds.UNKNOWN

    def support_triton(self) -> bool:
        return self._tables.slots.is_cuda

    def _take_tree(self, forward_batch: Any) -> None:
        mask = getattr(forward_batch.spec_info, "custom_mask", None)
        if self._trees is not None and forward_batch.forward_mode.is_target_verify() and mask is not None:
            self._trees.take(mask, forward_batch.seq_lens)

    def _plan(self, forward_batch: Any, is_captured: bool) -> None:
        self._rows, self._parts, self._new_slots = None, {}, (None, None)
        if len(forward_batch.seq_lens) == 0:
            return  # an idle step has no rows
        rows = rows_of(forward_batch, self._branches.step + 1, is_captured)
        if forward_batch.forward_mode.is_target_verify():
            rows = rows._replace(has_tree=self._trees is not None)
        self._rows, self._is_captured = rows, is_captured
        self._parts = {group: planner.plan(rows, is_captured) for group, planner in self._planners.items()}

    # ---------------------------------------------------------------- layers

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attention of the step's rows, [rows, heads * head_dim]; later rows of q are padding."""
        if kwargs:
            check_keywords(layer, kwargs)
        group, options = self._look_up(layer)
        kind = options.kind
        if save_kv_cache and k is not None and v is not None:
            self._write(k, v, layer, forward_batch)
        q = q.reshape(-1, kind.num_heads, kind.head_dim)
        out = torch.empty_like(q)
        scales = NO_SCALES
        if self._is_fp8:
            k_scale = _scale(layer.k_scale, layer.k_scale_float)
            scales = (None, k_scale, _scale(layer.v_scale, layer.v_scale_float))
        sinks = None if sinks is None else sinks.float()
        return self._run(group, options, LayerTensors(q, k, v, self._cache(layer), out, scales, sinks))

    forward_extend = forward_decode

    def _run(self, group: Group, options: LayerOptions, tensors: LayerTensors) -> torch.Tensor:
        """Runs the step's plan of a layer; returns the output as SGLang wants it."""
        out, part = tensors.output, self._parts.get(group)
        if part is None:
            part = self._plan_late(group, options)
        part.run(options, tensors)
        assert self._rows is not None
        rows = self._rows.total * self._branches.width
        if rows < len(out):
            out[rows:].zero_()
        return out.view(len(out), -1)

    def _plan_late(self, group: Group, options: LayerOptions) -> Part:
        """Plans for a layer that the runner's model did not have when the backend was made."""
        assert self._rows is not None, "init_forward_metadata was not called for this step"
        planner = self._planners.get(group) or self._add_planner(group, [options])
        found = self._parts[group] = planner.plan(self._rows, self._is_captured)
        return found

    def _write(self, k: torch.Tensor, v: torch.Tensor, layer: Any, forward_batch: Any) -> None:
        """Writes the step's K and V to their slots, by SGLang's own function."""
        slots = forward_batch.encoder_out_cache_loc if layer.is_cross_attention else forward_batch.out_cache_loc
        if self._window_pool is not None and self._new_slots[0] is not slots:
            self._new_slots = slots, self._window_pool.translate_loc_from_full_to_swa(slots)
        self.token_to_kv_pool.set_kv_buffer(
            layer, KVWriteLoc(slots, self._new_slots[1]), k, v, layer.k_scale, layer.v_scale
        )

    def _cache(self, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer, [pages, page, num_kv_heads, head_dim]; the views are kept, as they cost as much as a
        run."""
        k, v = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        found = self._pages.get(layer.layer_id)
        if found is None or found[0] is not k:
            pages = tuple(buffer.view(-1, self._page_size, *buffer.shape[1:]) for buffer in (k, v))
            found = self._pages[layer.layer_id] = k, (pages[0], pages[1])
        return found[1]


def _scale(written_by: Any, number: float | None) -> Any:
    """The scale by which a layer's fp8 cache is written: a tensor that stays where it is when weights are updated, a
    number, or None. Some models have tensors of another type than kernels read, and an equal number."""
    is_read = not isinstance(written_by, torch.Tensor) or written_by.dtype == torch.float32
    return written_by if is_read else number


def _sizes(runner: Any, page_size: int) -> GroupSizes:
    """The largest step of a runner."""
    arguments, slots = runner.server_args, runner.req_to_token_pool.req_to_token
    chunk, drafts, requests = arguments.chunked_prefill_size, arguments.speculative_num_draft_tokens or 1, len(slots)
    prompts = chunk if chunk is not None and chunk > 0 else slots.shape[1]  # one prompt may be a step of its own
    prompts = max(prompts, getattr(arguments, "max_prefill_tokens", None) or 0)
    return GroupSizes(
        page_size=page_size,
        q_dtype=runner.dtype,
        kv_dtype=runner.kv_cache_dtype,
        max_requests=requests,
        max_rows=prompts + requests * drafts,  # decodes may be mixed into a step of prompts
        max_tokens=slots.shape[1],
        few_rows=drafts,
        split_tokens=SPLIT_TOKENS if arguments.enable_deterministic_inference else 0,
    )
