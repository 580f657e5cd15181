"""The launches of one thread: argument structs are bound once to the shapes, strides and options of a run; later runs
only set addresses.

A run with the same tensors as the last one is one call of a builtin, which compares them, writes five pointers and
launches.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from .. import jit, native
from ..base import checks, kv_view, tensor_memory
from ..base.errors import RunError
from ..kernels import devices, tensor_maps
from ..kernels.options import RunOptions, check_rope, check_scale
from ..plan import gather_rows
from ..plan.launches import LaunchList
from ..plan.prepared_kernels import fill_variant, trace
from .bound_part import BoundPart
from .bound_scales import BoundScales
from .checks import NO_SCALES, Scales, Tensors, scale_views, starts_of, views_of

if TYPE_CHECKING:
    from ..plan.mixed_batch import Part
    from ..plan.option_plan import OptionPlan
    from ..plan.session import Planner


class Binding:
    """Structs for one signature; refreshed after every plan."""

    __slots__ = (
        *("address", "alignment_masks", "args", "args_address", "bound_run", "cache_views", "option_plan", "device"),
        *("enable_pdl", "fused_offset", "gather", "gathered", "generation", "head_dim_vo", "kv_layout"),
        *(
            "launches",
            "lse_shape",
            "most_cache_bytes",
            "out_dtype",
            "out_shape",
            "params",
            "parts",
            "q_strides",
            "scale_holder",
            "scale_masks",
            "scales",
        ),
        *("on_eight", "requests", "signature", "sinks", "sm_scale", "stamps", "traced", "values", "variant", "views"),
    )

    def __init__(
        self, planner: Planner, kv_layout: str, values: RunOptions, option_plan: OptionPlan, tensors: Tensors
    ) -> None:
        self.values, self.option_plan, self.device = values, option_plan, planner.device
        self.parts = [BoundPart(option_plan.options)]  # the second one comes with the first plan of two parts
        self.params = self.parts[0].params
        self.variant = native.VariantArgs()
        self.gather: Any = gather_rows.params_of(option_plan.options)
        self.launches = LaunchList(ctypes.addressof(self.variant))
        self.args = self.launches.args
        self.args_address = ctypes.addressof(self.args)
        self.bound_run = native.BoundRun(self.args_address)
        self.address = ctypes.addressof(self.bound_run)
        self.gathered: gather_rows.Copy | None = None
        self.generation, self.signature = 0, None
        self.requests = 0  # that scales of requests must be for
        self.sinks: torch.Tensor | None = None
        self.stamps: tuple[torch.Tensor, ...] = ()
        self.kv_layout = kv_layout
        self.lse_shape: tuple[int, ...] = ()
        self.out_shape: tuple[int, ...] = ()
        self.out_dtype, self.head_dim_vo = option_plan.options.out_dtype.torch, option_plan.options.head_dim_vo
        self._bind_options(values)
        self._bind_tensors(tensors)
        self.scales = BoundScales(self.parts, option_plan.options, self.sm_scale, self.device)
        self.set_scales(NO_SCALES, tensors.cache)
        self.set_pdl(None)

    def _bind_options(self, values: RunOptions) -> None:
        options, params = self.option_plan.options, self.params
        self.sm_scale = check_scale(values.sm_scale, options.head_dim_qk) * options.rotation_scale
        params.rope_scale, params.rope_theta = check_rope(values.rope_scale, values.rope_theta)
        params.num_q_heads, params.num_kv_heads = options.num_q_heads, options.num_kv_heads
        params.causal, params.window_left = options.causal, options.window_left
        params.group = native.make_fast_div(options.group_size)
        params.page = native.make_fast_div(options.page_size or 1)
        merge = self.parts[0].merge
        merge.head_dim_vo, merge.num_q_heads, merge.group = options.head_dim_vo, options.num_q_heads, params.group

    def _bind_tensors(self, tensors: Tensors) -> None:
        """Sets strides and offsets; checks everything that the signature does not change."""
        options, params = self.option_plan.options, self.params
        q, cache, out, _lse = tensors
        self.q_strides = params.q_row_stride, params.q_head_stride = kv_view.rows_strides(q, "q")
        k, v = views_of(cache, options, self.kv_layout)
        if options.has_formats:
            self._bind_scales(scale_views(cache, (k, v), options, self.kv_layout))
            k, v = (
                kv_view.in_bytes(view, side.stored_size) for view, side in zip((k, v), options.formats, strict=True)
            )
        self.cache_views = {"K": k, "V": v}
        self._bind_views(self.cache_views)
        self.bound_run.v_offset = self.fused_offset = v.offset * options.kv_dtype.size
        heads, dim = options.num_q_heads, options.head_dim_vo
        if out is None:
            strides = (heads * dim, dim)
        else:
            tensor_memory.check_written(out, "out", RunError)
            strides = kv_view.rows_strides(out, "out")
        merge = self.parts[0].merge
        params.out_row_stride, params.out_head_stride = merge.out_row_stride, merge.out_head_stride = strides
        self._bind_alignment(strides, k, v, starts_of(cache))

    def _bind_views(self, copied: dict[str, kv_view.View], reads_q: bool = True) -> None:
        """Sets K and V as the attention kernel reads them, and chooses the structs that get the addresses of q and of
        the cache: those of the kernel before for what is `copied`, and for q unless the attention kernel `reads_q`."""
        params, pointers = self.params, self.bound_run.parts[0]
        self.views = self.cache_views | copied
        for side, view in ((params.k, self.views["K"]), (params.v, self.views["V"])):
            side.page_stride, side.token_stride, side.head_stride = (
                view.page_stride,
                view.token_stride,
                view.head_stride,
            )
        ahead = params if copied is self.cache_views else self.gather
        pointers.q = _address_of_q(params if reads_q else self.gather)
        pointers.k_view = ctypes.addressof(ahead.k if "K" in copied else params.k)
        pointers.v_view = ctypes.addressof(ahead.v if "V" in copied else params.v)
        self.scale_holder = ahead if isinstance(ahead, native.WidenPagesParams) else params
        pointers.key_scales = ctypes.addressof(self.scale_holder.key_scales)
        pointers.value_scales = ctypes.addressof(self.scale_holder.value_scales)

    def _bind_scales(self, views: tuple[kv_view.View | None, kv_view.View | None]) -> None:
        """Sets the strides of the scales of formats; point_scales sets their addresses."""
        kernel, params, self.scale_masks = self.option_plan.prepared.choice.kernel, self.params, [0, 0]
        for i, (view, side) in enumerate(zip(views, (params.key_scales, params.value_scales), strict=True)):
            if view is None:
                continue
            alignment = math.gcd(kernel.scale_alignment, view.head_dim)
            kv_view.check_alignment(view[4:], 1, alignment, f"kv_cache_sf[{i}]")
            side.page_stride, side.token_stride, side.head_stride = view[4:7]
            self.scale_masks[i] = self.bound_run.scale_masks[i] = alignment - 1

    def point_scales(self, scales: Sequence[torch.Tensor | None], written: Sequence[Any]) -> None:
        """Sets and checks the addresses of the scales of formats of a run that C cannot bind itself."""
        for i, tensor in enumerate(scales):
            if tensor is None:
                continue
            name = f"kv_cache_sf[{i}]"
            address = tensor_memory.address(tensor, name, RunError)
            if address & self.scale_masks[i]:
                raise RunError(
                    f"{name} starts at {address:#x}: this kernel reads scales that start on {self.scale_masks[i] + 1} "
                    "bytes. Pass a tensor (or view) that does, such as a clone."
                )
            for other, output in zip(("out", "lse"), written, strict=True):
                if output is not None:
                    tensor_memory.check_apart(output, other, tensor, name, RunError)
            for holder in (self.scale_holder, *(bound.params for bound in self.parts[1:])):
                (holder.value_scales if i else holder.key_scales).data = address

    def _bind_gathered(self, copy: gather_rows.Copy | None) -> None:
        """Makes the attention kernel read what each run copies, or the cache again."""
        params, options = self.params, self.option_plan.options
        self.gathered = copy
        params.q_row_stride, params.q_head_stride = self.q_strides
        if copy is None:
            self._bind_views(self.cache_views)
            return
        self._bind_views(copy.views(options), reads_q=copy.q_address is None)
        copy.bind(self.gather, self.cache_views, options, params)
        params.k.data, params.v.data, params.q = copy.k, copy.v, copy.q_address

    def _bind_alignment(
        self, out_strides: tuple[int, int], k: kv_view.View, v: kv_view.View, starts: tuple[int, int]
    ) -> None:
        """Finds the bytes on which the rows of each tensor must start. In formats scales may follow a row of K or V, so
        that rows start on 8 bytes; a kernel that reads such rows reads them in both."""
        options, params = self.option_plan.options, self.params
        kernel = self.option_plan.prepared.choice.kernel.row_alignment
        rows = (
            ("q", (params.q_row_stride, params.q_head_stride), options.head_dim_qk, options.q_dtype),
            ("K", k[4:], k.head_dim, options.kv_dtype),
            ("V", v[4:], v.head_dim, options.kv_dtype),
            ("out", out_strides, options.head_dim_vo, options.out_dtype),
        )
        alignments, self.on_eight = {}, False
        for name, strides, dim, dtype in rows:
            dim = 16 if options.latent_row_format is not None and name in "KV" else dim  # which hold parts of 16 bytes
            alignments[name] = kv_view.row_alignment(kernel, dim, dtype.size)
            if options.has_formats and name in "KV":
                places = (*strides, starts["KV".index(name)])
                self.on_eight |= any(place % alignments[name] for place in places)
        if self.on_eight and all(part.prepared.has_on_eight for part in self.option_plan.parts):
            alignments |= {name: min(8, alignments[name]) for name in "KV"}
        for name, strides, _, dtype in rows:
            kv_view.check_alignment(tuple(strides), dtype.size, alignments[name], name)
        self._parts()  # refuses a cache that starts on 8 bytes if no kernel reads that
        self.alignment_masks = tuple(alignment - 1 for alignment in alignments.values())
        self.bound_run.alignment_masks[:] = self.alignment_masks

    def _parts(self) -> tuple[Part, ...]:
        parts = self.option_plan.parts
        if not self.on_eight:
            return parts
        return tuple(part._replace(prepared=part.prepared.on_eight(self.device)) for part in parts)

    def check_span(self, cache: Any) -> None:
        """Refuses a cache that spans more than a kernel of the newest plan can address."""
        for name, tensor in zip("KV", cache if isinstance(cache, tuple) else (cache,), strict=False):
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            span = (last + 1) * tensor.element_size()
            if span > self.most_cache_bytes:
                raise RunError(
                    f"{name} spans {span} bytes, but the plan's kernel reads at most {self.most_cache_bytes}: "
                    "pass a cache of fewer pages, or one in which a layer's pages follow each other."
                )

    def refresh(self, planner: Planner) -> None:
        """Switches to the newest plan. The caller sets `generation` once nothing about the run can be refused."""
        option_plan, batch = self.option_plan, planner.batch
        parts, options = self._parts(), option_plan.options
        self.requests = batch.requests if batch.capacity is None else batch.capacity.batch
        self.most_cache_bytes = min(part.prepared.choice.kernel.most_cache_bytes for part in parts)
        for bound in self.parts:
            params = bound.params
            params.kv_indices, params.custom_mask = batch.pages.address, batch.mask.address
            params.num_kv_indices = planner.kv_end if options.is_paged else 0
        plan, partials = option_plan.slot.memory.data_ptr(), batch.workspaces.partials(options.head_dim_vo)
        self.params.plan = plan + parts[0].offset  # kernels that copy may read it
        if option_plan.gathered is not None or self.gathered is not None:
            self._bind_gathered(option_plan.gathered)
        if len(parts) > len(self.parts):
            self.parts.append(self.parts[0].copy())
        self.bound_run.num_parts = len(parts)
        for part, bound, pointers in zip(parts, self.parts, self.bound_run.parts, strict=False):
            bound.use_plan(part, plan, *partials)
            bound.use_boxes(part.prepared, self.views, self.gathered)
            params = bound.params
            pointers.params, pointers.merge_params = ctypes.addressof(params), ctypes.addressof(bound.merge)
            if bound is not self.parts[0]:  # whose pointers _bind_views sets
                pointers.q = _address_of_q(params)
                pointers.k_view, pointers.v_view = ctypes.addressof(params.k), ctypes.addressof(params.v)
                pointers.key_scales = ctypes.addressof(params.key_scales)
                pointers.value_scales = ctypes.addressof(params.value_scales)
        if options.needs_variant:
            self.traced = trace(options, self.values.logits_soft_cap, self.device)
            fill_variant(self.variant, self.traced)
        self._list_launches(parts, planner.generation)

    def _list_launches(self, parts: tuple[Part, ...], generation: int) -> None:
        option_plan, launches, prepared = self.option_plan, self.launches, parts[0].prepared
        launches.clear()
        tiles = None
        if prepared.mask_tiles is not None:
            tiles = option_plan.mask_tiles.address
            self.params.lane_bits = option_plan.mask_tiles.lane_bits
            if not option_plan.mask_tiles.are_found(generation):
                launches.add_ahead(prepared.mask_tiles, tiles)
        if prepared.gather_rows is not None:
            launches.add_ahead(prepared.gather_rows, ctypes.addressof(self.gather))
        structs = (bound.addresses for bound in self.parts[: len(parts)])
        launches.add_parts(parts, structs, tiles, option_plan.fork)

    def set_trace(self, stamps: Sequence[torch.Tensor]) -> None:
        """Until the next plan, runs write clock stamps, one tensor for each part of the batch (run/stamps.py); no
        tensors: until now."""
        launches, parts = self.launches.attentions, self._parts()
        self.stamps = tuple(stamps)
        for i, (launch, bound, part) in enumerate(zip(launches, self.parts, parts, strict=False)):
            kernel = part.prepared.attention
            if stamps:
                kernel = jit.get_kernel(dataclasses.replace(kernel.spec, trace=True), self.device)
            launch.kernel = kernel.handle
            bound.params.trace = stamps[i].data_ptr() if stamps else None

    def point(self, q: torch.Tensor, cache: Any, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        """Sets and checks the addresses of a run that C cannot bind itself."""
        q_address, out_address = tensor_memory.address(q, "q", RunError), tensor_memory.address(out, "out", RunError)
        if cache.__class__ is tuple:
            k_address, v_address = (
                tensor_memory.address(cache[0], "k", RunError),
                tensor_memory.address(cache[1], "v", RunError),
            )
        else:
            k_address = tensor_memory.address(cache, "paged_kv_cache", RunError)
            v_address = k_address + self.fused_offset
        self._check_starts(q_address, k_address, v_address, out_address)
        lse_address = None if lse is None else tensor_memory.address(lse, "lse", RunError)
        native.load().fp_point(self.address, q_address, k_address, v_address, out_address, lse_address)

    def resize(self, q: torch.Tensor, cache: Any) -> None:
        """Takes as many rows and pages as the tensors have: in tensor maps, and in the kernel that copies pages."""
        if self.gathered is not None and not isinstance(self.gather, native.GatherRowsParams):
            self.gather.num_pages = _leading(cache)
        for bound in self.parts:
            if bound.boxes is not None:
                self._resize(bound.boxes, q, cache)

    def _resize(self, found: native.KvBoxes, q: torch.Tensor, cache: Any) -> None:
        tensor_maps.resize_rows(found, q.shape[0])
        copy = self.gathered
        for form, name in ((found.k, "K"), (found.v, "V")):
            if copy is not None and self.views[name] is not self.cache_views[name]:
                tensor_maps.resize_cache(form, self.views[name].num_pages, copy.is_paged, "NHD")
            else:
                is_paged = self.option_plan.options.is_paged
                tensor_maps.resize_cache(form, _leading(cache), is_paged, self.kv_layout)

    def _check_starts(self, *addresses: int) -> None:
        for name, address, mask in zip(("q", "K", "V", "out"), addresses, self.alignment_masks, strict=True):
            if address & mask:
                raise RunError(
                    f"{name} starts at {address:#x}: this kernel reads rows that start on {mask + 1} bytes. "
                    "Pass a tensor (or view) that does, such as a clone."
                )

    def set_pdl(self, enable_pdl: bool | None) -> None:
        """Sets enable_pdl; None means True. On cards whose kernels do not wait for their predecessor (no programmatic
        dependent launch, or kernels of PTX) a launch never begins early."""
        is_wanted = enable_pdl is None or checks.flag("enable_pdl", enable_pdl, RunError)
        self.enable_pdl, self.args.enable_pdl = enable_pdl, is_wanted and devices.of(self.device).has_pdl

    def set_scales(self, scales: Scales, cache: Any) -> None:
        """Sets the scales of q, k, v and the output."""
        self.scales.set(scales, self.requests, _leading(cache), self.cache_views["K"].page_size)

    def set_sinks(self, sinks: torch.Tensor | None) -> None:
        """Sinks, [num_qo_heads] fp32 logits that join every row's denominator."""
        if sinks is not None:
            checks.sinks(sinks, self.option_plan.options.num_q_heads, self.device)
        address = None if sinks is None else tensor_memory.address(sinks, "sinks", RunError)
        for bound in self.parts:
            bound.params.sinks = address
        self.sinks = sinks


def _address_of_q(params: native.AttentionParams | native.RotatePagesParams) -> int:
    return ctypes.addressof(params) + type(params).q.offset


def _leading(cache: Any) -> int:
    """Pages of a cache, or tokens of a ragged one."""
    return len(cache[0] if cache.__class__ is tuple else cache)
