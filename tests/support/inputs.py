"""A case's tensors: rows for the reference, memory for the wrappers, index arrays, masks and scales."""

from __future__ import annotations

import dataclasses
import zlib
from typing import Any

import format_rows
import latent_rows
import torch
from caches import Cache, Shape, poison, write_pages
from cases.case import Case
from cases.variants import VARIANTS
from reference import Options, State, alibi_slopes, attention

SPARE_PAGES = 3  # pages that no request has


@dataclasses.dataclass(frozen=True)
class Inputs:
    """A case's tensors on the CPU: rows for the reference, and memory that is copied to the device."""

    case: Case
    q: list[torch.Tensor]  # per request [q_len, num_q_heads, head_dim]
    k: list[torch.Tensor]
    v: list[torch.Tensor]
    cache: Cache
    scale_cache: Cache | None  # of formats, in bytes, as `cache` is
    qo_indptr: torch.Tensor
    indptr: torch.Tensor  # paged: pages; ragged: tokens
    indices: torch.Tensor
    last_page_len: torch.Tensor
    masks: list[torch.Tensor] | None  # per request [q_len, kv_len] bool
    scales: dict[str, Any]  # q_scale, k_scale, v_scale: floats, or tensors
    sinks: torch.Tensor | None

    def options(self) -> Options:
        """The reference's options for the case. A custom mask replaces causal."""
        case = self.case
        variant = VARIANTS[case.variant]("cpu") if case.variant else None
        return Options(
            sm_scale=case.score_scale,
            causal=case.causal and not case.mask,
            window_left=case.window_left,
            chunk=case.chunk,
            soft_cap=case.soft_cap,
            alibi_slopes=alibi_slopes(case.num_q_heads) if case.position == "ALIBI" else None,
            rope=(case.rope_scale or 1.0, case.rope_theta or 1e4) if case.position == "ROPE_LLAMA" else None,
            sinks=self.sinks,
            score_mod=variant.score_mod if variant else None,
            mask_mod=variant.mask_mod if variant else None,
            **self.scales,
        )


def make_inputs(case: Case) -> Inputs:
    """Standard normal rows in the case's element types, equal on every machine."""
    generator = torch.Generator().manual_seed(zlib.crc32(case.name.encode()))

    def rows(lengths: tuple[int, ...], heads: int, dim: int, dtype: str) -> list[torch.Tensor]:
        return [torch.randn(n, heads, dim, generator=generator).to(getattr(torch, dtype)) for n in lengths]

    q = rows(case.q_lens, case.num_q_heads, case.head_dim, case.q_dtype)
    drawn = "float32" if case.row_format or case.kv_format else case.kv_type
    k = rows(case.kv_lens, case.num_kv_heads, case.head_dim, drawn)
    v = rows(case.kv_lens, case.num_kv_heads, case.value_dim, "float32" if case.kv_format else case.kv_type)
    k, v = format_rows.exact(case, k, v)
    if case.entry == "latent":
        k = latent_rows.exact(case, k)
        v = [row[..., : case.value_dim] for row in k]
    shapes = zip(case.q_lens, case.kv_lens, strict=True)
    masks = [_mask(case.mask_kind, *shape, generator) for shape in shapes] if case.mask or case.selected else None
    sinks = torch.randn(case.num_q_heads, generator=generator) if case.sinks else None
    return assemble(case, q, k, v, masks, sinks)


def one_request(inputs: Inputs, request: int) -> Inputs:
    """These rows as a batch of one request."""
    case = inputs.case
    mine = slice(request, request + 1)
    alone = dataclasses.replace(case, q_lens=case.q_lens[mine], kv_lens=case.kv_lens[mine])
    masks = None if inputs.masks is None else inputs.masks[mine]
    return assemble(alone, inputs.q[mine], inputs.k[mine], inputs.v[mine], masks, inputs.sinks)


