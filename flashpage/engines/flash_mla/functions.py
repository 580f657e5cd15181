"""get_mla_metadata and flash_mla_with_kvcache of FlashMLA, for inference.

Lengths are planned on the device, once for all calls that pass one FlashMLASchedMeta and the same block table; a call
waits for nothing and may be captured in a graph.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NoReturn

import torch

from ...base import checks
from ...base.errors import CapabilityError, RunError, named
from ...run.checks import NO_SCALES
from ...wrappers.function_plans import Tables, key_of_step
from ...wrappers.latent_functions import LatentCall
from . import sparse

_NAMES = {"seq_lens": "cache_seqlens", "block_tables": "block_table", "head_dim_ckv": "head_dim_v"}
_NAMES |= {"num_heads": "heads of q", "head_dim_kpe": "head_dim of q less head_dim_v", "q_data_type": "dtype of q"}
_NAMES |= dict.fromkeys(("paged_kv_cache", "kv_cache", "k", "ckv_cache", "kpe_cache"), "k_cache") | {
    "sm_scale": "softmax_scale"
}
_NAMES |= {"kv_data_type": "dtype of k_cache"}

_NAMES_OF_FWD = {inner: "kv" if name == "k_cache" else name for inner, name in _NAMES.items() if inner != "sm_scale"}
_NAMES_OF_FWD |= {"head_dim_ckv": "d_v", "head_dim_kpe": "head_dim of q less d_v", "kv_data_type": "dtype of kv"}

_NO_MAXIMUM = (
    "max_logits of flash_mla_sparse_fwd is not supported: no kernel here writes the largest scores; use lse, which is "
    "at least as large and at most log(topk) larger."
)
_NO_SPARSE = "it belongs to sparse attention: pass indices too, or leave it None"


@dataclasses.dataclass
class FlashMLASchedMeta:
    """The plan of the calls that pass it, which must have equal shapes and equal values of cache_seqlens."""

    @dataclasses.dataclass
    class Config:
        """Shapes and options of the first call."""

        b: int
        s_q: int
        h_q: int
        page_block_size: int
        h_k: int
        causal: bool
        is_fp8_kvcache: bool
        topk: int | None = None
        extra_page_block_size: int | None = None
        extra_topk: int | None = None

    have_initialized: bool = False
    config: Config | None = None
    tile_scheduler_metadata: None = None  # FlashMLA's plan; ours is kept by this thread
    num_splits: None = None
    step: object = dataclasses.field(default_factory=object, repr=False, compare=False)

    def first_used(self, config: Config) -> None:
        """Keeps the shapes and options of the first call that ran; a refused call leaves none."""
        if self.config is None:
            self.config, self.have_initialized = config, True


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """Makes the `tile_scheduler_metadata` and `num_splits` that all calls of one step pass.

    Args:
        args, kwargs: accepted and not used, as in FlashMLA.
    """
    return FlashMLASchedMeta(), None


@named(_NAMES)
def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool | None = False,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of a few rows of each request over latent rows in pages.

    Args:
        q: [batch, rows, heads, head_dim], any number of heads.
        k_cache: [pages, page_size, 1, head_dim], pages of any size; its first head_dim_v columns are V. With `indices`
            also DeepSeek's fp8 rows, [pages, page_size, 1, 656 or 584] bytes.
        block_table: [batch, pages] int32; None with `indices`.
        cache_seqlens: [batch] int32, tokens of each request, the rows' own included; None with `indices`.
        head_dim_v: columns of V and of the output.
        tile_scheduler_metadata: of get_mla_metadata, one for each step.
        num_splits: None.
        softmax_scale: multiplies the scores; None: head_dim ** -0.5.
        causal: row r of a request sees tokens up to tokens - rows + r; False with `indices`.
        is_fp8_kvcache: with `indices` accepted and not used, as k_cache says it; without, None or False.
        indices: [batch, rows, topk] int32, the tokens that a row reads: page * page_size + token of the page; -1: none.
        attn_sink: with `indices`: [heads] fp32: the output is multiplied by exp(lse) / (exp(lse) + exp(attn_sink)).
        extra_k_cache, extra_indices_in_kvcache: with `indices`: another cache and its lists, which join the softmax.
        topk_length, extra_topk_length: with `indices`: [batch] int32, entries of each list that are used; None: all.

    Returns:
        The output [batch, rows, heads, head_dim_v], and the LSE [batch, heads, rows] fp32, a natural logarithm. A row
        that sees no token has out = 0 and an LSE of -inf.
    """
    q = _four(q, "q", "[batch, rows, heads, head_dim]")
    cache = _cache(k_cache, "k_cache")
    batch, rows, heads = q.shape[:3]
    causal, is_packed = checks.flag("causal", causal, RunError), cache.element_size() == 1
    is_fp8 = is_packed if is_fp8_kvcache is None else checks.flag("is_fp8_kvcache", is_fp8_kvcache, RunError)
    topk, extra_topk = (_last(given) for given in (indices, extra_indices_in_kvcache))
    extra_page = extra_k_cache.shape[1] if isinstance(extra_k_cache, torch.Tensor) and extra_k_cache.dim() > 1 else None
    config = FlashMLASchedMeta.Config(
        *(batch, rows, heads, cache.shape[1], 1, causal, is_fp8, topk, extra_page, extra_topk)
    )
    _take(tile_scheduler_metadata, num_splits, config)
    if rows == 0:
        raise RunError("q has 0 rows a request: pass at least one.")
    scale = q.shape[3] ** -0.5 if softmax_scale is None else checks.real("softmax_scale", softmax_scale, error=RunError)
    if indices is not None:
        if causal:
            raise RunError("causal=True with indices: the lists say what a row sees, pass False.")
        lists = [sparse.lists_of(cache, indices, topk_length, (batch, rows), ("k_cache", "indices", "topk_length"))]
        if extra_k_cache is not None or extra_indices_in_kvcache is not None:
            names = ("extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length")
            extra = _cache(extra_k_cache, "extra_k_cache")
            lists.append(sparse.lists_of(extra, extra_indices_in_kvcache, extra_topk_length, (batch, rows), names))
        elif extra_topk_length is not None:
            raise RunError("extra_topk_length without extra_k_cache: pass the cache and its lists, or None.")
        chosen = sparse.SparseCall(q.flatten(0, 1), head_dim_v, scale, tile_scheduler_metadata.step)
        found = _unflattened(*sparse.attend(chosen, lists, attn_sink), batch, rows)
        tile_scheduler_metadata.first_used(config)
        return found
    _refuse_sparse(
        attn_sink=attn_sink,
        extra_k_cache=extra_k_cache,
        extra_indices_in_kvcache=extra_indices_in_kvcache,
        topk_length=topk_length,
        extra_topk_length=extra_topk_length,
    )
    if is_packed:
        raise RunError(
            "k_cache has rows of bytes: they are read with indices alone; pass indices, or rows of q's type."
        )
    if is_fp8:
        raise CapabilityError("is_fp8_kvcache=True without indices is not supported: pass indices, or rows in 16 bits.")
    lengths = checks.tensor(cache_seqlens, "cache_seqlens", RunError)
    tables = checks.tensor(block_table, "block_table", RunError)
    if lengths.numel() != batch:
        raise RunError(f"q is for {batch} requests but cache_seqlens has {lengths.numel()}: pass equally many.")
    call = LatentCall(q.flatten(0, 1), cache, head_dim_v, Tables(lengths, tables), rows, causal)
    attention, values = call.planned(scale, key_of_step(tile_scheduler_metadata.step, lengths, tables))
    out, lse = attention.run_of("basee")(call.query, call.cache, None, None, True, values, NO_SCALES)
    tile_scheduler_metadata.first_used(config)
    return _unflattened(out, lse, batch, rows)


