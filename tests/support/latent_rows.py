"""Latent rows in fp8: their exact values, and how a cache holds them."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from caches import Cache, Shape, write_pages
from cases.case import Case
from latent_bytes import E4M3, LARGEST, SCALE_COLUMNS, to_e4m3, v32_rows

from flashpage import native
from flashpage.base.dtypes import DType
from flashpage.kernels import latent_formats
from flashpage.kernels.options import Options

# Scales of tokens by the end of a row_format: those that change no digit, and others.
_TABLES = {
    "": (0.5, 1.0, 0.25, 1.0, 0.5),
    "uneven": (0.3, 0.77, 0.9, 0.41, 0.6),
    "decades": (0.01, 0.1, 1.0, 0.03, 0.3),
}
_NUMBERS, _TENSORS = {"ckv_scale": 0.75, "kpe_scale": 0.375}, {"ckv_scale": 0.5, "kpe_scale": 0.25}
_TAIL_SCALE = 0.5  # next to scales of tokens
_DEVIATIONS = 6.0  # standard deviations that are below e4m3's largest number
_EXPONENT_BIAS = 127


def exact(case: Case, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """The rows as the cache holds them, [tokens, 1, columns], in fp64."""
    if case.deviations is not None:
        rows = [(row.double() * _stored_deviations(case)).to(row.dtype) for row in rows]
    if not case.row_format:
        return rows
    return [stored.double() * factor for stored, factor in (_stored(case, part, is_exact=False) for part in rows)]


def _stored_deviations(case: Case) -> torch.Tensor:
    """The standard deviation of each column in the cache, [columns]; scales of tokens change it further."""
    ckv, kpe = case.deviations or (1.0, 1.0)
    columns = torch.arange(case.head_dim)
    deviations = torch.where(columns < case.value_dim, ckv, kpe)
    scales = torch.where(columns < case.value_dim, _range_scale(ckv), _range_scale(kpe))
    return torch.where(columns < _quantised(case), deviations / scales, deviations)


def _range_scale(deviation: float) -> float:
    """A power of two by which e4m3 holds numbers of a standard deviation over its whole range."""
    return 2.0 ** math.ceil(math.log2(deviation * _DEVIATIONS / LARGEST)) if deviation else 1.0


def _quantised(case: Case) -> int:
    """The first columns, which are stored in e4m3."""
    found = latent_formats.packed(case.packed_format)
    return 0 if not case.row_format else found.quantised if found else case.head_dim


def halves(case: Case, rows: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Exact rows as the cache's two tensors hold them; packed rows are bytes in the first."""
    if not case.row_format:
        return [row[..., : case.value_dim] for row in rows], [row[..., case.value_dim :] for row in rows]
    if case.packed_format:
        return [_packed(case, row) for row in rows], [torch.empty(len(row), 1, 0, dtype=torch.uint8) for row in rows]
    stored = [_stored(case, row, is_exact=True)[0].to(E4M3) for row in rows]
    return [row[..., : case.value_dim] for row in stored], [row[..., case.value_dim :] for row in stored]


def shape_of(case: Case, pages: int) -> tuple[Shape, torch.dtype]:
    """The shape and the type of the cache."""
    found = latent_formats.packed(case.packed_format)
    dims = (case.value_dim, case.head_dim - case.value_dim) if found is None else (found.row_bytes, 0)
    return Shape(pages, case.page_size, 1, *dims), torch.uint8 if found else getattr(torch, case.kv_type)


def arrange(case: Case, cache: Cache) -> None:
    """Moves the scales of a page after its rows, if the format has them there."""
    if case.packed_format == "deepseek_v4":
        memory, found = cache.buffers[0], latent_formats.PACKED[case.packed_format]
        pages = memory.reshape(len(memory), -1, found.row_bytes)
        width = found.quantised + 2 * (case.head_dim - found.quantised)  # bytes of a token without its scales
        parts = pages[..., :width].flatten(1), pages[..., width:].flatten(1)
        memory.reshape(len(memory), -1)[:] = torch.cat(parts, 1)


