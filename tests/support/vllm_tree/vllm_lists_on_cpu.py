"""vLLM's models whose indexer lists the tokens that a row reads (DeepSeek V3.2), on the CPU: a platform plugin, and a
general plugin.

vLLM refuses these models there, and its indexer consists of kernels for cards. Here attention is chosen as on a Hopper
card, and the indexer's own layers are followed by torch: scores in fp32, over keys in fp32 that lie in vLLM's cache.
Each run of flashpage's attention over lists is compared with exact results.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from types import ModuleType
from typing import Any, ClassVar

import torch
import vllm_on_cpu
from vllm.platforms.cpu import CpuPlatform


def platform() -> str:
    """vLLM calls this entry point of the group `vllm.platform_plugins`."""
    if importlib.util.find_spec("vllm._C") is None:  # not the wheel for the CPU, which has its operators
        vllm_on_cpu.platform()
    return f"{__name__}.Platform"


class Platform(CpuPlatform):
    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> Any:
        if not attn_selector_config.use_sparse:
            return super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads)
        given = attn_selector_config._replace(dtype=torch.bfloat16)  # cards have no float32
        return _hopper().get_attn_backend_cls(selected_backend, given, num_heads)


def _hopper() -> Any:
    """vLLM's platform for cards, as on a Hopper card."""
    for operators in ("vllm._C", "vllm._C_stable_libtorch"):
        with contextlib.suppress(ImportError):
            __import__(operators)
        sys.modules.setdefault(operators, ModuleType(operators))  # the choice calls none
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    class Hopper(CudaPlatformBase):
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return DeviceCapability(9, 0)

    return Hopper


def register() -> None:
    """vLLM calls this entry point of the group `vllm.general_plugins`."""
    from vllm.model_executor.models import deepseek_v2

    indexer, cache = deepseek_v2.Indexer, deepseek_v2.DeepseekV32IndexerCache
    if indexer.forward is _write_lists:
        return
    make = indexer.__init__

    def make_with_wide_keys(self: Any, *given: Any, **named: Any) -> None:
        make(self, *given, **named)
        self.k_cache.head_dim = 4 * self.head_dim  # bytes of a key

    indexer.__init__, indexer.forward = make_with_wide_keys, _write_lists
    cache.get_attn_backend = lambda self: _backend()
    _replace_kernels()
    _check_runs()


def _replace_kernels() -> None:
    """What vLLM's common classes for lists do by Triton, or in pinned memory, which needs a card."""
    with contextlib.suppress(ImportError):  # vLLM 0.26
        from vllm.v1.attention.ops import metadata

        metadata.compute_token_to_req_indices = _request_of_rows
    for name in ("empty", "zeros"):
        setattr(torch, name, _not_pinned(getattr(torch, name)))


def _not_pinned(make: Any) -> Any:
    return lambda *sizes, pin_memory=False, **options: make(*sizes, **options)


def _request_of_rows(query_start_loc: torch.Tensor, out: torch.Tensor, mapped: int, count: int) -> torch.Tensor:
    """The request of each of `count` rows; rows from `mapped` on have none, and get 0."""
    rows = torch.arange(count, dtype=torch.int32)
    found = torch.searchsorted(query_start_loc[1:].contiguous(), rows, right=True)
    out[:count] = torch.where(rows < mapped, found, 0).int()
    return out[:count]


def _backend() -> Any:
    """Of the keys' cache; a step's metadata are vLLM's common ones."""
    from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder, MultipleOf
    from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerBackend

    class Builder(AttentionMetadataBuilder):
        _cudagraph_support: ClassVar[Any] = AttentionCGSupport.UNIFORM_BATCH

        def __init__(self, *given: Any) -> None:  # abstract in vLLM's class
            super().__init__(*given)

        def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
            return common_attn_metadata

    class Backend(DeepseekV32IndexerBackend):
        @staticmethod
        def get_builder_cls() -> Any:
            return Builder

        @staticmethod
        def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
            return [MultipleOf(1)]

    return Backend


