"""The scales of q, K, V and the output in the structs of a run."""

from __future__ import annotations

from typing import Any

import torch

from ..base import checks
from ..base.errors import RunError
from ..kernels import latent_formats
from ..kernels.options import Options
from .bound_part import BoundPart
from .checks import Scales
from .scale_arguments import ScaleMarks, marks_of, out_scale_of, scale_of, token_scales

_FIELDS = ("q_scale", "k_scale", "v_scale", "out_scale")  # of AttentionParams, in the order of Scales


class BoundScales:
    """Sets the scales of runs.

    Args:
        parts: the structs, to which later plans may add some.
        sm_scale: multiplies scores in addition to the scales of q and K.

    Attributes:
        given: of the last run; () if there were tensors, whose values or addresses may differ in the next one.
    """

    __slots__ = ("_device", "_marks", "_options", "_parts", "_sm_scale", "given")

    def __init__(self, parts: list[BoundPart], options: Options, sm_scale: float, device: torch.device) -> None:
        self._parts, self._options, self._sm_scale, self._device = parts, options, sm_scale, device
        self.given: Scales = ()
        self._marks: ScaleMarks | None = None

    def take(self, scales: Scales) -> bool:
        """Takes scales that need no checks: the last run's, or tensors of one value in place of the last run's, because
        each layer has its own. False: call `set`."""
        last = self._marks
        if last is None or (marks := marks_of(scales, self._device)) is None:
            return False
        if marks == last:
            return True
        if len(marks) != len(last):
            return False
        moved = []
        for name, old, new in zip(_FIELDS, last, marks, strict=False):
            if new != old:
                if old.__class__ is not tuple or new.__class__ is not tuple:
                    return False
                moved.append((name, new[0]))
        for part in self._parts:
            for name, address in moved:
                setattr(part.params, name, address)
        self._marks = marks
        return True

    def set(self, scales: Scales, requests: int, pages: int, page_size: int) -> None:
        """Checks and sets scales: numbers go into the scales of score and output; the kernel reads tensors, which may
        have an entry for each of `requests`, or for each token of the cache."""
        if self.take(scales):
            return
        if self._options.latent_format == latent_formats.SCALED:
            self._set_latent(scales, pages, page_size)
        else:
            self._set(scales, requests)
        self.given = () if any(isinstance(scale, torch.Tensor) for scale in scales) else scales
        self._marks = marks_of(scales, self._device)

    def _set(self, scales: Scales, requests: int) -> None:
        options, device = self._options, self._device
        q, *q_scale = scale_of(scales[0], "q_scale", options.num_q_heads, device, requests)
        k, *k_scale = scale_of(scales[1], "k_scale", options.num_kv_heads, device, requests)
        v, *v_scale = scale_of(scales[2], "v_scale", options.num_kv_heads, device, requests)
        of_out = out_scale_of(scales[3] if len(scales) > 3 else None, options.out_dtype, device)
        score_scale = checks.real("sm_scale * q_scale * k_scale", self._sm_scale * q * k, error=RunError)
        value_scale = checks.real("v_scale / o_scale", v / of_out.number, error=RunError)
        for params in (part.params for part in self._parts):
            params.q_scale, params.q_scale_stride, params.q_scale_request_stride = q_scale
            params.k_scale, params.k_scale_stride, params.k_scale_request_stride = k_scale
            params.v_scale, params.v_scale_stride, params.v_scale_request_stride = v_scale
            params.score_scale, params.value_scale, params.out_scale = score_scale, value_scale, of_out.address

    def _set_latent(self, scales: Scales, pages: int, page_size: int) -> None:
        """Sets the scales of fp8 rows. A number of the shared columns goes into the scales of score and output, and
        those of the tail are relative to it; the kernel applies tensors to elements."""
        shared: Any
        _, shared, tail = scales
        if isinstance(shared, torch.Tensor) and shared.dim() == 3:
            columns = self._options.head_dim_vo
            k, *k_scale = token_scales(shared, (pages, page_size, columns // 128), columns, self._device)
        else:
            k, *k_scale = scale_of(shared, "k_scale", 1, self._device)
        v, *v_scale = scale_of(tail, "v_scale", 1, self._device)
        if not k > 0:
            raise RunError(f"k_scale={k}: pass a positive number.")
        for params in (part.params for part in self._parts):
            params.k_scale, params.k_scale_stride = k_scale[:2]
            params.v_scale, params.v_scale_stride = v_scale[:2]
            params.score_scale, params.value_scale, params.tail_scale = self._sm_scale * k, k, v / k
