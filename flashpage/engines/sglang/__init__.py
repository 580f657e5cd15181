"""flashpage as SGLang's attention: `register` is an entry point of the group `sglang.srt.plugins`.

`python -m sglang.launch_server --model-path MODEL --attention-backend flashpage` chooses it. With FLASHPAGE_SGLANG=on
it is also inside SGLang's own backend for models whose indexer lists tokens.
"""

from __future__ import annotations

from typing import Any

from ...base import env
from .name import NAME


def register() -> None:
    """SGLang calls this in each of its processes, before it reads arguments."""
    from sglang.srt import server_args
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend
    from sglang.srt.model_executor import model_runner

    from . import hooks

    if NAME in ATTENTION_BACKENDS:
        return
    register_attention_backend(NAME)(_create)
    for kind in ("attention", "deterministic_attention", "radix_supported_deterministic_attention", "draft_attention"):
        # Versions without a list for drafts take the names of the first list.
        add = getattr(server_args, f"add_{kind}_backend_choices", None)
        if add is not None:
            add([NAME])
    for kind in ("mla", "chunked_prefix_cache"):  # newer versions have no list for MLA
        add = getattr(model_runner, f"add_{kind}_attention_backend", None)
        if add is not None:
            add(NAME)
    hooks.register()
    if env.is_on("FLASHPAGE_SGLANG"):
        from . import listed

        listed.register(ATTENTION_BACKENDS, register_attention_backend)


def _create(runner: Any) -> Any:
    from .backends import backend_of

    return backend_of(runner)
