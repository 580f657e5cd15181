"""The extend of a draft in a CUDA graph, by the list of classes that SGLang captures; in a stand-in of its worker."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import fake_sglang
import pytest

fake_sglang.install()
from flashpage.engines.sglang import hooks  # noqa: E402
from flashpage.engines.sglang.backend import FlashpageBackend  # noqa: E402
from flashpage.engines.sglang.latent import FlashpageLatentBackend  # noqa: E402

REGISTRY = "sglang.srt.plugins.hook_registry"


class TritonAttnBackend: ...


class FlashAttentionBackend: ...


class EagleDraftWorker:
    """As SGLang's: early ends, and a list of classes."""

    def __init__(self, backend: Any, is_disabled: bool = False) -> None:
        self.draft_extend_attn_backend, self.is_disabled = backend, is_disabled

    def _capture_cuda_graphs(self) -> None:
        self.cuda_graph_runner_for_draft_extend: Any = None
        if self.is_disabled:
            return
        known = [sys.modules[hooks._EAGLE].TritonAttnBackend, dict]
        if self.draft_extend_attn_backend and isinstance(self.draft_extend_attn_backend, tuple(known)):
            self.cuda_graph_runner_for_draft_extend = "SGLang's own runner"


class HookRegistry:
    """Applies hooks to functions of the worker."""

    registered: dict[str, Any]

    @classmethod
    def register(cls, name: str, hook: Any, kind: str) -> None:
        assert kind == "around" and name not in cls.registered
        cls.registered[name] = hook

    @classmethod
    def apply_hooks(cls) -> None:
        for name, hook in cls.registered.items():
            place, owner, function = name.rsplit(".", 2)
            kind = getattr(sys.modules[place], owner)
            setattr(kind, function, functools.partialmethod(_around, hook, getattr(kind, function)))


def _around(worker: Any, hook: Any, original: Any) -> Any:
    return hook(original, worker)


@pytest.fixture
def eagle(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The worker's module."""
    module: Any = ModuleType(hooks._EAGLE)
    module.TritonAttnBackend, module.EagleDraftWorker = TritonAttnBackend, type("Worker", (EagleDraftWorker,), {})
    registry: Any = ModuleType(REGISTRY)
    registry.HookRegistry, registry.HookType = HookRegistry, SimpleNamespace(AROUND="around")
    HookRegistry.registered = {}
    for name, stand_in in ((hooks._EAGLE, module), ("sglang.srt.plugins", ModuleType("plugins")), (REGISTRY, registry)):
        monkeypatch.setitem(sys.modules, name, stand_in)
    hooks._register_graphs.cache_clear()
    yield module
    hooks._register_graphs.cache_clear()


def made(kind: type[Any]) -> Any:
    return kind.__new__(kind)


def create(backend: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The backend of a draft's extend, by SGLang's factory with our hook."""
    from flashpage.engines.sglang import backends

    monkeypatch.setattr(backends, "backend_of", lambda runner: backend)
    factory = SimpleNamespace(
        _create_triton_decode_backend=object(), draft_model_runner=None, topk=1, speculative_num_steps=3
    )

    def original(factory: Any, name: str, backend_map: dict[str, Any], error_template: str) -> Any:
        return backend_map["flashpage"]()

    return hooks._create_draft_backend(original, factory, "prefill", {"triton": object()}, "")


@pytest.mark.parametrize("kind", [FlashpageBackend, FlashpageLatentBackend])
def test_sglang_captures_ours_by_its_own_runner(kind: type[Any], eagle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = eagle.EagleDraftWorker(made(kind))
    worker._capture_cuda_graphs()
    assert worker.cuda_graph_runner_for_draft_extend is None  # without the hook
    for _ in range(2):  # adaptive drafts make their backends more than once
        assert create(worker.draft_extend_attn_backend, monkeypatch) is worker.draft_extend_attn_backend
    worker._capture_cuda_graphs()
    assert worker.cuda_graph_runner_for_draft_extend == "SGLang's own runner"
    assert eagle.TritonAttnBackend is TritonAttnBackend


@pytest.mark.parametrize(
    ("backend", "is_disabled", "is_captured"),
    [
        (made(FlashpageBackend), True, False),
        (made(TritonAttnBackend), False, True),
        (made(FlashAttentionBackend), False, False),
        (None, False, False),
    ],
)
def test_all_else_is_as_before(
    backend: Any, is_disabled: bool, is_captured: bool, eagle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(made(FlashpageBackend), monkeypatch)
    worker = eagle.EagleDraftWorker(backend, is_disabled)
    worker._capture_cuda_graphs()
    assert (worker.cuda_graph_runner_for_draft_extend is not None) == is_captured


def test_the_list_is_as_before_when_a_capture_fails(eagle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(worker: Any) -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        hooks._capture_draft_graphs(fail, eagle.EagleDraftWorker(made(FlashpageBackend)))
    assert eagle.TritonAttnBackend is TritonAttnBackend


@pytest.mark.parametrize("missing", ["TritonAttnBackend", "EagleDraftWorker", "the module"])
def test_a_version_without_the_list(missing: str, eagle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if missing == "the module":  # drafts of another worker, or none
        monkeypatch.delitem(sys.modules, hooks._EAGLE)
    else:
        delattr(eagle, missing)
    create(made(FlashpageBackend), monkeypatch)
    assert not HookRegistry.registered


@pytest.mark.parametrize("backend", [made(FlashpageBackend), made(TritonAttnBackend)])
def test_arguments_of_other_versions_reach_the_worker(backend: Any, eagle: Any) -> None:
    def capture(worker: Any, *args: Any, **given: Any) -> Any:
        return args, given

    found = hooks._capture_draft_graphs(capture, eagle.EagleDraftWorker(backend), 4, batch_sizes=[8])
    assert found == ((4,), {"batch_sizes": [8]})
