"""The operations of traced values: Python's operators, and torch's functions and methods by name."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch

from .values import OPERATIONS, UNKNOWN, Traced, lift, promoted, refuse, to_bool, to_float, to_int

_MAX_POWER = 16


def _operation(*names: str) -> Callable[[Callable[..., Traced]], Callable[..., Traced]]:
    """Registers a function under torch's names for it; its positional arguments are lifted."""

    def register(function: Callable[..., Traced]) -> Callable[..., Traced]:
        def lifted(*values: Any, **options: Any) -> Traced:
            return function(*(lift(value) for value in values), **options)

        for name in names:
            OPERATIONS[name] = lifted
        return lifted

    return register


def _same_kind(x: Traced, y: Traced, symbol: str) -> Traced:
    a, b = promoted(x, y, least="int")
    return Traced(a.kind, f"({{0}} {symbol} {{1}})", a, b)


@_operation("add")
def _add(x: Traced, y: Traced, alpha: Any = 1) -> Traced:
    y = y if alpha == 1 else _mul(y, alpha)
    return _logical_or(x, y) if x.kind == y.kind == "bool" else _same_kind(x, y, "+")


@_operation("sub", "subtract")
def _sub(x: Traced, y: Traced, alpha: Any = 1) -> Traced:
    if "bool" in (x.kind, y.kind):
        refuse("- of a bool", "use ~ to invert it, torch.where to count with it")
    return _same_kind(x, y if alpha == 1 else _mul(y, alpha), "-")


@_operation("mul", "multiply")
def _mul(x: Traced, y: Traced) -> Traced:
    return _logical_and(x, y) if x.kind == y.kind == "bool" else _same_kind(x, y, "*")


@_operation("div", "divide", "true_divide")
def _div(x: Traced, y: Traced, rounding_mode: str | None = None) -> Traced:
    if rounding_mode == "floor":
        return _floor_div(x, y)
    if rounding_mode is not None:
        refuse(f"div with rounding_mode={rounding_mode!r}", 'use "floor" or none')
    a, b = to_float(x), to_float(y)
    if a.from_score and not b.from_score and not b.parts:
        return Traced("float", "({0} * (1.0f / {1}))", a, b)  # the reciprocal is the same for every token
    return Traced("float", "({0} / {1})", a, b)


def _function_of_two(name: str) -> Callable[[Traced, Traced], Traced]:
    def compute(x: Traced, y: Traced) -> Traced:
        a, b = promoted(x, y, least="int")
        return Traced(a.kind, f"{name}({{0}}, {{1}})", a, b)

    return compute


_floor_div = _operation("floor_divide")(_function_of_two("floor_div"))
_mod = _operation("remainder")(_function_of_two("mod"))
_minimum = _operation("minimum", "min", "fmin")(_function_of_two("min"))
_maximum = _operation("maximum", "max", "fmax")(_function_of_two("max"))


@_operation("pow")
def _pow(x: Traced, y: Traced) -> Traced:
    if y.known is UNKNOWN:
        if x.known is UNKNOWN or x.known <= 0:
            refuse("** with an exponent that differs from token to token", "the base must be a positive constant")
        return _exp(_mul(y, math.log(x.known)))
    exponent = y.known
    if exponent == 0.5:
        return _sqrt(x)
    if exponent != int(exponent) or abs(exponent) > _MAX_POWER or (exponent < 0 and x.kind != "float"):
        refuse(f"** {exponent}", f"powers are whole numbers up to {_MAX_POWER}, negative ones of floats, and 0.5")
    if exponent < 0:
        return _div(1.0, _pow(x, -exponent))
    x = x if isinstance(exponent, int) else to_float(x)
    result: Traced | None = None
    for bit in f"{int(exponent):b}":
        result = _mul(result, result) if result is not None else None
        if bit == "1":
            result = x if result is None else _mul(result, x)
    return result if result is not None else lift(1 if x.kind == "int" else 1.0)


