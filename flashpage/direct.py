"""Functions of the host library that Python calls as builtins, with tensors as they are.

ctypes would convert each argument (0.06 us) and read each tensor's shape, strides, type and address through Python
(0.5 us a tensor); torch's DLPack functions, which torch has since 2.10, read one in 0.07 us.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch

from . import host

_METH_FASTCALL = 0x80  # CPython's stable ABI: (self, arguments, count)


class _MethodDef(ctypes.Structure):
    """CPython's PyMethodDef."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    ]


_BIND = _MethodDef(b"fp_py_bind", None, _METH_FASTCALL, None)  # a builtin refers to its definition
_RUN = _MethodDef(b"fp_py_run", None, _METH_FASTCALL, None)


@functools.cache
def functions() -> tuple[Callable[..., int], Callable[..., int]]:
    """(bind, run) of csrc/flashpage.h; where torch has no DLPack functions, two that know no tensor."""
    if not _connect():
        return _knows_no_tensor, _knows_no_tensor
    return _builtin(_BIND), _builtin(_RUN)


def _knows_no_tensor(*_: Any) -> int:
    return host.OTHER_TENSORS


def _connect() -> bool:
    """Gives the host library what it needs of Python and of torch."""
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        return False
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    python = host.Python(
        long_from_long=_address(ctypes.pythonapi.PyLong_FromLong),
        long_as_void_ptr=_address(ctypes.pythonapi.PyLong_AsVoidPtr),
        err_clear=_address(ctypes.pythonapi.PyErr_Clear),
        eval_save_thread=_address(ctypes.pythonapi.PyEval_SaveThread),
        eval_restore_thread=_address(ctypes.pythonapi.PyEval_RestoreThread),
        none=id(None),
        tensors=get_pointer(capsule, b"dlpack_exchange_api"),
    )
    return bool(host.load().fp_python_set(ctypes.addressof(python)) == host.OK)


def _builtin(definition: _MethodDef) -> Callable[..., int]:
    definition.function = _address(getattr(host.load(), definition.name.decode()))
    make = ctypes.pythonapi.PyCFunction_NewEx
    make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    function: Callable[..., int] = make(ctypes.addressof(definition), None, None)
    return function


def _address(function: Any) -> int | None:
    return ctypes.cast(function, ctypes.c_void_p).value
