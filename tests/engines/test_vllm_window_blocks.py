"""Blocks of vLLM's layers with a window, without vLLM; tests/support/vllm_window_blocks.py runs with it."""

from __future__ import annotations

import gc
import sys
import weakref
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from flashpage.engines.vllm.plugin import window_blocks


class OfVllm:
    """vLLM 0.26's class of backends, which asks no more than the class."""

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[Any]:
        return ["multiples of 16"]


class OfNewerVllm:
    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return ["multiples of 16"]


class Backend:
    """flashpage's."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return ["any"]


class Layer:
    def __init__(self, window: int | None) -> None:
        self.sliding_window, self.impl, self.attn_backend = window, object(), Backend

    def get_kv_cache_spec(self) -> list[Any]:
        return self.attn_backend.get_supported_kernel_block_sizes()


class Engine(SimpleNamespace):
    """A configuration of vLLM's."""

    def __init__(self, block_size: int, *windows: int | None, **of_cache: Any) -> None:
        layers = {f"layer {i}": Layer(window) for i, window in enumerate(windows)} | {"a mixture": object()}
        super().__init__(
            compilation_config=SimpleNamespace(static_forward_context=layers),
            cache_config=SimpleNamespace(block_size=block_size, **of_cache),
        )

    @property
    def layers(self) -> list[Layer]:
        return [layer for layer in self.compilation_config.static_forward_context.values() if isinstance(layer, Layer)]

    def load_weights(self) -> Engine:
        sys.modules["vllm.config"].current = self  # type: ignore[attr-defined]
        for layer in self.layers:
            window_blocks.give(layer.impl)
        sys.modules["vllm.config"].current = None  # type: ignore[attr-defined]
        return self

    def blocks(self) -> list[list[Any]]:
        return [layer.get_kv_cache_spec() for layer in self.layers]


@pytest.fixture(autouse=True)
def backends(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of vLLM's backends."""
    modules = ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backend", "vllm.config")
    found: dict[str, Any] = {name: ModuleType(name) for name in modules}
    for name, module in found.items():
        monkeypatch.setitem(sys.modules, name, module)
    found["vllm.config"].get_current_vllm_config_or_none = lambda: found["vllm.config"].current
    found["vllm.config"].current = None
    found["vllm.v1.attention.backend"].AttentionBackend = OfVllm
    return found["vllm.v1.attention.backend"]


def test_each_engine_of_a_process_has_its_blocks() -> None:
    first, second = Engine(64, 16, 16).load_weights(), Engine(32, 8).load_weights()
    plain = Engine(16, None, 16).load_weights()
    assert first.blocks() == first.blocks() == [[64, "any"]] * 2
    assert (second.blocks(), plain.blocks()) == ([[32, "any"]], [["any"]] * 2)
    assert Backend.get_supported_kernel_block_sizes() == ["any"]  # no engine is known
    first.cache_config.block_size = 128  # vLLM changes it after it has made the layers
    assert first.load_weights().blocks() == [[128, "any"]] * 2
    assert {(layer.attn_backend.__module__, layer.attn_backend.__qualname__) for layer in first.layers} == {
        (Backend.__module__, Backend.__qualname__)
    }
    assert len(first.layers[0].attn_backend.__mro__) == 4  # the class of the first load


def test_an_engine_is_not_kept(backends: Any) -> None:
    engine = Engine(64, 16).load_weights()
    backend, known = engine.layers[0].attn_backend, weakref.ref(engine)
    del engine
    gc.collect()
    assert known() is None and backend.get_supported_kernel_block_sizes() == ["any"]


def test_without_a_configuration_and_in_newer_versions_layers_keep_their_class(backends: Any) -> None:
    engine = Engine(64, 16)
    window_blocks.give(engine.layers[0].impl)
    backends.AttentionBackend = OfNewerVllm
    assert engine.load_weights().layers[0].attn_backend is Backend


@pytest.mark.parametrize("windows", [(16, 16), (None, 16)])
def test_blocks_that_share_a_size_in_bytes(windows: tuple[int | None, ...]) -> None:
    """vLLM takes the largest whose bytes fit, so all are listed."""
    shared, usual = ([1, 2, 3, 4, "any"], ["any"] if None in windows else [4, "any"])
    assert Engine(4, *windows, skip_page_size_padded=4096).load_weights().blocks()[1] == shared
    assert Engine(4, *windows, skip_page_size_padded=None).load_weights().blocks()[1] == usual
