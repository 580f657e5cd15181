"""Hand-made plans and direct calls of a CPU kernel, to test the kernel without planner and wrappers."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import itertools
import math

import numpy as np
import reference
import torch
from caches import poison

from flashpage import native
from flashpage.base.dtypes import DType
from flashpage.jit import Target, build_specs
from flashpage.kernels.spec import KernelSpec, VariantSpec
from flashpage.kernels.tile import Tile
from flashpage.native import records as plan_bytes


@dataclasses.dataclass(frozen=True)
class KernelCase:
    """One row of the kernel's table."""

    reason: str
    q_lens: tuple[int, ...] = (3, 1, 7)
    kv_lens: tuple[int, ...] = (70, 1, 33)
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (64, 64)
    q_dtype: str = "float32"
    kv_dtype: str = ""  # q_dtype
    out_dtype: str = ""  # q_dtype
    page_size: int = 16  # 0: ragged
    tile: tuple[int, int] = (16, 64)
    piece: int = 0  # tokens; 0: units are not cut
    causal: bool = False
    window_left: int = -1
    has_mask: bool = False
    has_sinks: bool = False
    has_scales: bool = False
    rope: tuple[float, float] | None = None
    variant: VariantSpec = VariantSpec()  # noqa: RUF009

    @property
    def spec(self) -> KernelSpec:
        return KernelSpec(
            "cpu_attention",
            q_dtype=DType(self.q_dtype),
            kv_dtype=DType(self.kv_dtype or self.q_dtype),
            out_dtype=DType(self.out_dtype or self.q_dtype),
            head_dim_qk=self.dims[0],
            head_dim_vo=self.dims[1],
            kv_source="paged" if self.page_size else "ragged",
            mask_source="packed_bits" if self.has_mask else "implicit",
            position_encoding="rope" if self.rope else "none",
            tile=Tile(*self.tile, 1, 1, 1),
            variant=self.variant,
        )


@functools.cache
def load_kernel(spec: KernelSpec, target: Target) -> ctypes.CDLL:
    (result,) = build_specs([spec], [target])
    if result.error:
        raise result.error
    return ctypes.CDLL(str(result.entry.path))


