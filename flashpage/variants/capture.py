"""The captures of a callable: copies it with its captured numbers replaced, and decides when it must be traced
again."""

from __future__ import annotations

import functools
import gc
import itertools
import operator
import types
from collections.abc import Callable
from typing import Any

import torch

from .places import END, Read

_STABLE_MODULES = ("torch", "math", "numpy", "builtins")
_STABLE_TYPES = (type(None), bool, str, type, torch.dtype, torch.device, types.BuiltinFunctionType)
_MISSING = object()
_OF_FUNCTION = operator.attrgetter("__code__", "__defaults__", "__kwdefaults__")
_OF_PARTIAL = operator.attrgetter("func", "args")


class Captures:
    """Closure cells, defaults and globals of callables, including those of the functions that they call.

    `make_scalar(name, value)` returns the stand-in for a captured Python float or int. Numbers that are reached in
    another way (attributes of an object, elements of a list) are not replaced.
    """

    def __init__(self, make_scalar: Callable[[str, float | int], Any]) -> None:
        self.reads: list[Read] = []  # for Places.of
        self.stable = True  # False: something may change inside and stay the same object
        self.tensor_names: dict[int, str] = {}  # by id
        self._make_scalar = make_scalar
        self._functions: dict[types.FunctionType, types.FunctionType] = {}
        self._places: dict[Any, Any] = {}  # a cell or a global: one scalar for all functions that read it

    def replaced(self, value: Any, name: str) -> Any:
        """The value that the traced copy uses instead."""
        if type(value) in (int, float):
            return self._make_scalar(name, value)
        return self._replaced_object(value, name)

    def _replaced_object(self, value: Any, name: str) -> Any:
        if isinstance(value, torch.Tensor):
            self.tensor_names.setdefault(id(value), name)
        elif isinstance(value, types.FunctionType):
            return self._function(value)
        elif isinstance(value, types.MethodType):
            self.stable = False
            return types.MethodType(self.replaced(value.__func__, name), value.__self__)
        elif isinstance(value, functools.partial):
            self.reads.append(functools.partial(_OF_PARTIAL, value))
            self._read_dict(value.keywords)
            keywords = {key: self.replaced(item, key) for key, item in value.keywords.items()}
            return functools.partial(self.replaced(value.func, name), *self._elements(value.args, name), **keywords)
        elif type(value) in (tuple, list):
            self.reads.append(functools.partial(itertools.chain, value, END))
            return type(value)(self._elements(value, name))
        elif type(value) is dict:
            self._read_dict(value)
            return dict(zip(value, self._elements(value.values(), name), strict=True))
        elif isinstance(value, types.ModuleType):
            self.stable &= value.__name__.partition(".")[0] in _STABLE_MODULES
        elif not isinstance(value, (*_STABLE_TYPES, int, float)):
            self.stable = False
        return value

    def _read_dict(self, read: dict[str, Any]) -> None:
        self.reads.append(functools.partial(itertools.chain, read, END, read.values()))

    def _place(self, key: Any, value: Any, name: str) -> Any:
        if key not in self._places:
            self._places[key] = self.replaced(value, name)
        return self._places[key]

    def _elements(self, values: Any, name: str) -> list[Any]:
        return [self._replaced_object(value, name) for value in values]

    def _function(self, function: types.FunctionType) -> types.FunctionType:
        if function in self._functions:
            return self._functions[function]
        code = function.__code__
        scope = function.__globals__
        if (function.__module__ or "").partition(".")[0] != "torch":
            scope = dict(scope)
        cells = tuple(types.CellType() for _ in function.__closure__ or ())
        copy = types.FunctionType(code, scope, function.__name__, None, cells)
        self._functions[function] = copy  # first, because it may capture itself
        self.reads.append(functools.partial(_OF_FUNCTION, function))
        if function.__closure__:
            self.reads += functools.partial(gc.get_referents, *function.__closure__), END.__iter__
        if scope is not function.__globals__:
            names = _names(code)
            self.reads.append(functools.partial(map, function.__globals__.get, names, itertools.repeat(_MISSING)))
            for name in names:
                if name in scope:
                    scope[name] = self._place((id(function.__globals__), name), scope[name], name)
        for cell, source, name in zip(cells, function.__closure__ or (), code.co_freevars, strict=True):
            try:
                cell.cell_contents = self._place(id(source), source.cell_contents, name)
            except ValueError:
                continue  # not assigned yet: only an error if it is read
        defaults = function.__defaults__ or ()
        with_default = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
        pairs = zip(defaults, with_default, strict=True)
        copy.__defaults__ = tuple(self.replaced(value, name) for value, name in pairs)
        if keywords := function.__kwdefaults__:
            self._read_dict(keywords)
            copy.__kwdefaults__ = {name: self.replaced(value, name) for name, value in keywords.items()}
        return copy


@functools.lru_cache(maxsize=256)
def _names(code: types.CodeType) -> tuple[str, ...]:
    """Names that the code, or nested code, may look up in its globals."""
    inner = [name for constant in code.co_consts if isinstance(constant, types.CodeType) for name in _names(constant)]
    return tuple(sorted({*code.co_names, *inner}))
