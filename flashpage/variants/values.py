"""Values that record what a traced callable does to them; operations.py has the operations that they know.

Kinds promote as in torch with one width each: bool, int (32 bits), float (fp32).
"""

from __future__ import annotations

import linecache
import math
import operator
import os
import sys
from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any, NoReturn

import torch

from ..base.errors import VariantError

_HERE = os.path.dirname(__file__)
_TORCH = os.path.dirname(torch.__file__)
_KINDS = ("bool", "int", "float")


class _Unknown:
    """Known properties of a value that differs from token to token."""


UNKNOWN = _Unknown()

OPERATIONS: dict[str, Callable[..., Any]] = {}  # by the name that torch's function or method has


class Traced:
    """A node of an expression."""

    __slots__ = ("fixed", "from_score", "kind", "known", "name", "parts", "template", "tensor")
    __hash__ = object.__hash__

    def __init__(self, kind: str, template: str, *parts: Traced, known: Any = UNKNOWN) -> None:
        self.kind, self.template, self.parts, self.known = kind, template, parts, known
        self.from_score: bool = template == "score" or any(part.from_score for part in parts)
        self.name = ""  # of a captured scalar
        self.tensor: torch.Tensor | None = None  # the tensor that is read here, with `parts` as its indices ...
        self.fixed: tuple[tuple[int, int], ...] = ()  # ... except in these dimensions

    @staticmethod
    def scalar(name: str, value: float) -> Traced:
        """A captured number, which has a slot of its own."""
        node = Traced("float" if isinstance(value, float) else "int", "{slot}", known=value)
        node.name = name
        return node

    def __str__(self) -> str:
        return self.template if not self.parts else f"a traced {self.kind}"

    @property
    def dtype(self) -> torch.dtype:
        return {"bool": torch.bool, "int": torch.int32, "float": torch.float32}[self.kind]

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def ndim(self) -> int:
        return 0

    @property
    def shape(self) -> torch.Size:
        return torch.Size(())

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return apply_torch(func, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        operation = OPERATIONS.get(name) or refuse_operation(f".{name}")
        return lambda *args, **kwargs: operation(self, *args, **kwargs)

    def _value(self, convert: Callable[[Any], Any], what: str, fix: str) -> Any:
        """The value of a captured number, which is then compiled in."""
        if self.known is UNKNOWN:
            refuse(f"{what} of a value that differs from token to token", fix)
        return convert(self.known)

    def __bool__(self) -> bool:
        fix = "use torch.where, &, |, ~, torch.minimum or torch.maximum"
        return self._value(bool, "Python's if, while, and, or, not, min, max or in (the truth)", fix)

    def __index__(self) -> int:
        return self._value(
            operator.index,
            "a Python integer (range, an index into a list or an array)",
            "index a captured torch tensor with it, or loop over a constant",
        )

    def __int__(self) -> int:
        return self._value(int, "int()", "use .to(torch.int32)")

    def __float__(self) -> float:
        return self._value(float, "float() or a function of math", "use .float() or torch's function of that name")

    def __len__(self) -> int:
        refuse("the length of a traced value", "it is one number")

    def __iter__(self) -> Any:
        refuse("a loop over a traced value", "it is one number")

    def __getitem__(self, index: Any) -> Any:
        refuse("indexing a traced value", "it is one number")

    def __setitem__(self, index: Any, value: Any) -> None:
        refuse("assignment into a traced value", "return a new value: torch.where(condition, new, old)")


class Partial:
    """A captured tensor with fewer indices than dimensions, as in rows[b][kv_idx]."""

    def __init__(self, tensor: torch.Tensor, indices: tuple[Any, ...]) -> None:
        self._tensor, self._indices = tensor, indices

    def __getitem__(self, index: Any) -> Any:
        return load(self._tensor, (*self._indices, *(index if isinstance(index, tuple) else (index,))))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        refuse(f".{name} of a row of a captured tensor", "index it down to one element")


# Dispatch and errors

_METHODS = {
    **{f"__{name}__": name for name in ("add", "sub", "mul", "pow", "eq", "ne", "lt", "le", "gt", "ge", "neg", "abs")},
    "__truediv__": "div",
    "__floordiv__": "floor_divide",
    "__mod__": "remainder",
    "__invert__": "bitwise_not",
    **{f"__{name}__": f"bitwise_{name}" for name in ("and", "or", "xor")},
    "__lshift__": "bitwise_left_shift",
    "__rshift__": "bitwise_right_shift",
}


def refuse(what: str, fix: str) -> NoReturn:
    """Raises VariantError, which names the operation and shows the user's line."""
    raise VariantError(f"{what} is not supported in a variant: {fix}{user_line()}")


def refuse_operation(shown: str) -> NoReturn:
    """Refuses an operation. `shown` is `.name` for a method or `torch.name`."""
    name = shown.rpartition(".")[2]
    if name in ("item", "tolist", "numpy"):
        refuse(shown, "a traced value has no Python value; keep computing with it")
    if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or name.startswith("__i"):
        refuse(f"{shown} (in place)", "make a new value: x = x + y, or torch.where for a part")
    refuse(shown, f"supported are {', '.join(sorted(OPERATIONS))}")


def apply_torch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Applies a torch function or method to traced values."""
    name = func.__name__
    if name == "__getitem__" and isinstance(args[0], torch.Tensor):
        return load(args[0], args[1] if isinstance(args[1], tuple) else (args[1],))
    operation = OPERATIONS.get(name) or OPERATIONS.get(_METHODS.get(name, ""))
    return (operation or refuse_operation(f"torch.{name}"))(*args, **kwargs)


def contains_traced(values: Iterable[Any]) -> bool:
    return any(isinstance(v, Traced) or (isinstance(v, tuple | list) and contains_traced(v)) for v in values)


def user_line(function: Any = None) -> str:
    """The user's line that is being traced, or the line where `function` is defined."""
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    if code is not None:
        return _shown_line(code, code.co_firstlineno)
    frame = sys._getframe(1)
    while frame is not None and _is_ours(frame.f_code):
        if frame.f_code.co_name == "_call" or frame.f_back is None:  # back at the tracer: no line belongs to the user
            return ""
        frame = frame.f_back
    return _shown_line(frame.f_code, frame.f_lineno)


def where_raised(error: BaseException) -> str:
    """The innermost line of the user's code that an exception came through."""
    shown, trace = "", error.__traceback__
    while trace is not None:
        if not _is_ours(trace.tb_frame.f_code):
            shown = _shown_line(trace.tb_frame.f_code, trace.tb_lineno)
        trace = trace.tb_next
    return shown


def _is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith((_HERE, _TORCH))


def _shown_line(code: CodeType, line: int) -> str:
    text = linecache.getline(code.co_filename, line).strip()
    shown = f'\n  File "{code.co_filename}", line {line}, in {code.co_name}'
    return f"{shown}\n    {text}" if text else shown


# Leaves and conversions


def argument(name: str, kind: str) -> Traced:
    """One of the arguments score, b, h, q_idx and kv_idx."""
    return Traced(kind, name)


def lift(value: Any) -> Traced:
    """Turns a constant, a 0-dimensional tensor or a traced value into a traced value."""
    if isinstance(value, Traced):
        return value
    if isinstance(value, torch.Tensor):
        if value.ndim:
            refuse(f"a captured tensor of {value.ndim} dimensions as a number", "index it down to one element")
        kind = "float" if value.is_floating_point() else "bool" if value.dtype == torch.bool else "int"
        by_value = value.device.type == "cpu"  # then the slot is a scalar
        node = Traced(kind, ("({slot} != 0)" if kind == "bool" else "{slot}") if by_value else "{slot}()")
        node.tensor = value
        return node
    if hasattr(value, "item") and not isinstance(value, Partial):
        value = value.item()  # a numpy scalar
    if isinstance(value, bool):
        return Traced("bool", str(value).lower(), known=value)
    if isinstance(value, int):
        if not -(2**31) < value < 2**31:
            refuse(f"the integer {value}, which 32 bits do not hold,", "write it as a float")
        return Traced("int", str(value) if value >= 0 else f"({value})", known=value)
    if isinstance(value, float):
        return Traced("float", _float_literal(value), known=value)
    if isinstance(value, Partial):
        refuse("a row of a captured tensor as a number", "index it down to one element")
    refuse(f"a {type(value).__name__} as a number", "return or use numbers, traced values and elements of tensors")


def _float_literal(value: float) -> str:
    if math.isnan(value):
        refuse("the constant NaN", "use -infinity to hide a token")
    if abs(value) > 3.4028235e38:
        return "infinity" if value > 0 else "(-infinity)"
    return f"{value!r}f" if value >= 0 else f"({value!r}f)"


def to_float(node: Traced) -> Traced:
    if node.kind == "float":
        return node
    if isinstance(node.known, int) and not node.name and not node.parts:
        return lift(float(node.known))
    return Traced("float", "select({0}, 1.0f, 0.0f)" if node.kind == "bool" else "to_float({0})", node)


def to_int(node: Traced) -> Traced:
    if node.kind == "int":
        return node
    return Traced("int", "select({0}, 1, 0)" if node.kind == "bool" else "to_int({0})", node)


def to_bool(node: Traced) -> Traced:
    if node.kind == "bool":
        return node
    return Traced("bool", "({0} != 0)" if node.kind == "int" else "({0} != 0.0f)", node)


_CONVERT = {"float": to_float, "int": to_int, "bool": to_bool}


def promoted(*nodes: Traced, least: str = "bool") -> tuple[Traced, ...]:
    """The nodes, converted to the widest kind among them."""
    kind = max((least, *(node.kind for node in nodes)), key=_KINDS.index)
    return tuple(_CONVERT[kind](node) for node in nodes)


def load(tensor: torch.Tensor, indices: tuple[Any, ...]) -> Any:
    """An element of a captured tensor. Constant indices are applied at once, so that a view is captured."""
    if len(indices) > tensor.ndim:
        refuse(f"{len(indices)} indices into a captured tensor of {tensor.ndim} dimensions", "give one a dimension")
    parts, fixed = [], []
    for dim, index in enumerate(indices):
        value = index.known if isinstance(index, Traced) else index
        if type(value) is int:
            if not -tensor.shape[dim] <= value < tensor.shape[dim]:
                refuse(f"index {value} into a dimension of {tensor.shape[dim]}", "stay inside the tensor")
            fixed.append((dim, value % tensor.shape[dim]))
        elif isinstance(index, Traced) and index.kind == "int":
            parts.append(index)
        elif isinstance(index, torch.Tensor) and index.ndim == 0 and not index.is_floating_point():
            parts.append(to_int(lift(index)))
        else:
            kind = f"a traced {index.kind}" if isinstance(index, Traced) else f"{type(index).__name__}"
            refuse(f"{kind} as an index", "index with integers: b, h, q_idx, kv_idx and what is computed from them")
    if len(indices) < tensor.ndim:
        return Partial(tensor, indices)
    kind = "float" if tensor.is_floating_point() else "bool" if tensor.dtype == torch.bool else "int"
    node = Traced(kind, "{slot}(" + ", ".join(f"{{{i}}}" for i in range(len(parts))) + ")", *parts)
    node.tensor, node.fixed = tensor, tuple(fixed)
    return node
