"""Writing rows of K and V in formats with scales: new tokens are quantised as they are written to their pages."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from .. import jit, native
from ..base import checks, kv_view, tensor_memory
from ..base.dtypes import DType
from ..base.errors import CapabilityError, RunError
from ..base.memory import is_capturing
from ..kernels import kv_formats
from ..kernels.kv_formats import KvFormat
from ..kernels.spec import KernelSpec
from ..run.checks import check_places, has_pages
from . import operators
from .append_places import AppendPlaces
from .row_launches import launch_rows

WIDE = (torch.float16, torch.bfloat16, torch.float32)  # types of rows that are quantised


Slots = torch.Tensor  # contiguous int32: page * page_size + token in the page, of each row


class QuantisedWrite:
    """New rows in 16 or 32 bits, and the cache that gets them; everything but the places is checked."""

    # Whether scales on a card are read and judged, which waits for them; in a graph capture the kernel judges them.
    waits_for_scales = False

    def __init__(
        self,
        rows: tuple[torch.Tensor, torch.Tensor],
        cache: Any,
        kv_cache_sf: Any,
        kv_format: Any,
        kv_layout: str,
    ) -> None:
        self._rows, self._layout = rows, kv_layout
        self.device, self.nnz = self._check_rows(), len(rows[0])
        self._stored = kv_formats.check(kv_format, None, DType.of(rows[0].dtype))
        names = (self._stored.k_format, self._stored.v_format)
        if self._stored.kv_dtype is not DType.BYTES:
            raise RunError("kv_format=None: pass a name, such as 'nvfp4', or a pair for K and V.")
        self.formats = tuple(kv_formats.find(name, DType.BYTES) for name in names)
        names_of_dims = ("append_key's head_dim", "append_value's head_dim")
        kv_formats.check_columns(self._stored, rows[0].shape[2], rows[1].shape[2], names_of_dims)
        if kv_cache_sf is None and not all(side.is_plain for side in self.formats):
            kinds = dict.fromkeys(side.scales[0] for side in self.formats if side.scales)
            raise RunError(
                f"kv_cache_sf=None: rows of {' and '.join(dict.fromkeys(names))} have scales: pass "
                f"kv_cache_sf=(k_sf, v_sf) of {' and '.join(kinds)}."
            )
        self._parts = kv_view.with_scales(cache, (None, None) if kv_cache_sf is None else kv_cache_sf)
        self.views, self._scale_views = self._check_cache(kv_layout)

    def _check_rows(self) -> torch.device:
        key, value = self._rows
        operators.check_plain(("append_key", key), ("append_value", value))
        for name, tensor in (("append_key", key), ("append_value", value)):
            if checks.tensor(tensor, name, RunError).dim() != 3 or tensor.dtype not in WIDE:
                raise RunError(
                    f"{name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}: pass [nnz, num_kv_heads, "
                    "head_dim] of float16, bfloat16 or float32."
                )
            checks.same_device(tensor, key.device, name, RunError)
            checks.dense_last(tensor, name, RunError)
        if key.shape[:2] != value.shape[:2] or key.dtype != value.dtype:
            raise RunError(
                f"append_key has shape {tuple(key.shape)} and dtype {key.dtype}, append_value {tuple(value.shape)} and "
                f"{value.dtype}: pass the same rows, heads and type."
            )
        return key.device

    def _check_cache(self, kv_layout: str) -> tuple[list[kv_view.View], list[kv_view.View | None]]:
        """K and V, and their scales, by strides in bytes."""
        halves, scales = self._parts[:2], self._parts[2:]
        views = kv_view.paged_views(halves, kv_layout)
        found, found_scales = [], []
        for i, (side, view, tensor) in enumerate(zip(self.formats, views, halves, strict=True)):
            name, rows = f"paged_kv_cache[{i}]", self._rows[i]
            columns = side.stored_columns(rows.shape[2])
            self._check_written(tensor, name, side.stored, f"as {side.name} is stored")
            if (view.num_heads, view.head_dim) != (rows.shape[1], columns):
                raise RunError(
                    f"{name} has shape {tuple(tensor.shape)} ({kv_layout}), which does not fit rows of "
                    f"{tuple(rows.shape[1:])}: {side.name} needs {rows.shape[1]} heads of {columns} entries."
                )
            found.append(kv_view.in_bytes(view, side.stored_size))
            found_scales.append(self._check_scales(i, side, view, scales[i], kv_layout))
        self._check_apart()
        return found, found_scales

    def _check_scales(
        self, i: int, side: KvFormat, rows: kv_view.View, scales: torch.Tensor | None, kv_layout: str
    ) -> kv_view.View | None:
        name = f"kv_cache_sf[{i}]"
        if side.is_plain or scales is None:
            if side.is_plain and scales is None:
                return None
            raise RunError(
                f"{name} is {'None' if scales is None else 'given'} but {side.name} has "
                f"{'no scales: pass None' if side.is_plain else f'scales of {side.scales[0]}: pass them'}."
            )
        self._check_written(scales, name, side.scales, f"as the scales of {side.name} are stored")
        view = kv_view.scales_view(scales, self._parts[i].dim(), kv_layout, True, name)
        columns = self._rows[i].shape[2]
        if view[:4] != (*rows[:3], side.row_scales(columns)):
            raise RunError(
                f"{name} has shape {tuple(scales.shape)}, which does not fit paged_kv_cache[{i}] of shape "
                f"{tuple(self._parts[i].shape)}: pass {side.scales_shape(self._parts[i].shape, columns)}."
            )
        return kv_view.in_bytes(view, side.scale_size)

    def _check_written(self, tensor: torch.Tensor, name: str, types: tuple[str, ...], why: str) -> None:
        operators.check_plain((name, tensor))
        checks.same_device(tensor, self.device, name, RunError)
        tensor_memory.check_written(tensor, name, RunError)
        if str(tensor.dtype).removeprefix("torch.") not in types:
            raise RunError(f"{name} has dtype {tensor.dtype}: pass {types[0]}, {why}.")

    def _check_apart(self) -> None:
        """Each of the written tensors has memory of its own; they may be views of one."""
        if operators.is_traced():
            return
        names = ("paged_kv_cache[0]", "paged_kv_cache[1]", "kv_cache_sf[0]", "kv_cache_sf[1]")
        written = [(name, part) for name, part in zip(names, self._parts, strict=True) if part is not None]
        for i, (name, part) in enumerate(written):
            for other_name, other in written[:i]:
                if part.numel() and part.data_ptr() == other.data_ptr():
                    raise RunError(f"{name} begins where {other_name} does, and both are written: pass two tensors.")

    def check_slots(self, slots: torch.Tensor) -> None:
        """Refuses slots outside the pages on the CPU."""
        count = self.views[0].num_pages * self.views[0].page_size
        if slots.is_cpu and slots.numel() and not operators.is_traced() and int(slots.max()) >= count:
            raise RunError(
                f"slot_mapping reaches {int(slots.max())} but the cache has {count} slots: "
                "pass page * page_size + token."
            )

    def write(self, places: AppendPlaces | Slots, k_scale: Any, v_scale: Any) -> None:
        """Elements are divided by the scales of the tensors, numbers or float32 tensors of one entry (None: 1)."""
        positions = places if isinstance(places, torch.Tensor) else places.positions
        if operators.is_traced():
            self._call_operator(places, k_scale, v_scale)
            return
        params = native.AppendQuantisedParams(
            append_key=self._rows[0].data_ptr(),
            append_value=self._rows[1].data_ptr(),
            key_row_stride=self._rows[0].stride(0),
            key_head_stride=self._rows[0].stride(1),
            value_row_stride=self._rows[1].stride(0),
            value_head_stride=self._rows[1].stride(1),
            nnz=len(positions),
            num_kv_heads=self._rows[0].shape[1],
            rotates_keys=self.formats[0].is_hadamard,
            stops_at_bad_scales=self.waits_for_scales and is_capturing(self.device),
            num_slots=min(self.views[0].num_pages * self.views[0].page_size, 2**31 - 1),
            page=native.make_fast_div(self.views[0].page_size),
            **({"positions": places.data_ptr()} if isinstance(places, torch.Tensor) else places.addresses()),
        )
        for field, tensor, view in zip(
            ("k", "v", "key_scales", "value_scales"), self._parts, (*self.views, *self._scale_views), strict=True
        ):
            if view is not None:
                setattr(params, field, native.KvView(tensor.data_ptr(), *view[4:7]))
        params.key_divisor, params.k_scale = self._scale(k_scale, "k_scale")
        params.value_divisor, params.v_scale = self._scale(v_scale, "v_scale")
        if params.nnz and params.num_kv_heads and self._have_pages(places):
            self._launch(params)
        torch.autograd.graph.increment_version([part for part in self._parts if part is not None])

    def _call_operator(self, places: AppendPlaces | Slots, k_scale: Any, v_scale: Any) -> None:
        scales = (k_scale, v_scale)
        lists: tuple[torch.Tensor | None, ...] = (None, None, None)
        if isinstance(places, torch.Tensor):
            positions = places
        else:
            positions, lists = places.positions, (places.batch_indices, places.kv_indices, places.kv_indptr)
        torch.ops.flashpage.append_quantised(
            *self._rows,
            positions,
            *lists,
            self._parts[:2],
            [part for part in self._parts[2:] if part is not None],
            *(side.name for side in self.formats),
            self._layout,
            *(None if isinstance(scale, torch.Tensor) else scale for scale in scales),
            *(scale if isinstance(scale, torch.Tensor) else None for scale in scales),
            self.waits_for_scales,
        )

    def _scale(self, value: Any, name: str) -> tuple[float, int | None]:
        """The number and the address of a scale."""
        if value is None:
            return 1.0, None
        address = tensor_memory.address(value, name, RunError) if isinstance(value, torch.Tensor) else None
        is_number = address is None or value.is_cpu
        if is_number and self.waits_for_scales and is_capturing(self.device):
            raise RunError(
                f"{name}={checks.shown(value)} would stay as it is in a CUDA graph capture: pass a float32 tensor on "
                f"{self.device}."
            )
        if is_number:
            return self._judged(value if address is None else _entry(value, name), name), None
        checks.same_device(value, self.device, name, RunError)
        if value.numel() != 1 or value.dtype != torch.float32:
            raise RunError(f"{name} has {value.numel()} entries of {value.dtype}: pass one float32.")
        if self.waits_for_scales and not is_capturing(self.device):
            self._judged(value.item(), name)
        return 1.0, address

    @staticmethod
    def _judged(value: Any, name: str) -> float:
        if isinstance(value, float) and not 0 < value < float("inf"):
            raise RunError(f"{name}={value}: pass a positive finite number, by which elements are divided.")
        return checks.real(name, value, positive=True, error=RunError)

    def _have_pages(self, places: AppendPlaces | Slots) -> bool:
        """Whether tokens have pages at all; on the CPU each must have a right one."""
        if isinstance(places, torch.Tensor):
            return True
        if self.device.type != "cpu":
            return has_pages(places.batch_indices, places.kv_indices)
        given = (places.batch_indices >= 0).nonzero().squeeze(1)
        positions = places.positions[given]
        check_places(places.batch_indices[given], positions, places.kv_indices, places.kv_indptr, self.views[0])
        return True

    def _launch(self, params: native.AppendQuantisedParams) -> None:
        key, value = self._rows
        is_here = self.device.type == "cpu"
        spec = KernelSpec(
            "cpu_append_quantised" if is_here else "append_quantised",
            q_dtype=DType.of(key.dtype),
            kv_dtype=DType.BYTES,
            head_dim_qk=key.shape[2],
            head_dim_vo=value.shape[2],
            k_format=kv_formats.unrotated(self.formats[0].name),
            v_format=self.formats[1].name,
        )
        for name, dim in (("append_key", key.shape[2]), ("append_value", value.shape[2])):
            if dim % 8 or dim > 512:
                raise CapabilityError(f"{name} has a head_dim of {dim}: the kernel takes multiples of 8 up to 512.")
        kernel, address = jit.get_kernel(spec, self.device), ctypes.addressof(params)
        if not is_here:
            row_lanes = max(1 << (-(-dim // 16) - 1).bit_length() for dim in (key.shape[2], value.shape[2]))
            warps = -(-params.nnz * params.num_kv_heads * row_lanes // 32)  # a lane has 16 columns of a row
            launch_rows(kernel, address, warps, self.device)
            return
        run = native.RunArgs(count=1)
        run.launches[0].kernel, run.launches[0].params, run.launches[0].grid = kernel.handle, address, params.nnz
        native.check(native.load().fp_run(ctypes.addressof(run)))


def _entry(value: Any, name: str) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.numel() != 1:
        raise RunError(f"{name} has {value.numel()} entries: pass one.")
    return value.item()


def _append_quantised(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    positions: torch.Tensor,
    batch_indices: torch.Tensor | None,
    kv_indices: torch.Tensor | None,
    kv_indptr: torch.Tensor | None,
    cache: list[torch.Tensor],
    kv_cache_sf: list[torch.Tensor],
    k_format: str,
    v_format: str,
    kv_layout: str,
    k_scale: float | None,
    v_scale: float | None,
    k_scales: torch.Tensor | None,
    v_scales: torch.Tensor | None,
    waits_for_scales: bool,
) -> None:
    left = list(kv_cache_sf)  # those of sides that have scales
    sides = [left.pop(0) if name in kv_formats.FORMATS else None for name in (k_format, v_format)]
    write = QuantisedWrite((append_key, append_value), tuple(cache), tuple(sides), (k_format, v_format), kv_layout)
    write.waits_for_scales = waits_for_scales
    places: AppendPlaces | Slots = positions
    if batch_indices is None or kv_indices is None or kv_indptr is None:
        write.check_slots(positions)
    else:
        places = AppendPlaces(
            batch_indices=batch_indices, positions=positions, kv_indices=kv_indices, kv_indptr=kv_indptr
        )
    write.write(places, k_scale if k_scales is None else k_scales, v_scale if v_scales is None else v_scales)


operators.define(
    "append_quantised",
    "(Tensor append_key, Tensor append_value, Tensor positions, Tensor? batch_indices, Tensor? kv_indices, "
    "Tensor? kv_indptr, Tensor(a!)[] cache, Tensor(b!)[] kv_cache_sf, str k_format, str v_format, str kv_layout, "
    "float? k_scale, float? v_scale, Tensor? k_scales, Tensor? v_scales, bool waits_for_scales) -> ()",
    _append_quantised,
)