class Inputs:
    """Random tensors of a case; KV memory that holds no token is NaN."""

    def __init__(self, case: KernelCase, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int, dtype: str = "float32") -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(DType(dtype).torch)

        num_q_heads, num_kv_heads = case.heads
        kv_dtype = case.kv_dtype or case.q_dtype
        self.q = normal(sum(case.q_lens), num_q_heads, case.dims[0], dtype=case.q_dtype)
        self.k = [normal(n, num_kv_heads, case.dims[0], dtype=kv_dtype) for n in case.kv_lens]
        self.v = [normal(n, num_kv_heads, case.dims[1], dtype=kv_dtype) for n in case.kv_lens]
        self.masks = [
            torch.rand(q, n, generator=generator) < 0.6 for q, n in zip(case.q_lens, case.kv_lens, strict=True)
        ]
        for mask in self.masks:
            mask[:1] = False  # one row of each request sees nothing
        self.sinks = normal(num_q_heads)
        self.scales = [0.5 + torch.rand(n, generator=generator) for n in (num_q_heads, num_kv_heads, num_kv_heads)]
        self._fill_memory(case, generator)

    def _fill_memory(self, case: KernelCase, generator: torch.Generator) -> None:
        size = case.page_size or 1
        pages = [math.ceil(n / size) for n in case.kv_lens]
        self.first_page = np.concatenate([[0], np.cumsum(pages)])
        count = int(self.first_page[-1]) + 3
        self.indices = torch.randperm(count, generator=generator)[: count - 3].to(torch.int32)
        if not case.page_size:
            self.indices = torch.arange(count, dtype=torch.int32)
        memory = []
        for rows, dim in ((self.k, case.dims[0]), (self.v, case.dims[1])):
            # Heads before tokens, and a gap after each row, so that strides differ from a contiguous tensor's.
            cache = poison(torch.empty(count, case.heads[1], size, dim + 8, dtype=rows[0].dtype)).transpose(1, 2)
            for request, tensor in enumerate(rows):
                for token in range(len(tensor)):
                    page = self.indices[self.first_page[request] + token // size]
                    cache[page, token % size, :, :dim] = tensor[token]
            memory.append(cache)
        self.k_cache, self.v_cache = memory


def make_plan(case: KernelCase) -> tuple[np.ndarray, list[tuple[int, int, int, int]]]:
    """A plan of two CTAs, and for each partial row its (request, q head, row, piece)."""
    items, partials = [], []
    group = case.heads[0] // case.heads[1]
    tile_q = case.tile[0]
    mask_offset = q_begin = kv_begin = 0
    for request, (q_len, kv_len) in enumerate(zip(case.q_lens, case.kv_lens, strict=True)):
        size = case.page_size or 1
        common = {"kv_offset": kv_begin, "mask_offset": mask_offset, "request": request, "q_begin": q_begin}
        common |= {"q_len": q_len, "kv_len": kv_len, "partial_row": -1}
        tiles = math.ceil(q_len * group / tile_q)
        if not case.piece:
            items.append(common | {"num_units": tiles * case.heads[1], "kv_end": kv_len})
        for unit in range(tiles * case.heads[1] if case.piece else 0):
            first, kv_head = unit % tiles * tile_q, unit // tiles
            for piece in range(max(math.ceil(kv_len / case.piece), 1)):
                begin, end = piece * case.piece, min((piece + 1) * case.piece, kv_len)
                cut = {"num_units": 1, "first_packed_row": first, "kv_head": kv_head, "piece": piece}
                items.append(common | cut | {"kv_begin": begin, "kv_end": end, "partial_row": len(partials)})
                rows = range(first, min(first + tile_q, q_len * group))
                partials += [(request, kv_head * group + p % group, p // group, piece) for p in rows]
        mask_offset += math.ceil(q_len * kv_len / 8)
        q_begin += q_len
        kv_begin += math.ceil(kv_len / size)
    records = np.zeros(len(items), plan_bytes.WORK_ITEM)
    for record, item in zip(records, items, strict=True):
        for name, value in item.items():
            record[name] = value
    ctas = np.zeros(2, plan_bytes.CTA_START)
    ctas["items"]["begin"], ctas["items"]["end"] = [0, len(items) // 2], [len(items) // 2, len(items)]
    header = np.zeros(1, plan_bytes.PLAN_HEADER)
    header["num_ctas"], header["num_items"] = 2, len(items)
    header["items_offset"] = header.nbytes + ctas.nbytes
    return np.concatenate([part.view(np.uint8) for part in (header, ctas, records)]), partials


def _view(tensor: torch.Tensor, is_paged: bool) -> native.KvView:
    page, token, head, _ = tensor.stride()
    return native.KvView(tensor.data_ptr(), page, token if is_paged else page, head)


def run(case: KernelCase, inputs: Inputs, library: ctypes.CDLL) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Runs the kernel; returns (out, lse) of every request."""
    num_q_heads, num_kv_heads = case.heads
    out = poison(torch.empty(*inputs.q.shape[:2], case.dims[1], dtype=case.spec.out_dtype.torch))
    lse = poison(torch.empty(inputs.q.shape[:2], dtype=torch.float32))
    plan, partials = make_plan(case)
    partial_out = poison(torch.empty(max(len(partials), 1), case.dims[1]))
    partial_lse = poison(torch.empty(max(len(partials), 1)))
    bits = np.concatenate([np.packbits(mask.numpy().reshape(-1), bitorder="little") for mask in inputs.masks])
    params = native.AttentionParams(q=inputs.q.data_ptr(), out=out.data_ptr(), lse=lse.data_ptr())
    params.q_row_stride, params.q_head_stride, _ = inputs.q.stride()
    params.out_row_stride, params.out_head_stride, _ = out.stride()
    params.k, params.v = (_view(t, case.page_size > 0) for t in (inputs.k_cache, inputs.v_cache))
    params.kv_indices, params.plan = inputs.indices.data_ptr(), plan.ctypes.data
    params.partial_out, params.partial_lse = partial_out.data_ptr(), partial_lse.data_ptr()
    params.custom_mask = bits.ctypes.data
    params.sinks = inputs.sinks.data_ptr() if case.has_sinks else None
    if case.has_scales:
        params.q_scale, params.k_scale, params.v_scale = (scale.data_ptr() for scale in inputs.scales)
        params.q_scale_stride = params.k_scale_stride = params.v_scale_stride = 1
    params.score_scale, params.value_scale = case.dims[0] ** -0.5, 2.0 if case.has_scales else 1.0
    params.num_q_heads, params.num_kv_heads = num_q_heads, num_kv_heads
    params.causal, params.window_left = case.causal, case.window_left
    params.rope_scale, params.rope_theta = case.rope or (1.0, 1.0)
    params.group = native.make_fast_div(num_q_heads // num_kv_heads)
    params.page = native.make_fast_div(case.page_size or 1)
    for cta in range(2):
        library.flashpage_cpu_attention(ctypes.byref(params), ctypes.byref(variant_args(case, inputs)), cta, cta + 1)
    starts = np.concatenate([[0], np.cumsum(case.q_lens)])
    results = [(out[a:b], lse[a:b]) for a, b in itertools.pairwise(starts)]
    return _merged(results, partials, partial_out, partial_lse) if case.piece else results


def _merged(results, partials, partial_out, partial_lse):
    pieces: dict[tuple[int, int, int], list[int]] = {}
    for index, (request, head, row, _) in enumerate(partials):
        pieces.setdefault((request, head, row), []).append(index)
    for (request, head, row), found in pieces.items():
        merged, total = reference.merge(
            [partial_out[i].reshape(1, 1, -1) for i in found], [partial_lse[i].reshape(1, 1) for i in found]
        )
        out, lse = results[request]
        out[row, head], lse[row, head] = merged[0, 0].to(out.dtype), total[0, 0]
    return results


def variant_args(case: KernelCase, inputs: Inputs) -> native.VariantArgs:
    """Arguments of the table's variants: the sinks' vector as their one tensor, and 30 as their one scalar."""
    args = native.VariantArgs()
    args.tensors[0].data, args.tensors[0].stride[0] = inputs.sinks.data_ptr(), 1
    args.scalars[0] = 30.0
    return args
