"""Functions of SGLang that put another attention backend in the place of one that they do not know, or stop for it.

A hook goes round each of them: it keeps our name where our backend has what is needed, and says at the start why not
where it has not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from .admission import Renamed, exists
from .name import NAME, NAMING_FIELDS

_log = logging.getLogger(__name__)


class _Place(NamedTuple):
    """A function of SGLang that chooses a backend by its name."""

    what: str
    function: str
    hook: Callable[..., Any]


def hooks() -> dict[str, Callable[..., Any]]:
    """The hooks to put round functions of this version of SGLang, by the functions' names."""
    found = {place.function: place.hook for place in _PLACES if exists(place.function)}
    missing = [place.what for place in _PLACES if place.function not in found]
    if missing:
        _log.warning(
            "This version of SGLang chooses attention backends in places that flashpage does not know. "
            "It may replace --attention-backend %s, or refuse it, for: %s.",
            NAME,
            "; ".join(missing),
        )
    return found


def _keep_block_draft(original: Callable[[Any], None], arguments: Any) -> None:
    """A DFLASH draft: rows of a block see each other and all earlier tokens, as layers of an encoder do. Newer versions
    compare the name with a list that has ours."""
    if exists(f"{_SPECULATIVE}.DRAFT_ATTENTION_BACKEND_CHOICES"):
        return original(arguments)
    from sglang.srt.arg_groups.overrides import attention_backends_of, resolved_view

    name = arguments.speculative_draft_attention_backend
    if name is None:
        name, _ = attention_backends_of(resolved_view(arguments))
    if name != NAME:
        return original(arguments)
    arguments.speculative_draft_attention_backend = NAME
    return None


def _keep_diffusion(original: Callable[[Any], dict[str, Any]], view: Any) -> dict[str, Any]:
    """A diffusion model (dLLM), whose steps are blocks of tokens that see each other and all earlier ones, captured or
    not: what SGLang admits flashinfer for. Algorithms that name a backend themselves have masks of their own."""
    declared = original(Renamed(view, "flashinfer"))
    for field in NAMING_FIELDS:
        if field in declared and getattr(view, field, None) == NAME:
            raise ValueError(
                f"--dllm-algorithm {view.dllm_algorithm}: SGLang runs it with its {declared[field]} attention alone. "
                f"Choose --attention-backend {declared[field]}."
            )
    return declared


def _wrap_hybrid(original: Callable[[Any, Any], Any], runner: Any, backend: Any) -> Any:
    """A model with linear attention (GDN) next to layers of ours. On Blackwell SGLang compares names with a list: of
    the arguments, or in newer versions of the runner. While it does, a name of the list stands there."""
    from sglang.srt.utils import is_blackwell

    if not is_blackwell():
        return original(runner, backend)
    owner, fields = runner, tuple(f"{field}_str" for field in NAMING_FIELDS[1:])
    if not hasattr(owner, fields[0]):
        owner, fields = runner.server_args, NAMING_FIELDS[:1]
    ours = [field for field in fields if getattr(owner, field) == NAME]
    try:
        for field in ours:
            setattr(owner, field, "triton")
        return original(runner, backend)
    finally:
        for field in ours:
            setattr(owner, field, NAME)


_SPECULATIVE = "sglang.srt.arg_groups.speculative_hook"
_PLACES = (
    _Place("DFLASH drafts", f"{_SPECULATIVE}._resolve_dflash_draft_attention_backend", _keep_block_draft),
    _Place("diffusion models", "sglang.srt.arg_groups.overrides._dllm_attention_backend", _keep_diffusion),
    _Place(
        "models with linear attention on Blackwell",
        "sglang.srt.layers.attention.attention_registry.attn_backend_wrapper",
        _wrap_hybrid,
    ),
)
