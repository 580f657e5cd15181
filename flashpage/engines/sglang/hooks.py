"""Hooks, by SGLang's own registry, where its code names the attention backends that it knows."""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

from . import admission, replacements
from .name import NAME

_EAGLE = "sglang.srt.speculative.eagle_worker_v2"


def register() -> None:
    """Registers the hooks; SGLang applies them before it starts."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.utils.common.support_triton", _support_triton, HookType.AROUND)
    factory = "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend"
    HookRegistry.register(factory, _create_draft_backend, HookType.AROUND)
    HookRegistry.register("sglang.srt.server_args.ServerArgs.check_server_args", _check_server_args, HookType.BEFORE)
    for name, hook in (admission.hooks() | replacements.hooks()).items():
        HookRegistry.register(name, hook, HookType.AROUND)


def _support_triton(original: Any, backend: str) -> bool:
    """Whether SGLang's own helpers next to this attention backend run by Triton: not on the CPU."""
    import torch

    if backend == NAME:
        return torch.cuda.is_available()
    return bool(original(backend))


def _create_draft_backend(
    original: Any,
    factory: Any,
    backend_name: str,
    backend_map: dict[str, Any],
    *args: Any,
    **given: Any,
) -> Any:
    """Adds our name to the map of a factory of EAGLE's draft attention."""
    is_steps = backend_map["triton"] == factory._create_triton_decode_backend
    has_stamps = "stamps_children" in inspect.signature(original).parameters  # the map's values return a name too

    def create() -> Any:
        from .backends import backend_of
        from .drafts import FlashpageDraftSteps

        runner = factory.draft_model_runner
        steps = runner, factory.topk, factory.speculative_num_steps
        backend = FlashpageDraftSteps(*steps) if is_steps else backend_of(runner)
        if _has_graph_list(sys.modules.get(_EAGLE)):  # of the worker that calls this; other engines do not import it
            _register_graphs()
        return (NAME, backend) if has_stamps else backend

    return original(factory, backend_name, backend_map | {NAME: create}, *args, **given)


def _has_graph_list(eagle: Any) -> bool:
    """Whether the module captures a draft's extend for classes of a list, Triton's among them."""
    capture = getattr(getattr(eagle, "EagleDraftWorker", None), "_capture_cuda_graphs", None)
    return callable(capture) and isinstance(getattr(eagle, "TritonAttnBackend", None), type)


@functools.cache
def _register_graphs() -> None:
    """SGLang has applied the other hooks by now."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_EAGLE}.EagleDraftWorker._capture_cuda_graphs", _capture_draft_graphs, HookType.AROUND)
    HookRegistry.apply_hooks()


def _capture_draft_graphs(original: Any, worker: Any, *args: Any, **given: Any) -> Any:
    """Captures the extend of a draft that has our backend, as SGLang does for its own. The function lists the classes
    that it captures by their names; while it runs, Triton's name stands for our class too. `isinstance` takes tuples in
    tuples."""
    from .backend import FlashpageBackend

    if not isinstance(worker.draft_extend_attn_backend, FlashpageBackend):
        return original(worker, *args, **given)
    eagle = sys.modules[_EAGLE]
    triton = eagle.TritonAttnBackend
    eagle.TritonAttnBackend = triton, FlashpageBackend  # type: ignore[attr-defined]
    try:
        return original(worker, *args, **given)
    finally:
        eagle.TritonAttnBackend = triton  # type: ignore[attr-defined]


def _check_server_args(arguments: Any) -> None:
    from .support import check_arguments

    check_arguments(arguments)
