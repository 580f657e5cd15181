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

_NAMES = {"seq_lens": "cache_seqlens", "block_tables": "block_table", "head_dim_ckv": "head_dim_v"}
_NAMES |= {"num_heads": "heads of q", "head_dim_kpe": "head_dim of q less head_dim_v", "q_data_type": "dtype of q"}
_NAMES |= dict.fromkeys(("paged_kv_cache", "kv_cache", "k", "ckv_cache", "kpe_cache"), "k_cache") | {
    "sm_scale": "softmax_scale"
}
_NAMES |= {"kv_data_type": "dtype of k_cache"}

_NO_SPARSE = "no kernel here reads tokens by indices yet: pass block_table and cache_seqlens and leave it None"


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


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """What the calls of one step pass as `tile_scheduler_metadata` and `num_splits`.

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
    is_fp8_kvcache: bool = False,
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
        k_cache: [pages, page_size, 1, head_dim], pages of any size; its first head_dim_v columns are V.
        block_table: [batch, pages] int32.
        cache_seqlens: [batch] int32, tokens of each request, the rows' own included.
        head_dim_v: columns of V and of the output.
        tile_scheduler_metadata: of get_mla_metadata, one for each step.
        num_splits: None.
        softmax_scale: multiplies the scores; None: head_dim ** -0.5.
        causal: row r of a request sees tokens up to tokens - rows + r.

    The other arguments belong to fp8 caches and sparse attention and are refused.

    Returns:
        The output [batch, rows, heads, head_dim_v], and the LSE [batch, heads, rows] fp32, a natural logarithm. A row
        that sees no token has out = 0 and an LSE of -inf.
    """
    _refuse_sparse(
        indices=indices,
        attn_sink=attn_sink,
        extra_k_cache=extra_k_cache,
        extra_indices_in_kvcache=extra_indices_in_kvcache,
        topk_length=topk_length,
        extra_topk_length=extra_topk_length,
    )
    if checks.flag("is_fp8_kvcache", is_fp8_kvcache, RunError):
        raise CapabilityError("is_fp8_kvcache=True is not supported: no kernel here reads fp8 latent rows yet.")
    q = _four(q, "q", "[batch, rows, heads, head_dim]")
    cache = _four(k_cache, "k_cache", "[pages, page_size, 1, head_dim]")
    if cache.shape[2] != 1:
        raise CapabilityError(f"k_cache has {cache.shape[2]} heads: latent rows have one, which all query heads read.")
    causal = checks.flag("causal", causal, RunError)
    batch, rows, heads = q.shape[:3]
    config = FlashMLASchedMeta.Config(batch, rows, heads, cache.shape[1], 1, causal, is_fp8_kvcache=False)
    _take(tile_scheduler_metadata, num_splits, config)
    lengths = checks.tensor(cache_seqlens, "cache_seqlens", RunError)
    tables = checks.tensor(block_table, "block_table", RunError)
    if lengths.numel() != batch:
        raise RunError(f"q is for {batch} requests but cache_seqlens has {lengths.numel()}: pass equally many.")
    if rows == 0:
        raise RunError("q has 0 rows a request: pass at least one.")
    scale = q.shape[3] ** -0.5 if softmax_scale is None else checks.real("softmax_scale", softmax_scale, error=RunError)
    call = LatentCall(q.flatten(0, 1), cache.squeeze(2), head_dim_v, Tables(lengths, tables), rows, causal)
    attention, values = call.planned(scale, key_of_step(tile_scheduler_metadata.step, lengths, tables))
    out, lse = attention.run_of("basee")(call.query, call.cache, None, None, True, values, NO_SCALES)
    return out.unflatten(0, (batch, rows)), lse.unflatten(0, (batch, rows)).transpose(1, 2).contiguous()


def flash_mla_sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    indexer_topk: int = 0,
) -> NoReturn:
    """Refused: no kernel here reads tokens by indices yet."""
    raise CapabilityError(
        "flash_mla_sparse_fwd is not supported: no kernel here reads tokens by indices yet; "
        "flash_mla_with_kvcache reads all of a request's tokens."
    )


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
    if meta.config is None:
        meta.config, meta.have_initialized = config, True
    elif meta.config != config:
        differ = (f.name for f in dataclasses.fields(config) if getattr(config, f.name) != getattr(meta.config, f.name))
        name = next(differ)
        raise RunError(
            f"tile_scheduler_metadata was first used with {name}={getattr(meta.config, name)}, now {name} is "
            f"{getattr(config, name)}: call get_mla_metadata() for each step."
        )