class MaxLogits:
    """Stands in place of FlashMLA's max_logits. Callers may ignore it; any use raises a CapabilityError."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)  # copies and inspections of objects look such names up
        raise CapabilityError(_NO_MAXIMUM)

    def _refused(self, *_: Any) -> NoReturn:
        raise CapabilityError(_NO_MAXIMUM)

    @classmethod
    def __torch_function__(cls, *_: Any) -> NoReturn:
        raise CapabilityError(_NO_MAXIMUM)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __neg__ = _refused
    __pow__ = __rpow__ = __abs__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = __hash__ = _refused
    __getitem__ = __iter__ = __len__ = __bool__ = __float__ = __int__ = __array__ = _refused


MAX_LOGITS = MaxLogits()


@named(_NAMES_OF_FWD)
def flash_mla_sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    indexer_topk: int = 0,
) -> tuple[torch.Tensor, MaxLogits, torch.Tensor]:
    """Prefill in which each row of q lists the tokens that it reads.

    Args:
        q: [rows, heads, head_dim].
        kv: [tokens, 1, head_dim]; its first d_v columns are V.
        indices: [rows, 1, topk] int32, numbers of tokens; others than 0 to tokens - 1 are none.
        sm_scale: multiplies the scores.
        d_v: columns of V and of the output.
        attn_sink: [heads] fp32: the output is multiplied by exp(lse) / (exp(lse) + exp(attn_sink)).
        topk_length: [rows] int32, entries of each list that are used; None: all.
        indexer_topk: refused.

    Returns:
        The output [rows, heads, d_v]; in place of FlashMLA's max_logits an object whose use is refused, as no kernel
        writes the largest scores; and the LSE [rows, heads] fp32, a natural logarithm without the sink. A row that sees
        no token has out = 0 and an LSE of -inf.
    """
    if indexer_topk.__class__ is not int or indexer_topk != 0:
        raise CapabilityError(f"indexer_topk={checks.shown(indexer_topk)} is not supported: pass 0.")
    for name, tensor, shape in (("q", q, "[rows, heads, head_dim]"), ("kv", kv, "[tokens, 1, head_dim]")):
        if checks.tensor(tensor, name, RunError).dim() != 3:
            raise RunError(f"{name} has shape {tuple(tensor.shape)}: pass {shape}.")
    if kv.shape[1] != 1 or kv.shape[2] != q.shape[2]:
        raise RunError(
            f"kv has shape {tuple(kv.shape)} but q has {q.shape[2]} columns: pass [tokens, 1, {q.shape[2]}]."
        )
    lists = sparse.lists_of(kv, indices, topk_length, (len(q), 1), ("kv", "indices", "topk_length"))
    lists = lists._replace(indices=torch.where(lists.indices < len(kv), lists.indices.clamp(min=-1), -1))
    call = sparse.SparseCall(q, d_v, checks.real("sm_scale", sm_scale, error=RunError))
    out, lse = sparse.attend(call, [lists], attn_sink)
    return out, MAX_LOGITS, lse


def _unflattened(out: torch.Tensor, lse: torch.Tensor, batch: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return out.unflatten(0, (batch, rows)), lse.unflatten(0, (batch, rows)).transpose(1, 2).contiguous()


def _cache(tensor: Any, name: str) -> torch.Tensor:
    """A cache without its dimension of heads."""
    cache = _four(tensor, name, "[pages, page_size, 1, head_dim]")
    if cache.shape[2] != 1:
        raise CapabilityError(f"{name} has {cache.shape[2]} heads: latent rows have one, which all query heads read.")
    return cache.squeeze(2)


def _last(indices: Any) -> int | None:
    return indices.shape[-1] if isinstance(indices, torch.Tensor) and indices.dim() else None


def _refuse_sparse(**given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            raise CapabilityError(f"{name}={checks.shown(value)} is not supported: {_NO_SPARSE}.")


def _four(tensor: Any, name: str, shape: str) -> torch.Tensor:
    found: torch.Tensor = checks.tensor(tensor, name, RunError)
    if found.dim() != 4:
        raise RunError(f"{name} has shape {tuple(found.shape)}: pass {shape}.")
    return found


def _take(meta: Any, num_splits: Any, config: FlashMLASchedMeta.Config) -> None:
    """Checks the metadata: all calls that pass it have the shapes and options of the first."""
    if not isinstance(meta, FlashMLASchedMeta):
        raise RunError(f"tile_scheduler_metadata={checks.shown(meta)}: pass the first result of get_mla_metadata().")
    for name, value in (("num_splits", num_splits), ("num_splits of the metadata", meta.num_splits)):
        if value is not None:
            raise RunError(f"{name} is {checks.shown(value)}: leave it None, as the plan says where requests are cut.")
    if meta.tile_scheduler_metadata is not None:
        raise RunError(
            "tile_scheduler_metadata of the metadata was written: leave it None, as flashpage has plans of its own."
        )
    if meta.config is not None and meta.config != config:
        differ = (f.name for f in dataclasses.fields(config) if getattr(config, f.name) != getattr(meta.config, f.name))
        name = next(differ)
        raise RunError(
            f"tile_scheduler_metadata was first used with {name}={getattr(meta.config, name)}, now {name} is "
            f"{getattr(config, name)}: call get_mla_metadata() for each step."
        )