def _write_lists(self: Any, hidden_states: torch.Tensor, qr: torch.Tensor, positions: Any, rotary_emb: Any) -> Any:
    """In place of Indexer.forward: the keys of the step's rows into the cache, and the tokens of the best scores of
    each row, counted in its request, into the buffer that attention reads."""
    from vllm.forward_context import get_forward_context

    metadata = get_forward_context().attn_metadata
    if metadata is None:
        return self.topk_indices_buffer
    step = metadata[self.k_cache.prefix]
    count, rotated = step.num_actual_tokens, self.rope_dim
    q = self.wq_b(qr)[0].view(-1, self.n_head, self.head_dim)
    k, weights = self.wk_weights_proj(hidden_states)[0].split([self.head_dim, self.n_head], dim=-1)
    k = self.k_norm(k).unsqueeze(1)
    turned = rotary_emb(positions, q[..., :rotated].contiguous(), k[..., :rotated].contiguous())
    q, k = (torch.cat([new, old[..., rotated:]], dim=-1).float() for new, old in zip(turned, (q, k), strict=True))
    keys = self.k_cache.kv_cache.view(torch.float32)
    keys = keys.view(keys.shape[0], -1, self.head_dim)  # [blocks, page, columns]
    page = keys.shape[1]
    slots = step.slot_mapping[:count].long()
    keys[slots // page, slots % page] = k[:count, 0]
    lists = self.topk_indices_buffer
    lists[: len(q)] = -1
    starts, lengths = step.query_start_loc_cpu.tolist(), step.seq_lens.tolist()
    for i, length in enumerate(lengths[: len(starts) - 1]):
        rows = slice(starts[i], starts[i + 1])
        at = torch.arange(length)
        seen = keys[step.block_table_tensor[i, at // page].long(), at % page]
        heads = torch.relu(q[rows] @ seen.T) * self.softmax_scale  # [rows, heads, tokens]
        scores = (heads * (weights[rows].float() * self.n_head_scale).unsqueeze(-1)).sum(1)
        own = torch.arange(length - (rows.stop - rows.start), length)
        scores.masked_fill_(at > own.unsqueeze(1), float("-inf"))
        best = scores.topk(min(self.topk_tokens, length), dim=-1)
        lists[rows, : best.indices.shape[1]] = torch.where(best.values.isinf(), -1, best.indices).int()
    return lists


def _check_runs() -> None:
    from flashpage.engines.vllm.plugin.sparse import FlashpageSparseImpl

    run = FlashpageSparseImpl.forward_mqa

    def run_and_check(self: Any, q: Any, cache: torch.Tensor, metadata: Any, layer: Any) -> Any:
        out, lse = run(self, q, cache, metadata, layer)
        rows = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        for i, row in enumerate(rows.double()):
            tokens = self.topk_indices_buffer[i]
            tokens, page = tokens[tokens >= 0].long(), cache.shape[1]
            pages = metadata.block_table[metadata.req_id_per_token[i], tokens // page]
            listed = _values(cache[pages.long(), tokens % page])
            weights = torch.softmax(row @ listed.T * self.scale, dim=-1)
            torch.testing.assert_close(out[i].double(), weights @ listed[:, : self.kv_lora_rank], rtol=1e-4, atol=1e-4)
        return out, lse

    FlashpageSparseImpl.forward_mqa = run_and_check  # type: ignore[method-assign]


def _values(stored: torch.Tensor) -> torch.Tensor:
    """What rows of a cache hold, in fp64; rows of bytes are 512 of e4m3, the scales of 128 columns each, and 64 of
    bf16."""
    if stored.dtype is not torch.uint8:
        return stored.double()
    factors = stored[:, 512:528].contiguous().view(torch.float32).repeat_interleave(128, dim=1)
    latent = stored[:, :512].view(torch.float8_e4m3fn).double() * factors
    return torch.cat([latent, stored[:, 528:].contiguous().view(torch.bfloat16).double()], dim=1)