def _logical(name: str) -> Callable[[Traced, Traced], Traced]:
    return lambda x, y: Traced("bool", f"logical_{name}({{0}}, {{1}})", to_bool(x), to_bool(y))


_logical_and = _operation("logical_and")(_logical("and"))
_logical_or = _operation("logical_or")(_logical("or"))
_logical_xor = _operation("logical_xor")(_logical("xor"))


@_operation("logical_not")
def _logical_not(x: Traced) -> Traced:
    return Traced("bool", "logical_not({0})", to_bool(x))


def _bitwise(symbol: str, of_bools: Callable[..., Traced] | None = None) -> Callable[[Traced, Traced], Traced]:
    def compute(x: Traced, y: Traced) -> Traced:
        if "float" in (x.kind, y.kind):
            refuse(f"{symbol} of a float", "compare it first")
        return of_bools(x, y) if of_bools and x.kind == y.kind == "bool" else _same_kind(x, y, symbol)

    return compute


_bitwise_and = _operation("bitwise_and")(_bitwise("&", _logical_and))
_bitwise_or = _operation("bitwise_or")(_bitwise("|", _logical_or))
_bitwise_xor = _operation("bitwise_xor")(_bitwise("^", _logical_xor))
_left_shift = _operation("bitwise_left_shift")(_bitwise("<<"))
_right_shift = _operation("bitwise_right_shift")(_bitwise(">>"))


@_operation("bitwise_not")
def _bitwise_not(x: Traced) -> Traced:
    if x.kind == "float":
        refuse("~ of a float", "compare it first")
    return _logical_not(x) if x.kind == "bool" else Traced("int", "(~{0})", x)


def _comparison(symbol: str) -> Callable[[Traced, Traced], Traced]:
    def compare(x: Traced, y: Traced) -> Traced:
        a, b = promoted(x, y, least="int")
        return Traced("bool", f"({{0}} {symbol} {{1}})", a, b)

    return compare


_lt = _operation("lt", "less")(_comparison("<"))
_le = _operation("le", "less_equal")(_comparison("<="))
_gt = _operation("gt", "greater")(_comparison(">"))
_ge = _operation("ge", "greater_equal")(_comparison(">="))
_eq = _operation("eq")(_comparison("=="))
_ne = _operation("ne", "not_equal")(_comparison("!="))


@_operation("neg", "negative")
def _neg(x: Traced) -> Traced:
    if x.kind == "bool":
        refuse("- of a bool", "use ~ to invert it")
    return Traced(x.kind, "(-{0})", x)


@_operation("abs", "absolute")
def _abs(x: Traced) -> Traced:
    (value,) = promoted(x, least="int")
    return Traced(value.kind, "abs({0})", value)


@_operation("where")
def _where(condition: Traced, x: Traced, y: Traced) -> Traced:
    a, b = promoted(x, y)
    return Traced(a.kind, "select({0}, {1}, {2})", to_bool(condition), a, b)


@_operation("clamp", "clip")
def _clamp(x: Traced, *bounds: Traced, min: Any = None, max: Any = None) -> Traced:
    low, high = (*bounds, min, max)[:2] if len(bounds) != 1 else (bounds[0], max)
    x = x if low is None else _maximum(x, low)
    return x if high is None else _minimum(x, high)


def _float_function(name: str) -> Callable[[Traced], Traced]:
    return lambda x: Traced("float", f"{name}({{0}})", to_float(x))


_exp = _operation("exp")(_float_function("exp"))
_log = _operation("log")(_float_function("log"))
_tanh = _operation("tanh")(_float_function("tanh"))
_sigmoid = _operation("sigmoid")(_float_function("sigmoid"))
_sqrt = _operation("sqrt")(_float_function("sqrt"))


@_operation("floor")
def _floor(x: Traced) -> Traced:
    return Traced("float", "floor({0})", x) if x.kind == "float" else to_int(x)


@_operation("ceil")
def _ceil(x: Traced) -> Traced:
    return _neg(_floor(_neg(x)))