def run_arguments(case: Case, cache: Cache, device: str) -> dict[str, Any]:
    """The scales that a run gets."""
    if case.row_format == "numbers":
        return _tensor_scales(case)
    if case.row_format == "tensors":
        return {name: torch.tensor([value], device=device) for name, value in _tensor_scales(case).items()}
    if not case.row_format.startswith("tokens"):
        return {}
    scales = Cache.make(
        "tuple", Shape(cache.shape.pages, case.page_size, 1, case.value_dim // SCALE_COLUMNS, 0), "NHD", torch.float32
    )
    rows = [_blocks(case, n)[:, None] for n in case.kv_lens]
    write_pages(scales, case.kv_lens, rows, [row[..., :0] for row in rows], seed=len(case.name))
    return {"ckv_scale_arr": scales.buffers[0].squeeze(2).to(device), "kpe_scale": _tail_scale(case)}


def _tensor_scales(case: Case) -> dict[str, float]:
    """The scales of all tokens."""
    if case.deviations is not None:
        return {"ckv_scale": _range_scale(case.deviations[0]), "kpe_scale": _range_scale(case.deviations[1])}
    return dict(_NUMBERS if case.row_format == "numbers" else _TENSORS)


def _tail_scale(case: Case) -> float:
    return _TAIL_SCALE if case.deviations is None else _range_scale(case.deviations[1])


def _blocks(case: Case, tokens: int) -> torch.Tensor:
    """The scales of blocks of columns, [tokens, blocks] fp32."""
    table = torch.tensor(_TABLES[case.row_format.partition("-")[2]])
    if case.deviations is not None:
        table *= _range_scale(case.deviations[0])
    found = latent_formats.packed(case.packed_format)
    if found and found.by_page:
        table = table.log2().round().exp2()
    blocks = found.quantised // found.scale_columns if found else case.value_dim // SCALE_COLUMNS
    return table[(torch.arange(tokens)[:, None] * 3 + torch.arange(blocks)) % len(table)]


def _factors(case: Case, tokens: int) -> torch.Tensor:
    """The scale of each stored number, [tokens, 1, columns] fp64."""
    factors = torch.ones(tokens, 1, case.head_dim, dtype=torch.float64)
    if case.row_format in ("numbers", "tensors"):
        numbers = _tensor_scales(case)
        factors[..., : case.value_dim], factors[..., case.value_dim :] = numbers["ckv_scale"], numbers["kpe_scale"]
        return factors
    if case.row_format.startswith("tokens"):
        factors[..., case.value_dim :] = _tail_scale(case)
    blocks = _blocks(case, tokens).double()
    found = latent_formats.packed(case.packed_format)
    wide = blocks.repeat_interleave(found.scale_columns if found else SCALE_COLUMNS, 1)
    factors[:, 0, : wide.shape[1]] = wide
    return factors


def _stored(case: Case, rows: torch.Tensor, *, is_exact: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers that are stored, and their factors."""
    factors = _factors(case, len(rows))
    stored = (rows.double() / factors if is_exact else rows.double()).float()
    quantised = _quantised(case)
    parts = to_e4m3(stored[..., :quantised]).float(), stored[..., quantised:].bfloat16().float()
    return torch.cat(parts, -1), factors


def _packed(case: Case, rows: torch.Tensor) -> torch.Tensor:
    """Exact rows as bytes, [tokens, 1, row bytes]."""
    stored, blocks = _stored(case, rows, is_exact=True)[0], _blocks(case, len(rows))
    quantised = latent_formats.PACKED[case.packed_format].quantised
    numbers, rest = stored[:, 0, :quantised].to(E4M3), stored[:, 0, quantised:].bfloat16()
    if case.packed_format == "deepseek_v4":
        exponents = torch.cat([blocks.log2() + _EXPONENT_BIAS, torch.full((len(rows), 1), 255.0)], 1).to(torch.uint8)
        return torch.cat([numbers.view(torch.uint8), rest.contiguous().view(torch.uint8), exponents], 1)[:, None]
    return v32_rows(numbers, blocks, rest)[:, None]


def lists(case: Case, indptr: torch.Tensor, indices: torch.Tensor, masks: list[torch.Tensor]) -> tuple[Any, Any]:
    """The tokens that each row of q sees by its mask, as places in the cache, [rows, topk], and topk_length or None."""
    generator, found = torch.Generator().manual_seed(1), []
    for request, mask in enumerate(masks):
        pages = indices[indptr[request] : indptr[request + 1]]
        for row in mask:
            count = int(row.sum())  # from which the order follows, so that it is the same in any batch
            order = torch.randperm(count, generator=torch.Generator().manual_seed(count))
            tokens = row.nonzero().flatten()[order]
            found.append(pages[tokens // case.page_size] * case.page_size + tokens % case.page_size)
    topk = max(map(len, found), default=0) + 7
    if case.selected == "lengths":
        listed = torch.full((len(found), topk), 2**31 - 1, dtype=torch.int32)
        for row, slots in zip(listed, found, strict=True):
            row[: len(slots)] = slots
        return listed, torch.tensor([len(slots) for slots in found], dtype=torch.int32)
    listed = torch.full((len(found), topk), -1, dtype=torch.int32)
    for row, slots in zip(listed, found, strict=True):
        row[torch.randperm(topk, generator=generator)[: len(slots)]] = slots.int()
    return listed, None


class TwoLists(NamedTuple):
    """A case's lists, divided between its cache and a second one that has the same tokens in other places."""

    first: torch.Tensor
    first_lengths: torch.Tensor | None
    second: torch.Tensor
    second_lengths: torch.Tensor | None
    cache: torch.Tensor  # the second one, [pages, second_page, bytes]

    def lens(self) -> tuple[int, ...]:
        """Tokens of each row as its plan sees them."""
        rows, topk = self.second.shape
        others = [topk] * rows if self.second_lengths is None else self.second_lengths.tolist()
        return tuple(self.first.shape[1] + count for count in others)


def two_lists(case: Case, listed: torch.Tensor, lengths: torch.Tensor | None, cache: torch.Tensor) -> TwoLists:
    """`cache`: [pages, page_size, bytes]."""
    found, pages = latent_formats.PACKED[case.packed_format], cache.reshape(len(cache), -1)
    width = found.quantised + 2 * (case.head_dim - found.quantised)
    rows = pages[:, : case.page_size * width].reshape(-1, width).flip(0)
    scales = pages[:, case.page_size * width :].reshape(len(rows), -1).flip(0)
    added = -len(rows) % case.second_page
    rows, scales = (torch.nn.functional.pad(part, (0, 0, 0, added), value=0xFF) for part in (rows, scales))
    parts = [part.reshape(len(rows) // case.second_page, -1) for part in (rows, scales)]
    columns = listed.shape[1] // 3
    first, second = listed[:, :columns].contiguous(), listed[:, columns:].contiguous()
    in_second = (second >= 0) & (second < len(cache) * case.page_size)
    second = torch.where(in_second, len(cache) * case.page_size - 1 - second, second)
    of_first = None if lengths is None else lengths.clamp(max=columns)
    of_second = None if of_first is None else lengths - of_first
    held = torch.cat(parts, 1).reshape(-1, case.second_page, found.row_bytes)
    return TwoLists(first, of_first, second, of_second, held)


def options_of(case: Case) -> Options:
    """The options of a plan for the case."""
    q, kv, out = (DType.of(getattr(torch, name)) for name in (case.q_dtype, case.kv_type, case.out_type))
    head_dims = (case.value_dim, case.head_dim - case.value_dim)
    stored = None if case.packed_format else kv
    row_format, found = latent_formats.check_format(case.packed_format or None, stored, head_dims)
    sizes = (case.num_q_heads, 1, case.head_dim, case.value_dim, case.page_size)
    source = ("two_lists" if case.second_page else "selected") if case.selected else "latent"
    return Options(source, *sizes, q, found or kv, out, causal=case.causal, latent_format=row_format)


def set_scales(
    params: native.AttentionParams, ckv_scale: Any = None, kpe_scale: Any = 1.0, ckv_scale_arr: Any = None
) -> None:
    """As Binding does."""
    params.tail_scale = 1.0
    if isinstance(ckv_scale, float):
        params.score_scale, params.value_scale, params.tail_scale = (
            params.score_scale * ckv_scale,
            ckv_scale,
            1 / ckv_scale,
        )
    elif ckv_scale is not None:
        params.k_scale = ckv_scale.data_ptr()
    if ckv_scale_arr is not None:
        params.k_scale, params.k_scale_stride = ckv_scale_arr.data_ptr(), 1
    if isinstance(kpe_scale, float):
        params.tail_scale *= kpe_scale
    else:
        params.v_scale = kpe_scale.data_ptr()
