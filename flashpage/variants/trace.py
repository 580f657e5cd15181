"""Tracing of score_mod and mask_mod: they run once on values that record what is done to them.

A Python float or int that the callable captures (closure, global, default) becomes a run-time scalar: another value
compiles nothing. Compiled in are the constants written in the callable, captured bools, numbers inside containers and
attributes of objects, and captured numbers where Python itself needs the value (`if`, `range`, `math.sqrt`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..base.errors import VariantError
from . import operations  # noqa: F401 (gives traced values their operations)
from .capture import Captures
from .places import CHANGED, Places
from .source import is_free_name, unique_name
from .spec import VariantSpec
from .traced import TracedVariant, scalar_type, tensor_type
from .values import Traced, apply_torch, argument, contains_traced, lift, to_bool, to_float, user_line, where_raised


class Trace:
    """The callables of one variant."""

    def __init__(self, score_mod: Callable[..., Any] | None, mask_mod: Callable[..., Any] | None) -> None:
        self._score_mod, self._mask_mod = score_mod, mask_mod
        self.places = CHANGED  # if they are unchanged, the last result's spec is still right
        self._reads_values = False  # the result has values of tensors, which may change at any time
        self._result = TracedVariant()

    def result(self) -> TracedVariant:
        """The last trace if everything captured is still the same, otherwise a new one."""
        if not self._reads_values and self.places.are_unchanged():
            return self._result
        captures = Captures(Traced.scalar)
        score_mod = captures.replaced(self._score_mod, "score_mod")
        mask_mod = captures.replaced(self._mask_mod, "mask_mod")
        places = Places.of(*captures.reads)
        emitter, mode = _Emitter(captures.tensor_names), _Intercept()
        indices = [argument(name, "int") for name in ("b", "h", "q_idx", "kv_idx")]
        logit = mask = ""
        if score_mod is not None:
            score = argument("score", "float")
            result = to_float(_call("score_mod", self._score_mod, score_mod, mode, [score, *indices]))
            logit = "" if result is score else emitter.stage(result)
        if mask_mod is not None:
            result = to_bool(_call("mask_mod", self._mask_mod, mask_mod, mode, indices))
            mask = "" if result.template == "true" else emitter.stage(result)
        self._result = emitter.finish(logit, mask)
        self.places = places if captures.stable and not mode.computed else CHANGED
        self._reads_values = emitter.reads_values
        return self._result


def _call(role: str, original: Any, function: Any, mode: TorchFunctionMode, arguments: list[Traced]) -> Traced:
    """Calls the callable and returns its result; its own exceptions name the user's line."""
    try:
        with mode:
            result = function(*arguments)
    except VariantError:
        raise
    except Exception as error:
        names = ", ".join(str(value) for value in arguments)
        where = where_raised(error) or f", called as {role}({names}){user_line(original)}"
        raise VariantError(f"{role} raised {type(error).__name__}: {error}{where}") from error
    if isinstance(result, Traced | bool | int | float) or (isinstance(result, torch.Tensor) and result.ndim == 0):
        return lift(result)
    raise VariantError(
        f"{role} returned a {type(result).__name__}, expected one number or traced value{user_line(original)}"
    )


class _Intercept(TorchFunctionMode):
    """Redirects torch functions on traced values to their implementation here; other torch functions run."""

    computed = False  # a torch function ran whose result may differ next time

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if contains_traced(args) or contains_traced(kwargs.values()):
            return apply_torch(func, args, kwargs)
        self.computed |= func.__name__ not in ("__get__", "is_floating_point")  # properties of a tensor do not count
        return func(*args, **kwargs)


class _Emitter:
    """Writes expressions as text, and lists their slots in the order of first use."""

    def __init__(self, tensor_names: dict[int, str]) -> None:
        self.reads_values = False
        self._tensor_names = tensor_names
        self._names: set[str] = set()
        self._tensors: dict[Any, tuple[str, str, torch.Tensor]] = {}  # by identity: name, element type, tensor
        self._scalars: dict[Any, tuple[str, str, float | int]] = {}

    def stage(self, root: Traced) -> str:
        """An expression or, if a part is used more than once, temporaries and a return."""
        uses: dict[int, int] = {}
        _count_uses(root, uses)
        temporaries: list[str] = []
        result = self._text(root, uses, temporaries, {})
        return f"{' '.join(temporaries)} return {_bare(result)};" if temporaries else _bare(result)

    def finish(self, logit: str, mask: str) -> TracedVariant:
        tensors, scalars = list(self._tensors.values()), list(self._scalars.values())
        spec = VariantSpec(
            logit,
            mask,
            tuple((name, element, tensor.ndim) for name, element, tensor in tensors),
            tuple((name, kind) for name, kind, _ in scalars),
        )
        return TracedVariant(spec, tuple(slot[2] for slot in tensors), tuple(slot[2] for slot in scalars))

    def _text(self, node: Traced, uses: dict[int, int], temporaries: list[str], done: dict[int, str]) -> str:
        if id(node) in done:
            return done[id(node)]
        parts = [self._text(part, uses, temporaries, done) for part in node.parts]
        text = node.template.format(*parts, slot=self._slot(node))
        if node.parts and uses[id(node)] > 1:
            name = unique_name(f"v{len(temporaries)}", self._names)
            temporaries.append(f"const auto {name} = {_bare(text)};")
            text = name
        done[id(node)] = text
        return text

    def _slot(self, node: Traced) -> str:
        """The name of the scalar or tensor that a node reads; "" if it reads none."""
        if node.tensor is not None:
            if node.tensor.ndim == 0 and node.tensor.device.type == "cpu":
                self.reads_values = True  # passed by value, so it is read again at every plan
                return self._scalar(id(node.tensor), self._hint(node.tensor), node.tensor.item())
            return self._tensor(node.tensor, node.fixed)
        return self._scalar(id(node), node.name, node.known) if node.name else ""

    def _tensor(self, tensor: torch.Tensor, fixed: tuple[tuple[int, int], ...]) -> str:
        key = id(tensor), fixed
        if key not in self._tensors:
            view = tensor
            for dim, index in reversed(fixed):
                view = view.select(dim, index)
            name = self._name(self._hint(tensor))
            self._tensors[key] = name, tensor_type(name, view), view
        return self._tensors[key][0]

    def _scalar(self, key: int, hint: str, value: float) -> str:
        if key not in self._scalars:
            name = self._name(hint)
            self._scalars[key] = name, scalar_type(name, value), value
        return self._scalars[key][0]

    def _hint(self, tensor: torch.Tensor) -> str:
        return self._tensor_names.get(id(tensor), "tensor")

    def _name(self, hint: str) -> str:
        return unique_name(hint if is_free_name(hint) else f"captured_{hint.strip('_')}", self._names)


def _bare(text: str) -> str:
    """The text without parentheses around the whole."""
    if not text.startswith("("):
        return text
    depth = 0
    for place, character in enumerate(text):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth == 0:
            return text[1:-1] if place == len(text) - 1 else text
    return text


def _count_uses(node: Traced, uses: dict[int, int]) -> None:
    uses[id(node)] = uses.get(id(node), 0) + 1
    if uses[id(node)] == 1:
        for part in node.parts:
            _count_uses(part, uses)
