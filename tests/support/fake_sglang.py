"""The names of SGLang that its backend imports, with the fields that it reads; for tests without SGLang."""

from __future__ import annotations

import dataclasses
import enum
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import torch

from flashpage.engines.plugin.versions import TESTED


class ForwardMode(enum.Enum):
    EXTEND = "extend"
    DECODE = "decode"
    MIXED = "mixed"
    IDLE = "idle"
    TARGET_VERIFY = "target verify"
    DRAFT_EXTEND_V2 = "draft extend"
    DLLM_EXTEND = "blocks of a diffusion model"

    def is_idle(self) -> bool:
        return self is ForwardMode.IDLE

    def is_decode(self) -> bool:
        return self is ForwardMode.DECODE

    def is_decode_or_idle(self) -> bool:
        return self.is_decode() or self.is_idle()

    def is_target_verify(self) -> bool:
        return self is ForwardMode.TARGET_VERIFY

    def is_draft_extend_v2(self) -> bool:
        return self is ForwardMode.DRAFT_EXTEND_V2


class AttentionType(enum.Enum):
    DECODER = "decoder"
    ENCODER_ONLY = "encoder_only"


class AttentionBackend:
    needs_cpu_seq_lens = True

    def forward(
        self: Any, q: Any, k: Any, v: Any, layer: Any, batch: Any, save_kv_cache: bool = True, **own: Any
    ) -> Any:
        if batch.forward_mode.is_idle():
            return q.new_empty(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)
        call = self.forward_decode if batch.forward_mode.is_decode() else self.forward_extend
        return call(q, k, v, layer, batch, save_kv_cache=save_kv_cache, **own)


class RadixAttention(torch.nn.Module):
    """A layer; `sliding_window_size` does not count the row's own token."""

    def __init__(self, layer_id: int, heads: tuple[int, int, int], scaling: float, **changes: Any) -> None:
        super().__init__()
        self.layer_id, self.scaling = layer_id, scaling
        self.tp_q_head_num, self.tp_k_head_num, self.qk_head_dim = heads
        self.v_head_dim = self.qk_head_dim
        self.logit_cap, self.sliding_window_size, self.is_cross_attention = 0.0, -1, False
        self.k_scale = self.v_scale = self.k_scale_float = self.v_scale_float = None
        self.attn_type, self.pos_encoding_mode, self.logit_capping_method = AttentionType.DECODER, "NONE", "tanh"
        self.xai_temperature_len, self.use_irope = -1, False
        for name, value in changes.items():
            assert hasattr(self, name), name
            setattr(self, name, value)


@dataclasses.dataclass
class KVWriteLoc:
    loc: torch.Tensor
    swa_loc: torch.Tensor | None = None


class Pool:
    """K and V of each layer, [slots, heads, head_dim]; NaN where nothing was written."""

    def __init__(self, slots: list[int], heads: int, head_dim: int, dtype: torch.dtype, device: str) -> None:
        self.kv = [torch.full((2, n, heads, head_dim), float("nan"), device=device).to(dtype) for n in slots]
        self.pairs = [(kv[0], kv[1]) for kv in self.kv]

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.pairs[layer_id]

    def set_kv_buffer(
        self, layer: Any, places: KVWriteLoc, k: Any, v: Any, k_scale: Any = None, v_scale: Any = None
    ) -> None:
        for half, new, scale in ((0, k, k_scale), (1, v, v_scale)):
            new = new if scale is None else new / scale
            self.kv[layer.layer_id][half][self.slots(layer, places)] = new.to(self.kv[layer.layer_id].dtype)

    def slots(self, layer: Any, places: KVWriteLoc) -> torch.Tensor:
        return places.loc


class SWAKVPool(Pool):
    """Layer 1 has a pool of its own, for windows."""

    layers_mapping = {0: (0, False), 1: (0, True)}
    full_to_swa_index_mapping: torch.Tensor

    def translate_loc_from_full_to_swa(self, slots: torch.Tensor) -> torch.Tensor:
        return self.full_to_swa_index_mapping[slots]

    def slots(self, layer: Any, places: KVWriteLoc) -> torch.Tensor:
        if not self.layers_mapping[layer.layer_id][1]:
            return places.loc
        assert places.swa_loc is not None
        return places.swa_loc


class MLATokenToKVPool:
    """Latent rows of each layer, [slots, 1, columns]; NaN where nothing was written."""

    def __init__(self, slots: int, columns: int, ckv: int, dtype: torch.dtype, device: str) -> None:
        self.rows, self.ckv = torch.full((slots, 1, columns), float("nan"), device=device).to(dtype), ckv

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.rows, self.rows[..., : self.ckv]

    def set_kv_buffer(self, layer: Any, slots: torch.Tensor, rows: torch.Tensor, v: None) -> None:
        self.rows[slots] = rows.to(self.rows.dtype)

    def set_mla_kv_buffer(self, layer: Any, slots: torch.Tensor, k: torch.Tensor, k_rope: torch.Tensor) -> None:
        self.set_kv_buffer(layer, slots, torch.cat([k, k_rope], -1), None)


class AttentionBackendRegistry:
    """The functions that choose between the two attentions of a layer over latent rows."""

    known: ClassVar[dict[str, Any]] = {}

    @classmethod
    def register(cls, name: str, function: Any) -> None:
        cls.known[name] = function


_HANDLERS = {
    "AttentionBackendRegistry": AttentionBackendRegistry,
    "handle_attention_fa3": lambda attention, batch: "fa3",
    "handle_attention_triton": lambda attention, batch: "triton",
}
_MODULES: dict[str, dict[str, Any]] = {
    "sglang.srt.arg_groups.model_override_base": {"model_config_of": lambda arguments: arguments.model_config},
    "sglang.srt.environ": {"envs": SimpleNamespace()},
    "sglang": {"__version__": TESTED["sglang"][-1]},
    "sglang.srt.layers.attention.base_attn_backend": {"AttentionBackend": AttentionBackend},
    "sglang.srt.layers.radix_attention": {"RadixAttention": RadixAttention},
    "sglang.srt.mem_cache.memory_pool": {"KVWriteLoc": KVWriteLoc},
    "sglang.srt.mem_cache.swa_memory_pool": {"SWAKVPool": SWAKVPool},
    "sglang.srt.model_executor.forward_batch_info": {"ForwardMode": ForwardMode},
    "sglang.srt.models.deepseek_common.attention_backend_handler": _HANDLERS,
    "sglang.srt.models.deepseek_common.utils": {"FORWARD_ABSORB_CORE_ATTENTION_BACKENDS": []},
}


def install() -> None:
    """Puts the names where imports find them, in this process."""
    for path, names in _MODULES.items():
        parts = path.split(".")
        for i in range(len(parts)):
            module = sys.modules.setdefault(".".join(parts[: i + 1]), ModuleType(parts[i]))
            if i:
                setattr(sys.modules[".".join(parts[:i])], parts[i], module)
        vars(sys.modules[path]).update(names)


def server_args(**changes: Any) -> SimpleNamespace:
    """The fields of ServerArgs that the backend reads."""
    usual: dict[str, Any] = {
        "attention_backend": "flashpage",
        "prefill_attention_backend": None,
        "decode_attention_backend": None,
        "speculative_draft_attention_backend": None,
        "kv_cache_dtype": "auto",
        "page_size": 1,
        "chunked_prefill_size": 128,
        "max_prefill_tokens": 256,
        "speculative_algorithm": None,
        "speculative_eagle_topk": None,
        "speculative_num_draft_tokens": None,
        "enable_deterministic_inference": False,
    }
    return SimpleNamespace(**usual | changes)