def assemble(
    case: Case,
    q: list[torch.Tensor],
    k: list[torch.Tensor],
    v: list[torch.Tensor],
    masks: list[torch.Tensor] | None = None,
    sinks: torch.Tensor | None = None,
) -> Inputs:
    """Given rows in the case's form of memory."""
    place = _ragged if is_ragged(case) else _paged
    parts, dims, scale_cache = (k, v), (case.head_dim, case.value_dim), None
    if case.entry == "latent":
        parts = latent_rows.halves(case, k)
    if case.kv_format:
        parts, scales = format_rows.halves(case, k, v)
        dims, scale_dims = format_rows.row_bytes(case)
        scale_cache = place(case, *(_hidden(case, part) for part in scales), scale_dims)[0]
    cache, indptr, indices, last_page_len = place(case, *(_hidden(case, part) for part in parts), dims)
    qo_indptr = torch.tensor([0, *case.q_lens]).cumsum(0).to(torch.int32)
    lists = (qo_indptr, indptr, indices, last_page_len)
    return Inputs(case, q, k, v, cache, scale_cache, *lists, masks, _scales(case), sinks)


def out_scale(case: Case) -> float | torch.Tensor | None:
    """The scale of fp8 outputs as runs take it."""
    if case.o_scale == "tensor":
        return torch.tensor([case.out_divisor])
    return case.out_divisor if case.o_scale else None


def is_ragged(case: Case) -> bool:
    return case.entry not in ("decode", "paged", "sink", "latent")


def hidden_tokens(case: Case, request: int) -> int:
    """Number of first tokens of a request that no row sees, and that are NaN in the cache."""
    if not case.hidden_nan:
        return 0
    first_row = max(0, case.kv_lens[request] - case.q_lens[request])
    of_chunk = first_row // case.chunk * case.chunk if case.chunk else 0
    return max(of_chunk, first_row - case.window_left if case.window_left >= 0 else 0)


