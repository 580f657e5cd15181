"""Functions of the host library that Python calls as builtins, with tensors as they are.

ctypes would convert each argument (0.06 us) and read each tensor's shape, strides, type and address through Python
(0.5 us a tensor); torch's DLPack functions, which torch has since 2.10, read one in 0.07 us.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .. import native

_METH_FASTCALL = 0x80  # in CPython's stable ABI: (self, arguments, count)


class _MethodDef(ctypes.Structure):
    """CPython's PyMethodDef."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    ]


class Builtins(NamedTuple):
    """The functions fp_py_* of csrc/flashpage.h without their prefix. Without torch's DLPack functions they accept no
    tensor."""

    bind: Callable[..., int]
    run: Callable[..., int]
    plan: Callable[..., int]


_definitions: list[_MethodDef] = []  # kept alive, because builtins refer to them


@functools.cache
def builtins() -> Builtins:
    """The builtins, made once in a process."""
    if _connect():
        return Builtins(*map(_builtin, Builtins._fields))
    return Builtins(_other_tensors, _other_tensors, _other_tensors)


def _other_tensors(*_: Any) -> int:
    return native.OTHER_TENSORS


def _connect() -> bool:
    """Passes the functions of Python and torch to the host library; returns whether it can read tensors."""
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    python = native.Python(
        long_from_long=_address(ctypes.pythonapi.PyLong_FromLong),
        long_as_void_ptr=_address(ctypes.pythonapi.PyLong_AsVoidPtr),
        err_clear=_address(ctypes.pythonapi.PyErr_Clear),
        eval_save_thread=_address(ctypes.pythonapi.PyEval_SaveThread),
        eval_restore_thread=_address(ctypes.pythonapi.PyEval_RestoreThread),
        none=id(None),
        tensors=None if capsule is None else get_pointer(capsule, b"dlpack_exchange_api"),
    )
    return bool(native.load().fp_python_set(ctypes.addressof(python)) == native.OK)


def _builtin(name: str) -> Callable[..., int]:
    symbol = f"fp_py_{name}"
    definition = _MethodDef(symbol.encode(), _address(getattr(native.load(), symbol)), _METH_FASTCALL, None)
    _definitions.append(definition)
    make = ctypes.pythonapi.PyCFunction_NewEx
    make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    function: Callable[..., int] = make(ctypes.addressof(definition), None, None)
    return function


def _address(function: Any) -> int | None:
    return ctypes.cast(function, ctypes.c_void_p).value
