"""Writes of latent rows to vLLM's cache: by vLLM's own kernel on cards, by flashpage's on the CPU."""

from __future__ import annotations

from typing import Any

import torch

from ....wrappers.append import append_paged_mla_kv_cache
from .. import cache_layout

ROW_FORMATS = {"fp8_ds_mla": "deepseek_v32"}  # vLLM's cache types whose rows hold their scales


class LatentWriter:
    """A base of layers over latent rows, before vLLM's own class."""

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
        *newer: Any,  # vLLM 0.33 tells its kernel whether the scale is 1
    ) -> None:
        """Writes the step's rows."""
        if not kv_cache.is_cpu:
            base: Any = super()
            base.do_kv_cache_update(kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale, *newer)
        elif kv_cache.numel():
            write(kv_c_normed, k_pe.flatten(1), kv_cache, slot_mapping.flatten(), kv_cache_dtype, k_scale)


def write(
    latents: torch.Tensor,
    rotated: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    kv_cache_dtype: str = "auto",
    scale: torch.Tensor | None = None,
) -> None:
    """Writes rows to slots of the CPU's cache; slots of -1 are padding.

    Args:
        latents, rotated: [rows, columns]; rows after the last slot are padding too.
        cache: [blocks, page, columns or bytes].
        kv_cache_dtype: vLLM's name of the cache's type.
        scale: of rows in fp8 with one scale.
    """
    ckv, count, blocks = latents.shape[1], len(slots), cache.shape[0]
    places = torch.where(slots >= 0, 0, -1).int(), slots.int()
    every_page = torch.arange(blocks, dtype=torch.int32), torch.tensor([0, blocks], dtype=torch.int32)
    last_page_len = torch.tensor([cache.shape[1]], dtype=torch.int32)
    options: dict[str, Any] = {}
    caches: tuple[torch.Tensor, torch.Tensor | None]
    if kv_cache_dtype in ROW_FORMATS:
        caches, options["kv_row_format"] = (cache.view(torch.uint8), None), ROW_FORMATS[kv_cache_dtype]
    else:
        if kv_cache_dtype in cache_layout.FP8:
            cache = cache.view(cache_layout.FP8[kv_cache_dtype])
            options |= {"ckv_scale": scale, "kpe_scale": scale}
        caches = cache[..., :ckv], cache[..., ckv:]
    given = (latents[:count], rotated[:count], *places, *caches, *every_page, last_page_len)
    append_paged_mla_kv_cache(*given, **options)
