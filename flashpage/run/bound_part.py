"""The structs of one attention launch and the merge of its partial results."""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING

from .. import native
from ..base.kv_view import View
from ..kernels import tensor_maps
from ..kernels.options import Options
from ..plan.launches import Addresses

if TYPE_CHECKING:
    from ..plan.gather_rows import Copy
    from ..plan.mixed_batch import Part
    from ..plan.prepared_kernels import PreparedKernels


class BoundPart:
    """The structs of the launches of one part of a batch; the parts differ only in the plan and the boxes."""

    __slots__ = ("_bound_to", "_options", "boxes", "merge", "params")

    def __init__(self, options: Options) -> None:
        self._options = options
        self.params = native.AttentionParams()
        self.merge = native.MergeParams(is_batch_invariant=options.is_batch_invariant)
        self.boxes: native.KvBoxes | None = None
        self._bound_to: tuple[PreparedKernels | None, bool, int] = (None, False, 0)

    @property
    def addresses(self) -> Addresses:
        """Addresses of the structs."""
        boxes = None if self.boxes is None else ctypes.addressof(self.boxes)
        return Addresses(ctypes.addressof(self.params), ctypes.addressof(self.merge), boxes)

    def copy(self) -> BoundPart:
        """A copy for another part, whose plan and boxes must still be set."""
        other = BoundPart(self._options)
        ctypes.pointer(other.params)[0], ctypes.pointer(other.merge)[0] = self.params, self.merge
        return other

    def use_plan(self, part: Part, plan: int, partial_out: int, partial_lse: int) -> None:
        """Sets the addresses of the plan in its slot and of the first part's partial results."""
        params, merge, row = self.params, self.merge, part.partial_row
        params.plan = merge.plan = plan + part.offset
        params.partial_out = merge.partial_out = partial_out + row * self._options.head_dim_vo * 4
        params.partial_lse = merge.partial_lse = partial_lse + row * 4
        params.most_merge_rounds = merge.most_merge_rounds = part.prepared.most_merge_rounds

    def use_boxes(self, prepared: PreparedKernels, views: dict[str, View], gathered: Copy | None) -> None:
        """Boxes for the kernel's loader. A dimension of one token has a separate stride (tensor_maps.box_form)."""
        wanted = prepared, gathered is not None and gathered.end > 1, views["V"].head_dim
        if wanted != self._bound_to:
            self._bound_to = (None, False, 0)  # if these are refused, the next run binds again
            self.bind_boxes(prepared, views)
            self._bound_to = wanted

    def bind_boxes(self, prepared: PreparedKernels, views: dict[str, View]) -> None:
        """Makes tensor maps of K, V, q and out if the kernel uses them; sets tokens and rows of their boxes in
        `params`."""
        spec, options, params = prepared.choice.spec, prepared.attention_options, self.params
        tile, is_paged = spec.tile, spec.kv_source != "ragged"  # rows that were gathered from pages are ragged
        page_size = options.page_size if is_paged else 0
        element_bytes = options.kv_dtype.size
        tokens = tensor_maps.loader_tokens(spec.loader, page_size, tile.tile_kv, *options.row_bytes) if tile else 0
        found, line = native.KvBoxes(), prepared.choice.kernel.line_bytes(spec)
        params.box_tokens, params.query_box_rows, params.out_box_rows = tokens, 0, 0
        params.cta_rows = prepared.schedule.tile_q // spec.ctas
        if tokens:
            form_of = functools.partial(
                tensor_maps.box_form, element_bytes=element_bytes, tokens=tokens, line=line, is_paged=is_paged
            )
            (k, k_view), (v, v_view) = views.items()
            found.k = form_of(k_view, k)
            if spec.loader == "columns":  # boxes of half the columns and all tokens of a tile
                found.v = form_of(v_view, v, tokens=options.head_dim_vo // 2, is_paged=False)
            else:
                found.v = form_of(v_view, v)
        kernel = prepared.choice.kernel
        if tile and kernel.row_boxes and spec.loader != "converted":
            self._bind_row_boxes(found, has_out=spec.loader not in ("transposed", "columns"))
        if tile and kernel.query_boxes(spec):
            self._bind_row_boxes(found, has_out=False, may_divide=True)
        has_boxes = tokens or params.query_box_rows or params.out_box_rows
        self.boxes = found if has_boxes else None

    def _bind_row_boxes(self, found: native.KvBoxes, *, has_out: bool, may_divide: bool = False) -> None:
        """Makes tensor maps of q and out if they can have one; sets rows of their boxes in `params`."""
        options, params = self._options, self.params
        form_of = functools.partial(tensor_maps.rows_form, group_size=options.group_size, unit_rows=params.cta_rows)
        form = form_of(
            *(options.num_q_heads, options.head_dim_qk),
            element_bytes=options.q_dtype.size,
            strides=(params.q_row_stride, params.q_head_stride),
            may_divide=may_divide,
        )
        if form is not None:
            found.q, params.query_box_rows = form, form.box[2]
        form = form_of(
            *(options.num_q_heads, options.head_dim_vo),
            element_bytes=options.out_dtype.size,
            strides=(params.out_row_stride, params.out_head_stride),
        )
        if has_out and form is not None:
            found.out, params.out_box_rows = form, form.box[2]
