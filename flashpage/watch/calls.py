"""Wraps the public functions and methods, if one of their three variables is set when flashpage is imported.

A call that another watched call makes is part of it: it is neither logged nor kept by itself, but plans and runs of the
inner interface get an NVTX range with the name of their kernel.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.compiler import is_dynamo_compiling

from ..base import env, log, refused
from ..wrappers.base import Attention
from . import describe, dump

DOORS = (
    *("attention", "cascade", "decode", "flash_attn", "flash_mla", "mla", "page", "parallel", "pod", "prefill"),
    *("quantization", "sparse"),
)
METHODS = ("plan", "plan_on_device", "run", "run_return_lse", "forward", "forward_return_lse", "reset_workspace_buffer")
# Calls that a later call of the same object depends on; "": its constructor.
_STATE = ("", "plan", "begin_forward", "plan_on_device")


class Settings(NamedTuple):
    """The three variables."""

    level: int
    folder: Path | None
    has_ranges: bool

    @staticmethod
    def of_environment() -> Settings:
        folder = env.get("FLASHPAGE_DUMP")
        return Settings(env.log_level(), Path(folder) if folder else None, env.is_on("FLASHPAGE_NVTX"))


class _Local(threading.local):
    is_inside = False  # a watched call of this thread


_local = _Local()
_histories: weakref.WeakKeyDictionary[Any, dict[str, dump.Call]] = weakref.WeakKeyDictionary()


def install() -> None:
    """Replaces the public functions, and the public methods of classes, by functions that watch them."""
    settings = Settings.of_environment()
    if settings == Settings(0, None, False):
        return
    if settings.level or settings.folder:
        log.show()
    for door in DOORS:
        module = importlib.import_module(f"flashpage.{door}")
        for name in module.__all__:
            item = getattr(module, name)
            if name in refused.REASONS or hasattr(item, "__wrapped__"):
                continue
            if inspect.isfunction(item):
                _replace(item, _watch(item, name, settings))
            elif inspect.isclass(item) and any(hasattr(item, method) for method in METHODS):
                _watch_class(item, settings)
    _watch_class(Attention, settings)


def _replace(function: Any, watched: Any) -> None:
    """Puts a function in another's place wherever the package holds it."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "flashpage":
            for key, value in list(vars(module).items()):
                if value is function:
                    setattr(module, key, watched)


def _watch_class(cls: type, settings: Settings) -> None:
    """Watches the methods that the class or its bases define, under the name of the object's class."""
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] != "flashpage":
            continue
        for name, value in list(vars(base).items()):
            function = value.func if isinstance(value, functools.partialmethod) else value
            is_own = name == "__init__" and base is cls
            is_method = inspect.isfunction(function) and (function.__name__ in METHODS or is_own)  # begin_forward too
            if not is_method or hasattr(function, "__wrapped__"):
                continue
            watched = _watch(function, "" if is_own else name, settings, True)
            if function is not value:
                watched = functools.partialmethod(watched, *value.args, **value.keywords)
            setattr(base, name, watched)


def _watch(function: Callable[..., Any], name: str, settings: Settings, is_method: bool = False) -> Any:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return function(*args, **kwargs)
        owner = args[0] if is_method else None
        full = name if owner is None else f"{type(owner).__name__}.{name}".rstrip(".")
        is_inner = isinstance(owner, Attention)
        if _local.is_inside:
            if not (is_inner and settings.has_ranges and name):
                return function(*args, **kwargs)
            with _range(f"{name} {_kernel_of(owner)}"):
                return function(*args, **kwargs)
        call = dump.Call(full, _named(signature, args, kwargs, is_method))
        _local.is_inside = True
        begin = time.perf_counter()
        try:
            with _range(f"{full} {_kernel_of(owner)}".rstrip()) if settings.has_ranges else contextlib.nullcontext():
                result = function(*args, **kwargs)
        except Exception as error:
            _failed(call, owner, name, error, settings)
            raise
        finally:
            _local.is_inside = False
        _done(call, owner, name, result, time.perf_counter() - begin, settings)
        return result

    return watched


def _named(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any], is_method: bool) -> Any:
    """The arguments by name; those that do not fit the signature stay as they are."""
    try:
        found = dict(signature.bind(*args, **kwargs).arguments)
    except TypeError:
        found = dict(zip((f"argument {i}" for i in range(len(args))), args, strict=True)) | kwargs
    if is_method:
        found.pop(next(iter(found)))
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            found |= found.pop(parameter.name, {})
    return found


def _kernel_of(owner: Any) -> str:
    """The name of the kernel of an object's plan; empty without one."""
    try:
        return str(owner.resolved_backend)
    except Exception:  # no plan, or an object that has no one kernel
        return ""


@contextlib.contextmanager
def _range(name: str) -> Any:
    """A range for NVTX where torch has it, and one for torch's own profiler."""
    with torch.profiler.record_function(f"flashpage {name}"):
        if not torch.cuda.is_available():
            yield
            return
        with torch.cuda.nvtx.range(f"flashpage {name}"):
            yield


def _done(call: dump.Call, owner: Any, name: str, result: Any, seconds: float, settings: Settings) -> None:
    if settings.level:
        log.LOGGER.info("%s", _line(call, result, seconds, settings.level))
    if settings.folder is None or isinstance(owner, Attention):
        return
    if owner is not None and name in _STATE:
        history = _histories.setdefault(owner, {})
        for other in _STATE[1:]:
            history.pop(other, None)
        history[name] = call.copied()
    elif settings.level >= 5 and _has_nan(result):
        _keep(call, owner, "the result has NaN", settings.folder)


def _failed(call: dump.Call, owner: Any, name: str, error: Exception, settings: Settings) -> None:
    if settings.level:
        log.LOGGER.warning("%s failed: %s: %s", _line(call, None, 0.0, settings.level), type(error).__name__, error)
    if settings.folder is not None and not isinstance(owner, Attention):
        _keep(call, owner, f"{type(error).__name__}: {error}", settings.folder)


def _keep(call: dump.Call, owner: Any, reason: str, folder: Path) -> None:
    history = [] if owner is None else list(_histories.get(owner, {}).values())
    try:
        path = dump.keep(folder, [*history, call], reason)
    except (OSError, RuntimeError) as error:  # a full disk must not hide the call's own error
        log.LOGGER.warning("the inputs of %s could not be kept in %s: %s", call.name, folder, error)
        return
    if path is not None:
        log.LOGGER.warning("kept the inputs of %s in %s: run `flashpage replay %s`", call.name, path, path)


def _line(call: dump.Call, result: Any, seconds: float, level: int) -> str:
    if level < 3:
        return call.name
    text = f"{call.name}({describe.arguments(call.arguments, level)})"
    if result is not None:
        text += f" -> {describe.value(result, level)}"
    return f"{text} in {seconds * 1e6:.0f} us" if seconds else text


def _has_nan(result: Any) -> bool:
    parts = result if isinstance(result, tuple) else (result,)
    tensors = [part for part in parts if isinstance(part, torch.Tensor) and part.is_floating_point()]
    return any(bool(tensor.float().isnan().any()) for tensor in tensors)
