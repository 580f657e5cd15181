"""What one thread launches: argument structs bound once to the shapes, strides and options of a run, then only
re-pointed.

A run with tensors as the last one's is one call of a builtin, which compares them, writes five pointers and launches.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import torch

from .. import jit, native
from ..base import checks, kv_view
from ..base.dtypes import DType
from ..base.errors import RunError
from ..kernels import devices, tensor_maps
from ..kernels.options import Values, check_rope, check_scale
from ..kernels.tile import MERGE_CTA_ROWS
from ..plan.gather_rows import Rows
from ..plan.prepared_kernels import Prepared, fill_variant, trace
from .checks import NO_SCALES, Tensors

if TYPE_CHECKING:
    from ..plan.mixed_batch import Part
    from ..plan.option_plan import Combination
    from ..plan.session import Planner

_CPU_OUT_DTYPE = {DType.FLOAT32: 0, DType.FLOAT16: 1, DType.BFLOAT16: 2}  # csrc/flashpage.h, fp_run_args::out_dtype


class Binding:
    """Structs for one signature; refreshed after every plan."""

    __slots__ = (
        *("address", "alignment_mask", "args", "args_address", "bound_run", "boxes", "cache_views", "combination"),
        *("device", "enable_pdl", "fused_offset", "gather", "gathered", "generation", "has_lse", "has_merge"),
        *("has_numbers", "head_dim_vo", "k", "kv_layout", "lse_shape", "merge", "out_dtype"),
        *("out_shape", "params", "prepared", "scales", "second", "second_boxes", "second_prepared"),
        *("signature", "sinks", "sm_scale", "stamps", "traced", "v", "values", "variant", "views"),
    )

    def __init__(
        self, planner: Planner, kv_layout: str, values: Values, combination: Combination, tensors: Tensors
    ) -> None:
        self.values, self.combination, self.device = values, combination, planner.device
        self.params, self.merge = native.AttentionParams(), native.MergeParams()
        self.variant, self.args = native.VariantArgs(), native.RunArgs()
        self.gather = native.GatherRowsParams()
        self.args_address = ctypes.addressof(self.args)
        self.bound_run = native.BoundRun(self.args_address, ctypes.addressof(self.params), ctypes.addressof(self.merge))
        self.address = ctypes.addressof(self.bound_run)
        self.gathered: Rows | None = None
        self.generation, self.signature = 0, None
        self.sinks: torch.Tensor | None = None
        self.scales: tuple[Any, Any, Any] = NO_SCALES
        self.prepared: Prepared | None = None
        self.boxes: native.KvBoxes | None = None
        self.second = native.SecondPart()
        self.second_prepared: Prepared | None = None
        self.second_boxes: native.KvBoxes | None = None
        self.stamps: torch.Tensor | None = None
        self.kv_layout = kv_layout
        self.lse_shape: tuple[int, ...] = ()
        self.out_shape: tuple[int, ...] = ()
        self.out_dtype, self.head_dim_vo = combination.options.out_dtype.torch, combination.options.head_dim_vo
        self._bind_options(values)
        self._bind_tensors(tensors)
        self.has_numbers = self.has_lse = self.has_merge = False
        self.set_scales(NO_SCALES)
        self.set_pdl(None)

    def _bind_options(self, values: Values) -> None:
        options, params = self.combination.options, self.params
        self.sm_scale = check_scale(values.sm_scale, options.head_dim_qk)
        params.rope_scale, params.rope_theta = check_rope(values.rope_scale, values.rope_theta)
        params.num_q_heads, params.num_kv_heads = options.num_q_heads, options.num_kv_heads
        params.causal, params.window_left = options.causal, options.window_left
        params.group = native.make_fast_div(options.group_size)
        params.page = native.make_fast_div(options.page_size or 1)
        merge = self.merge
        merge.head_dim_vo, merge.num_q_heads, merge.group = options.head_dim_vo, options.num_q_heads, params.group
        args = self.args
        args.params, args.merge_params = ctypes.addressof(params), ctypes.addressof(merge)
        args.variant = ctypes.addressof(self.variant)
        args.out_dtype = _CPU_OUT_DTYPE[options.out_dtype]

    def _bind_tensors(self, tensors: Tensors) -> None:
        """Strides and offsets; everything that the signature stands for is judged here."""
        options, params = self.combination.options, self.params
        q, cache, out, lse = tensors
        params.q_row_stride, params.q_head_stride = kv_view.rows_strides(q, "q")
        if options.kv_source == "paged":
            k, v = kv_view.paged_views(cache, self.kv_layout)
        else:
            k, v = (kv_view.ragged_view(t, self.kv_layout, n) for t, n in zip(cache, ("k", "v"), strict=True))
        self.cache_views = {"K": k, "V": v}
        self._bind_views(self.cache_views, params)
        self.bound_run.v_offset = self.fused_offset = v.offset * options.kv_dtype.size
        heads, dim = options.num_q_heads, options.head_dim_vo
        if out is None:
            strides = (heads * dim, dim)
        else:
            strides = kv_view.rows_strides(out, "out")
        params.out_row_stride, params.out_head_stride = self.merge.out_row_stride, self.merge.out_head_stride = strides
        self._bind_alignment(strides, k, v)

    def _bind_views(
        self, views: dict[str, kv_view.View], cache: native.AttentionParams | native.GatherRowsParams
    ) -> None:
        """K and V as the attention kernel sees them, and the struct that has the addresses of the cache."""
        self.views, params, bound = views, self.params, self.bound_run
        for side, view in ((params.k, views["K"]), (params.v, views["V"])):
            side.page_stride, side.token_stride, side.head_stride = (
                view.page_stride,
                view.token_stride,
                view.head_stride,
            )
        self.k, self.v = cache.k, cache.v  # views into the struct: setting them costs no second look-up
        bound.k_view, bound.v_view = ctypes.addressof(self.k), ctypes.addressof(self.v)

    def _bind_gathered(self, rows: Rows | None) -> None:
        """Has the attention kernel read the rows that each run gathers, or again the cache."""
        params, options = self.params, self.combination.options
        self.gathered = rows
        if rows is None:
            self._bind_views(self.cache_views, params)
            return
        self._bind_views(rows.views(options), self.gather)
        rows.bind(self.gather, self.cache_views, options, params.kv_indices)
        params.k.data, params.v.data = rows.k, rows.v

    def _bind_alignment(self, out_strides: tuple[int, int], k: kv_view.View, v: kv_view.View) -> None:
        options, params = self.combination.options, self.params
        kernel = self.combination.prepared.choice.kernel.row_alignment
        self.alignment_mask = 0
        rows = (
            ("q", (params.q_row_stride, params.q_head_stride), options.head_dim_qk, options.q_dtype),
            ("K", k[4:], options.head_dim_qk, options.kv_dtype),
            ("V", v[4:], options.head_dim_vo, options.kv_dtype),
            ("out", out_strides, options.head_dim_vo, options.out_dtype),
        )
        for name, strides, dim, dtype in rows:
            alignment = kv_view.row_alignment(kernel, dim, dtype.size)
            kv_view.check_alignment(tuple(strides), dtype.size, alignment, name)
            self.alignment_mask |= alignment - 1
        self.bound_run.alignment_mask = self.alignment_mask

    def refresh(self, planner: Planner) -> None:
        """Takes over the newest plan."""
        combination, params, merge, args = self.combination, self.params, self.merge, self.args
        params.plan = merge.plan = combination.slot.memory.data_ptr()
        params.kv_indices = planner.indices.address
        params.num_kv_indices = planner.kv_end if self.combination.options.kv_source == "paged" else 0
        params.custom_mask = planner.mask.address
        partial_out, partial_lse = planner.workspaces.partials(combination.options.head_dim_vo)
        params.partial_out = merge.partial_out = partial_out
        params.partial_lse = merge.partial_lse = partial_lse
        prepared = combination.prepared
        args.attention = prepared.attention.handle
        args.merge = None if prepared.merge is None else prepared.merge.handle
        args.num_ctas = combination.num_ctas * prepared.choice.spec.ctas
        args.merge_ctas = _merge_ctas(prepared, combination.num_merges)
        args.cluster_size = combination.cluster_size
        self.has_merge = args.merge_ctas > 0
        args.second = None
        if combination.second is not None:
            self._refresh_second(combination.second, partial_out, partial_lse)
        args.mask_tiles = args.mask_tiles_params = None
        if prepared.mask_tiles is not None:
            tiles = combination.mask_tiles
            args.mask_tiles_params = tiles.address
            if not tiles.are_found(planner.generation):
                combination.bind_mask_tiles(planner.batch)
                args.mask_tiles = prepared.mask_tiles.handle
            params.lane_bits = tiles.lane_bits
        if combination.gathered is not None or self.gathered is not None:
            self._bind_gathered(combination.gathered)
        args.gather_rows = None
        if prepared.gather_rows is not None:
            args.gather_rows, args.gather_params = prepared.gather_rows.handle, ctypes.addressof(self.gather)
        if prepared is not self.prepared:
            self._bind_boxes(prepared)
        if combination.options.needs_variant:
            self.traced = trace(combination.options, self.values.logits_soft_cap, self.device)
            fill_variant(self.variant, self.traced)
        self.generation = planner.generation

    def _refresh_second(self, part: Part, partial_out: int, partial_lse: int) -> None:
        """The launch beside the first: over the same tensors, with a plan and partial results of its own."""
        second, prepared = self.second, part.prepared
        second.fork = self.combination.fork
        second.attention = prepared.attention.handle
        second.merge = None if prepared.merge is None else prepared.merge.handle
        second.plan = self.params.plan + part.offset
        second.partial_out = partial_out + part.partial_row * self.head_dim_vo * 4
        second.partial_lse = partial_lse + part.partial_row * 4
        second.num_ctas = part.result.num_ctas * prepared.choice.spec.ctas
        second.merge_ctas = _merge_ctas(prepared, part.result.num_merges)
        self.has_merge |= second.merge_ctas > 0
        if prepared is not self.second_prepared:
            self.second_prepared, self.second_boxes = prepared, self._boxes_of(prepared, second)
            second.boxes = None if self.second_boxes is None else ctypes.addressof(self.second_boxes)
        self.args.second = ctypes.addressof(second)

    def _bind_boxes(self, prepared: Prepared) -> None:
        self.prepared, self.boxes = prepared, self._boxes_of(prepared, self.params)
        self.args.boxes = None if self.boxes is None else ctypes.addressof(self.boxes)

    def _boxes_of(
        self, prepared: Prepared, params: native.AttentionParams | native.SecondPart
    ) -> native.KvBoxes | None:
        """Tensor maps of K, V, q and out, where the kernel takes them; tokens and rows of their boxes in `params`."""
        spec, options = prepared.choice.spec, self.combination.options
        tile, is_paged = spec.tile, spec.kv_source == "paged"
        page_size = options.page_size if is_paged else 0
        element_bytes = options.kv_dtype.size
        row_bytes = (options.head_dim_qk * element_bytes, options.head_dim_vo * element_bytes)
        tokens = tensor_maps.loader_tokens(spec.loader, page_size, tile.tile_kv, *row_bytes) if tile else 0
        found = native.KvBoxes()
        params.box_tokens, params.query_box_rows, params.out_box_rows = tokens, 0, 0
        params.cta_rows = prepared.schedule.tile_q // spec.ctas
        if tokens:
            found.k, found.v = (
                tensor_maps.box_form(view, name, element_bytes=element_bytes, tokens=tokens, is_paged=is_paged)
                for name, view in self.views.items()
            )
        if tile and prepared.choice.kernel.row_boxes and spec.loader != "converted":
            self._bind_row_boxes(found, params, has_out=spec.loader != "transposed")
        return found if tokens or params.query_box_rows or params.out_box_rows else None

    def _bind_row_boxes(
        self, found: native.KvBoxes, params: native.AttentionParams | native.SecondPart, *, has_out: bool
    ) -> None:
        """Tensor maps of q and out, where they can have one; rows of their boxes in `params`."""
        options, bound = self.combination.options, self.params
        form_of = functools.partial(tensor_maps.rows_form, group_size=options.group_size, unit_rows=params.cta_rows)
        form = form_of(
            *(options.num_q_heads, options.head_dim_qk),
            element_bytes=options.q_dtype.size,
            strides=(bound.q_row_stride, bound.q_head_stride),
        )
        if form is not None:
            found.q, params.query_box_rows = form, form.box[2]
        form = form_of(
            *(options.num_q_heads, options.head_dim_vo),
            element_bytes=options.out_dtype.size,
            strides=(bound.out_row_stride, bound.out_head_stride),
        )
        if has_out and form is not None:
            found.out, params.out_box_rows = form, form.box[2]

    def set_trace(self, stamps: torch.Tensor | None) -> None:
        """For measurements: until the next plan, runs write clock stamps to `stamps`, int64 [CTAs, stamps of one]."""
        kernel = self.combination.prepared.attention
        if stamps is not None:
            kernel = jit.get_kernel(dataclasses.replace(kernel.spec, trace=True), self.device)
        self.args.attention, self.stamps = kernel.handle, stamps
        self.params.trace = None if stamps is None else stamps.data_ptr()

    def point(self, q: torch.Tensor, cache: Any, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        """Addresses of one run; the only thing that changes from layer to layer."""
        params = self.params
        q_address, out_address = q.data_ptr(), out.data_ptr()
        if self.boxes is not None:
            self._resize(self.boxes, q, cache)
        if self.second_boxes is not None:
            self._resize(self.second_boxes, q, cache)
        if cache.__class__ is tuple:
            k_address, v_address = cache[0].data_ptr(), cache[1].data_ptr()
        else:
            k_address = cache.data_ptr()
            v_address = k_address + self.fused_offset
        if (q_address | k_address | v_address | out_address) & self.alignment_mask:
            raise self._misaligned(q_address, k_address, v_address, out_address)
        params.q, params.out = q_address, out_address
        self.k.data, self.v.data = k_address, v_address
        if lse is None:
            if self.has_lse:
                self.has_lse = False
                params.lse = self.merge.lse = None
        else:
            self.has_lse = True
            params.lse = self.merge.lse = lse.data_ptr()
        if self.has_merge:
            self.merge.out = out_address

    def _resize(self, found: native.KvBoxes, q: torch.Tensor, cache: Any) -> None:
        if self.gathered is not None:
            tensor_maps.resize(found, q.shape[0], self.gathered.end, False, "NHD")
            return
        leading = (cache[0] if cache.__class__ is tuple else cache).shape[0]
        tensor_maps.resize(found, q.shape[0], leading, self.combination.options.kv_source == "paged", self.kv_layout)

    def _misaligned(self, *addresses: int) -> RunError:
        found = [
            f"{name} starts at {address:#x}"
            for name, address in zip(("q", "K", "V", "out"), addresses, strict=True)
            if address & self.alignment_mask
        ]
        return RunError(
            f"{', '.join(found)}: this kernel reads rows that start on {self.alignment_mask + 1} "
            "bytes; pass tensors (or "
            "views) that do, such as a clone."
        )

    def set_pdl(self, enable_pdl: bool | None) -> None:
        """None: on cards that have programmatic dependent launch."""
        self.enable_pdl = enable_pdl
        self.args.enable_pdl = devices.of(self.device).has_pdl if enable_pdl is None else bool(enable_pdl)

    def has_scales(self, scales: tuple[Any, Any, Any]) -> bool:
        """Whether these numbers are set already; tensors may have moved."""
        return self.has_numbers and all(s.__class__ is float for s in scales) and scales == self.scales

    def set_scales(self, scales: tuple[Any, Any, Any]) -> None:
        """q, k, v: numbers are folded into the score's and the output's scale; tensors are read by the kernel."""
        if self.has_scales(scales):
            return
        params, options = self.params, self.combination.options
        q, params.q_scale, params.q_scale_stride = self._scale(scales[0], "q_scale", options.num_q_heads)
        k, params.k_scale, params.k_scale_stride = self._scale(scales[1], "k_scale", options.num_kv_heads)
        v, params.v_scale, params.v_scale_stride = self._scale(scales[2], "v_scale", options.num_kv_heads)
        params.score_scale, params.value_scale = self.sm_scale * q * k, v
        self.scales, self.has_numbers = scales, not any(isinstance(s, torch.Tensor) for s in scales)

    def _scale(self, value: Any, name: str, heads: int) -> tuple[float, int | None, int]:
        """(number, address, stride)"""
        if value is None:
            return 1.0, None, 0
        if not isinstance(value, torch.Tensor):
            return checks.real(name, value), None, 0
        if value.numel() == 1 and value.is_cpu:
            return float(value), None, 0
        checks.same_device(value, self.device, name, RunError)
        if value.numel() not in (1, heads):
            raise RunError(f"{name} has {value.numel()} entries: pass one, or one a head ({heads}).")
        if value.dtype != torch.float32 or not value.is_contiguous():
            raise RunError(f"{name} has dtype {value.dtype}: pass contiguous float32, {name}.float().contiguous().")
        return 1.0, value.data_ptr(), int(value.numel() > 1)

    def set_sinks(self, sinks: torch.Tensor | None) -> None:
        """[num_qo_heads] fp32 logits that join every row's denominator."""
        if sinks is not None:
            checks.tensor(sinks, "sinks", RunError)
            heads = self.combination.options.num_q_heads
            if sinks.shape != (heads,) or sinks.dtype != torch.float32 or not sinks.is_contiguous():
                raise RunError(
                    f"sinks has shape {tuple(sinks.shape)} and dtype {sinks.dtype}: pass one "
                    "contiguous float32 value a "
                    f"query head, [{heads}]."
                )
            checks.same_device(sinks, self.device, "sinks", RunError)
        self.params.sinks = None if sinks is None else sinks.data_ptr()
        self.sinks = sinks


def _merge_ctas(prepared: Prepared, num_merges: int) -> int:
    """Of the launch behind the attention, where that does not merge itself."""
    if prepared.choice.kernel.merges_in_launch:
        return 0
    return min(num_merges * -(-prepared.schedule.merge_rows // MERGE_CTA_ROWS), 2**31 - 1)
