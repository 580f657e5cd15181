"""Checks of SGLang that list the backends which they admit, and that no registry can add a name to.

A hook goes round each function with such a check. While the function runs, SGLang's view of its arguments has the name
of an admitted backend in place of ours; the arguments themselves keep ours.
"""

from __future__ import annotations

import contextvars
import functools
import logging
import pkgutil
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from .name import CHUNKED, NAME, NAMING_FIELDS

_log = logging.getLogger(__name__)


class Check(NamedTuple):
    """A check by names, of something that flashpage serves."""

    what: str
    functions: tuple[str, ...]  # that have the check; each version of SGLang has one of them
    admitted: str  # a backend that it admits
    models: tuple[str, ...] = ()  # architectures for which it is such a check; empty: all


_VIEW = "sglang.srt.arg_groups.overrides.resolved_view"
_CHECKS = (
    Check(
        "gpt-oss, EXAONE 4, Gemma 4 and Llama 4",
        (
            "sglang.srt.server_args.ServerArgs._handle_model_specific_adjustments",
            "sglang.srt.arg_groups.model_hook.handle_model_specific_adjustments",
        ),
        "triton",
        (
            *("GptOssForCausalLM", "Exaone4ForCausalLM", "ExaoneMoEForCausalLM", "ExaoneMoeForCausalLM"),
            *("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration"),
            *CHUNKED,
        ),
    ),
    Check(
        "drafts of trees with pages of several tokens",
        ("sglang.srt.arg_groups.speculative_hook._handle_eagle_family",),
        "triton",
    ),
    Check(
        "n-gram trees with pages of several tokens",
        ("sglang.srt.arg_groups.speculative_hook._handle_ngram",),
        "flashinfer",
    ),
    Check(
        "DeepSeek in deterministic mode",
        (
            "sglang.srt.server_args.ServerArgs._handle_deterministic_inference",
            "sglang.srt.arg_groups.attention_hook.handle_deterministic_inference",
        ),
        "fa3",
    ),
)
_running: contextvars.ContextVar[Check | None] = contextvars.ContextVar("the check that runs", default=None)


def hooks() -> dict[str, Callable[..., Any]]:
    """The hooks to put round functions of this version of SGLang, by the functions' names."""
    if not exists(_VIEW):
        _warn(_CHECKS)
        return {}
    found = {name: functools.partial(_run, check) for check in _CHECKS for name in check.functions if exists(name)}
    missing = [check for check in _CHECKS if not found.keys() & set(check.functions)]
    if missing:
        _warn(missing)
    return {_VIEW: _view, **found}


def exists(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def _warn(missing: Iterable[Check]) -> None:
    _log.warning(
        "This version of SGLang checks names of attention backends in places that flashpage does not know. "
        "It may refuse --attention-backend %s for: %s.",
        NAME,
        "; ".join(check.what for check in missing),
    )


def _run(check: Check, original: Callable[..., Any], *args: Any, **given: Any) -> Any:
    token = _running.set(check)
    try:
        return original(*args, **given)
    finally:
        _running.reset(token)


def _view(original: Callable[[Any], Any], arguments: Any) -> Any:
    """SGLang's view of its ServerArgs."""
    view, check = original(arguments), _running.get()
    if check is None or all(getattr(view, field) != NAME for field in NAMING_FIELDS):
        return view
    return Renamed(view, check.admitted) if _is_of(check, arguments) else view


def _is_of(check: Check, arguments: Any) -> bool:
    from .support import architecture_of, model_config_of

    return not check.models or architecture_of(model_config_of(arguments)) in check.models


class Renamed:
    """A view in which our backend has another name."""

    def __init__(self, view: Any, admitted: str) -> None:
        self._view, self._admitted = view, admitted

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._view, name)
        return self._admitted if name in NAMING_FIELDS and found == NAME else found
