"""The blocks of layers with a window, by the vLLM that is here: several engines of one process, and layers of two
types."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any
from unittest import mock

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention.attention import Attention

from flashpage.engines.vllm.plugin import fusion
from flashpage.engines.vllm.plugin.backend import FlashpageBackend
from flashpage.engines.vllm.plugin.impl import FlashpageImpl

HEADS, DIM = 2, 64


def engine(block_size: int, *windows: int | None, **of_cache: Any) -> VllmConfig:
    """The configuration of an engine whose layers are made."""
    config = VllmConfig()
    config.cache_config.block_size = block_size
    for name, value in of_cache.items():
        setattr(config.cache_config, name, value)
    with set_current_vllm_config(config), mock.patch.object(fusion, "prepare"):
        for i, window in enumerate(windows):
            impl = FlashpageImpl(HEADS, DIM, 0.1, sliding_window=window)
            config.compilation_config.static_forward_context[f"layer {i}"] = layer(impl, window)
    load_weights(config)
    return config


def load_weights(config: VllmConfig) -> None:
    with set_current_vllm_config(config):
        for each in layers_of(config):
            each.impl.process_weights_after_loading(torch.bfloat16)


def layer(impl: FlashpageImpl, window: int | None, dtype: torch.dtype = torch.bfloat16) -> Any:
    found = Attention.__new__(Attention)
    values = {"impl": impl, "attn_backend": FlashpageBackend, "attn_type": "decoder", "sliding_window": window}
    values |= {"num_kv_heads": HEADS, "head_size": DIM, "head_size_v": DIM}
    vars(found).update(values, kv_cache_dtype="auto", kv_cache_torch_dtype=dtype)
    return found


def blocks(config: VllmConfig) -> list[int]:
    """As a worker asks its layers, with no current configuration."""
    return [layer.get_kv_cache_spec(config).block_size for layer in layers_of(config)]


def layers_of(config: VllmConfig) -> Iterable[Any]:
    return config.compilation_config.static_forward_context.values()


def check() -> None:
    check_engines_of_a_process()
    check_a_draft()
    check_layers_of_two_types()


def check_engines_of_a_process() -> None:
    """Each has its own blocks, whichever was made last and whichever still exists. vLLM's classes, and flashpage's, are
    what they were."""
    methods = [dict(vars(each)) for each in (Attention, FlashpageBackend)]
    first, second = engine(64, 16, 16), engine(32, 8)
    assert (blocks(first), blocks(second), blocks(first)) == ([64, 64], [32], [64, 64])
    others = engine(16, None)
    assert (blocks(first), blocks(others)) == ([64, 64], [16])
    del others, second
    load_weights(first)  # again
    assert blocks(first) == [64, 64]
    (found,) = {each.get_attn_backend().full_cls_name() for each in layers_of(first)}
    assert found == FlashpageBackend.full_cls_name()
    assert methods == [dict(vars(each)) for each in (Attention, FlashpageBackend)]


def check_a_draft() -> None:
    """Layers of a draft are made with a configuration that vLLM keeps no longer than that."""
    config = engine(64, 16)
    draft = copy.copy(config)
    with set_current_vllm_config(draft), mock.patch.object(fusion, "prepare"):
        impl = FlashpageImpl(HEADS, DIM, 0.1, sliding_window=16)
    config.compilation_config.static_forward_context["draft"] = layer(impl, 16)
    load_weights(config)
    del draft
    assert blocks(config) == [64, 64]


def check_layers_of_two_types() -> None:
    """Layers in fp8 and one in bf16, by --kv-cache-dtype-skip-layers: blocks have equally many bytes."""
    config = engine(64, 16, 16, skip_page_size_padded=64 * 2 * HEADS * DIM)
    layers = config.compilation_config.static_forward_context
    layers["layer 1"] = layer(layers["layer 1"].impl, 16, torch.float8_e4m3fn)
    load_weights(config)
    specs = [layer.get_kv_cache_spec(config) for layer in layers.values()]
    assert [spec.block_size for spec in specs] == [32, 64]
    assert {spec.page_size_bytes for spec in specs} == {64 * 2 * HEADS * DIM}