_operation("exp2")(lambda x: _exp(_mul(x, math.log(2.0))))
_operation("log2")(lambda x: _mul(_log(x), 1.0 / math.log(2.0)))
_operation("rsqrt")(lambda x: _div(1.0, _sqrt(x)))
_operation("reciprocal")(lambda x: _div(1.0, x))
_operation("square")(lambda x: _mul(x, x))
_operation("relu")(lambda x: _maximum(x, 0))


# Conversions and constants

OPERATIONS["float"] = OPERATIONS["half"] = OPERATIONS["bfloat16"] = OPERATIONS["double"] = to_float
OPERATIONS["int"] = OPERATIONS["long"] = to_int
OPERATIONS["bool"] = to_bool


def _to(x: Traced, *targets: Any, dtype: Any = None, **options: Any) -> Traced:
    """.to(dtype), .to(other), .to(device, dtype): floats compute in fp32, integers in 32 bits."""
    for target in (*targets, dtype):
        target = getattr(target, "dtype", target)
        if isinstance(target, torch.dtype):
            dtype = target
    if dtype is None:
        return x
    if dtype.is_floating_point:
        return to_float(x)
    if dtype == torch.bool:
        return to_bool(x)
    if dtype not in (torch.int32, torch.int64):
        refuse(f".to({dtype})", "integers are torch.int32 here")
    return to_int(x)


def _same(x: Traced, *args: Any, **options: Any) -> Traced:
    return x


def _constant(value: Any, dtype: Any) -> Traced:
    return lift(value) if dtype is None else _to(lift(value), dtype)


OPERATIONS["to"] = OPERATIONS["type"] = OPERATIONS["type_as"] = _to
for _name in ("clone", "contiguous", "detach", "cpu", "cuda"):
    OPERATIONS[_name] = _same
OPERATIONS["new_ones"] = OPERATIONS["ones_like"] = lambda x, *size, dtype=None, **_: _constant(1, dtype or x.dtype)
OPERATIONS["new_zeros"] = OPERATIONS["zeros_like"] = lambda x, *size, dtype=None, **_: _constant(0, dtype or x.dtype)
OPERATIONS["new_tensor"] = lambda x, value, dtype=None, **_: _constant(value, dtype)
OPERATIONS["full_like"] = lambda x, value, dtype=None, **_: _constant(value, dtype or x.dtype)
OPERATIONS["new_full"] = lambda x, size, value, dtype=None, **_: _constant(value, dtype or x.dtype)


# Python's operators

_ARITHMETIC = {"add": _add, "sub": _sub, "mul": _mul, "truediv": _div, "floordiv": _floor_div, "mod": _mod, "pow": _pow}
_BITS = {"and": _bitwise_and, "or": _bitwise_or, "xor": _bitwise_xor, "lshift": _left_shift, "rshift": _right_shift}
_COMPARISONS = {"lt": _lt, "le": _le, "gt": _gt, "ge": _ge, "eq": _eq, "ne": _ne}
_UNARY = {"neg": _neg, "abs": _abs, "invert": _bitwise_not, "pos": _same}


def _install(
    name: str, implementation: Callable[..., Traced], python: Callable[..., Any], swapped: bool = False
) -> None:
    def method(*values: Any) -> Traced:
        lifted = tuple(lift(value) for value in (reversed(values) if swapped else values))
        result = implementation(*lifted)
        if result.known is UNKNOWN and all(value.known is not UNKNOWN for value in lifted):
            result.known = python(*(value.known for value in lifted))
        return result

    method.__name__ = name
    setattr(Traced, name, method)


for _name, _implementation in (_ARITHMETIC | _BITS | _COMPARISONS | _UNARY).items():
    _python = getattr(operator, f"__{_name}__")
    _install(f"__{_name}__", _implementation, _python)
    if _name in _ARITHMETIC | _BITS:
        _install(f"__r{_name}__", _implementation, _python, swapped=True)
