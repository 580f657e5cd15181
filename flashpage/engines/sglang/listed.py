"""flashpage inside SGLang's backend `dsa`, for models whose indexer lists the tokens that a row reads (DeepSeek V3.2,
GLM-5), with FLASHPAGE_SGLANG=on.

SGLang chooses `dsa` for these models by itself, and computes and converts the lists there. Hooks by its own registry go
round the methods that attend to lists by FlashMLA, FlashAttention 3 and TileLang, once the backend is made. Rows are of
16 bits, or DeepSeek's of 656 bytes; what else these methods get stays SGLang's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..flash_mla import sparse
from ..plugin.joined import joined

PLACES = ("dsa", "nsa")  # the older name makes the same backend
_CLASS = "sglang.srt.layers.attention.dsa_backend.DeepseekSparseAttnBackend"
_PACKED_BYTES = 656


def register(backends: dict[str, Callable[[Any], Any]], register_backend: Any) -> None:
    """Takes the places in SGLang's registry of attention backends."""
    for name in PLACES:
        if name in backends:
            register_backend(name)(functools.partial(_create, backends[name]))


def _create(original: Callable[[Any], Any], runner: Any) -> Any:
    """SGLang's own backend, whose methods are hooked."""
    _hook()
    return original(runner)


@functools.cache
def _hook() -> None:
    """SGLang has applied its plugins' other hooks by now."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for name, run in _RUNS.items():
        HookRegistry.register(f"{_CLASS}.{name}", run, HookType.AROUND)
    HookRegistry.apply_hooks()


def _flashmla_sparse(original: Any, backend: Any, **given: Any) -> Any:
    """Also TileLang's. `topk_length` and `attn_sink` are newer versions'."""
    known = {"q_all", "kv_cache", "v_head_dim", "page_table_1", "sm_scale", "topk_length", "attn_sink"}
    if not _is_served(given, known):
        return original(backend, **given)
    return _attend(given["q_all"], given, given["page_table_1"], given.get("topk_length"), given.get("attn_sink"))


def _flashmla_kv(original: Any, backend: Any, **given: Any) -> Any:
    """FlashMLA's decode, of one row a request."""
    layer, known = given["layer"], {"q_all", "kv_cache", "v_head_dim", "sm_scale", "layer", "metadata", "page_table_1"}
    if not _is_served(given, known):
        return original(backend, **given)
    q = given["q_all"].view(-1, layer.tp_q_head_num, layer.head_dim)
    return _attend(q, given, given["page_table_1"]).unsqueeze(1)


def _fa3(original: Any, backend: Any, **given: Any) -> Any:
    """FlashAttention 3 over pages of one token; the lists are its block table."""
    known = {"q_rope", "kv_cache", "v_head_dim", "q_nope", "page_table", "cache_seqlens", "cu_seqlens_q"}
    known |= {"cu_seqlens_k", "max_seqlen_q", "sm_scale", "logit_cap", "page_size"}
    if given["logit_cap"] or given["page_size"] != 1 or not _is_served(given, known):
        return original(backend, **given)
    return _attend(joined((given["q_nope"], given["q_rope"])), given, given["page_table"], given["cache_seqlens"])


_RUNS: dict[str, Callable[..., Any]] = {
    "_forward_flashmla_sparse": _flashmla_sparse,
    "_forward_flashmla_kv": _flashmla_kv,
    "_forward_fa3": _fa3,
    "_forward_tilelang": _flashmla_sparse,
}


def _is_served(given: dict[str, Any], known: set[str]) -> bool:
    """Whether the rows have a form of flashpage's, and no argument is one of a later version that says otherwise."""
    cache = given["kv_cache"]
    is_packed = cache.element_size() == 1 and cache.shape[-1] == _PACKED_BYTES
    is_known = all(value is None for name, value in given.items() if name not in known)
    q = given.get("q_all", given.get("q_nope"))
    has_rows = q is not None and q.dtype in (torch.float16, torch.bfloat16) and (is_packed or cache.dtype is q.dtype)
    return is_known and given["v_head_dim"] == 512 and has_rows


def _attend(
    q: torch.Tensor, given: dict[str, Any], slots: torch.Tensor, counts: Any = None, sink: torch.Tensor | None = None
) -> torch.Tensor:
    """Attention of rows over lists, [rows, heads, columns of V], for any number of heads.

    Args:
        q: [rows, heads, columns].
        slots: [rows, topk] int32, -1: none.
        counts: [rows] int32, entries that are used; of another size, as where SGLang pads rows: not used.
    """
    cache = given["kv_cache"]
    cache = cache.reshape(-1, 1, cache.shape[-1])  # pages of one token
    if counts is not None and counts.shape != (len(q),):
        counts = None
    lists = sparse.Lists(cache, slots.int().contiguous(), counts)
    call = sparse.SparseCall(q.contiguous(), given["v_head_dim"], given["sm_scale"])
    out, _ = sparse.attend(call, [lists], None if sink is None else sink.float())
    return out
