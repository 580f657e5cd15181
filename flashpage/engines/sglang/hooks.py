"""Hooks, by SGLang's own registry, where its code names the attention backends that it knows."""

from __future__ import annotations

import inspect
from typing import Any

from . import admission
from .name import NAME


def register() -> None:
    """Registers the hooks; SGLang applies them before it starts."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.utils.common.support_triton", _support_triton, HookType.AROUND)
    factory = "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend"
    HookRegistry.register(factory, _create_draft_backend, HookType.AROUND)
    HookRegistry.register("sglang.srt.server_args.ServerArgs.check_server_args", _check_server_args, HookType.BEFORE)
    for name, hook in admission.hooks().items():
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
        return (NAME, backend) if has_stamps else backend

    return original(factory, backend_name, backend_map | {NAME: create}, *args, **given)


def _check_server_args(arguments: Any) -> None:
    from .support import check_arguments

    check_arguments(arguments)