def _hidden(case: Case, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """K or V in the cache's element type."""
    copies = [request.clone() for request in rows] if case.hidden_nan else rows
    for request, copy in enumerate(copies):
        poison(copy[: hidden_tokens(case, request)])
    return copies


def _paged(
    case: Case, k: list[torch.Tensor], v: list[torch.Tensor], dims: tuple[int, int]
) -> tuple[Cache, Any, Any, Any]:
    pages = sum(-(-n // case.page_size) for n in case.kv_lens) + SPARE_PAGES
    shape = Shape(pages, case.page_size, case.num_kv_heads, *dims)
    dtype = getattr(torch, case.kv_type)
    if case.entry == "latent":
        shape, dtype = latent_rows.shape_of(case, pages)
    cache = Cache.make(case.cache, shape, case.kv_layout, dtype)
    indptr, indices, last_page_len = write_pages(cache, case.kv_lens, k, v, seed=len(case.name))
    latent_rows.arrange(case, cache)
    if case.cache == "indexed":
        indices = torch.cat([indices, torch.full((256,), 2**30, dtype=torch.int32)])
    return cache, indptr, indices, last_page_len


def _ragged(
    case: Case, k: list[torch.Tensor], v: list[torch.Tensor], dims: tuple[int, int]
) -> tuple[Cache, Any, Any, Any]:
    """A ragged cache: one "page" holds the rows of all requests, and its spare rows stay NaN."""
    spare = 0 if case.entry.startswith("single") else 5
    shape = Shape(1, sum(case.kv_lens) + spare, case.num_kv_heads, *dims)
    cache = Cache.make(case.cache, shape, case.kv_layout, getattr(torch, case.kv_type))
    for memory, given in zip(cache.rows(), (k, v), strict=True):
        memory[0, : sum(case.kv_lens)] = torch.cat(given)
    indptr = torch.tensor([0, *case.kv_lens]).cumsum(0).to(torch.int32)
    return cache, indptr, torch.empty(0, dtype=torch.int32), torch.empty(0, dtype=torch.int32)


def _mask(kind: str, q_len: int, kv_len: int, generator: torch.Generator) -> torch.Tensor:
    """causal: right-aligned; blocks: documents of 300 tokens; tree: the whole context and a row's ancestors among the
    rows; past: the first third of the tokens; sparse: one token in a thousand, with hidden tiles between; random: one
    row sees nothing and one sees only its last token."""
    position = kv_len - q_len + torch.arange(q_len)[:, None]
    token = torch.arange(kv_len)[None]
    if kind == "causal":
        return token <= position
    if kind == "blocks":
        return token // 300 == position // 300
    if kind == "past":
        return token < torch.full_like(position, kv_len // 3)
    if kind == "tree":
        row, other = position - (kv_len - q_len) + 1, token - (kv_len - q_len) + 1  # numbered as in a heap
        depth = row.float().log2().floor() - other.clamp(min=1).float().log2().floor()
        return (other < 1) | (row >> depth.clamp(min=0).long() == other)
    mask = torch.rand(q_len, kv_len, generator=generator) < {"random": 0.6, "sparse": 1e-3, "nothing": 0.0}[kind]
    if kind == "sparse":
        mask[:, kv_len // 3 : kv_len // 3 * 2] = False
    if kind == "random" and q_len > 2:
        mask[1] = False
        mask[2, :-1] = False
    return mask


def _scales(case: Case) -> dict[str, Any]:
    values = {
        "q_scale": (0.9, case.num_q_heads),
        "k_scale": (1.3, case.num_kv_heads),
        "v_scale": (0.6, case.num_kv_heads),
    }
    if not case.scales:
        return {}
    if case.scales == "float":
        return {name: value for name, (value, _) in values.items()}
    if case.scales == "tensor":
        return {name: torch.tensor([value]) for name, (value, _) in values.items()}
    if case.scales == "negative":
        return {"q_scale": torch.tensor([-0.9])}
    if case.scales == "per_request":
        sizes = {"k_scale": 1, "v_scale": case.num_kv_heads, "q_scale": case.num_q_heads}
        count = len(case.kv_lens)
        return {
            name: torch.linspace(0.5 * values[name][0], values[name][0], count * size).reshape(count, size)
            for name, size in sizes.items()
        }
    scales = {name: torch.linspace(0.5 * value, value, heads) for name, (value, heads) in values.items()}
    if case.scales == "signs":
        scales["q_scale"][::2] *= -1
        scales["k_scale"][0] *= -1
    return scales


def pack_bits(masks: list[torch.Tensor]) -> torch.Tensor:
    """Little-endian bits; each request begins on a new byte, and the bits after its last one are ones."""
    packed = []
    for mask in masks:
        bits = torch.ones(-(-mask.numel() // 8) * 8, dtype=torch.uint8)
        bits[: mask.numel()] = mask.flatten()
        packed.append((bits.reshape(-1, 8) << torch.arange(8)).sum(-1).to(torch.uint8))
    return torch.cat(packed)


def reference_states(inputs: Inputs) -> list[State]:
    """The exact result of every request."""
    options = inputs.options()
    masks = inputs.masks or [None] * len(inputs.q)
    rows = zip(inputs.q, inputs.k, inputs.v, masks, strict=True)
    states = [attention(q, k, v, options, request=i, custom_mask=mask) for i, (q, k, v, mask) in enumerate(rows)]
    return [scaled(inputs.case, state) for state in states]


def scaled(case: Case, state: State) -> State:
    """The state with outputs as fp8 holds them, but not rounded."""
    if not case.has_fp8_output:
        return state
    most = float(torch.finfo(getattr(torch, case.out_type)).max)
    out, magnitude, spread = (part / case.out_divisor for part in (state.out, state.magnitude, state.spread))
    return dataclasses.replace(state, out=out.clamp(-most, most), magnitude=magnitude, spread=spread)
