"""Blocks of vLLM's layers with a window, without vLLM; tests/support/vllm_window_blocks.py runs with it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from flashpage.engines.vllm.plugin import window_blocks


class Config(ModuleType):
    """vllm.config: the current configuration is one of the process."""

    current: Any = None

    def get_current_vllm_config_or_none(self) -> Any:
        return self.current

    @contextlib.contextmanager
    def set_current_vllm_config(self, config: Any) -> Iterator[None]:
        before, self.current = self.current, config
        try:
            yield
        finally:
            self.current = before


class Attention:
    """vLLM's layer, which lists the sizes before it says what it needs of the cache."""

    def __init__(self, window: int | None) -> None:
        self.sliding_window = window

    def get_kv_cache_spec(self, vllm_config: Any) -> list[int]:
        return window_blocks.sizes()


@pytest.fixture(autouse=True)
def layers(monkeypatch: pytest.MonkeyPatch) -> type[Attention]:
    """The class of layers, as the plugin has prepared it."""
    folder = "vllm.model_executor.layers.attention"
    module: Any = ModuleType(f"{folder}.attention")
    module.Attention = type("Attention", (Attention,), {"get_kv_cache_spec": Attention.get_kv_cache_spec})
    for name in ("vllm", "vllm.model_executor", "vllm.model_executor.layers", folder):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.config", Config("vllm.config"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    window_blocks.prepare()
    return module.Attention


def engine(layers: type[Attention], block_size: int, *windows: int | None, **of_cache: Any) -> Any:
    found = {f"layer {i}": layers(window) for i, window in enumerate(windows)}
    window_blocks.prepare()  # each layer does
    cache = SimpleNamespace(block_size=block_size, **of_cache)
    return SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=found | {"a mixture": object()}), cache_config=cache
    )


def asked(config: Any) -> list[int]:
    return config.compilation_config.static_forward_context["layer 0"].get_kv_cache_spec(config)


def test_each_engine_of_a_process_has_its_blocks(layers: type[Attention]) -> None:
    first, second, plain = engine(layers, 64, 16, 16), engine(layers, 32, 8), engine(layers, 16, None, 16)
    assert [asked(config) for config in (first, second, plain, first)] == [[64], [32], [], [64]]
    assert window_blocks.sizes() == []  # no engine is known
    del second
    first.cache_config.block_size = 128  # vLLM changes it after it has made the layers
    assert asked(first) == [128]


def test_layers_are_prepared_once(layers: type[Attention]) -> None:
    method = layers.get_kv_cache_spec
    window_blocks.prepare()
    assert layers.get_kv_cache_spec is method


@pytest.mark.parametrize("windows", [(16, 16), (None, 16)])
def test_blocks_that_share_a_size_in_bytes(layers: type[Attention], windows: tuple[int | None, ...]) -> None:
    """vLLM takes the largest whose bytes fit, so all are listed."""
    assert asked(engine(layers, 4, *windows, skip_page_size_padded=4096)) == [1, 2, 3, 4]
    assert asked(engine(layers, 4, *windows, skip_page_size_padded=None)) == ([] if None in windows else [4])
