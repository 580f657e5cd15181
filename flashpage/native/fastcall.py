"""Functions of the host library that Python calls as builtins, with tensors as they are.

ctypes would convert each argument (0.06 us) and read each tensor's shape, strides, type and address through Python
(0.5 us a tensor); torch's DLPack functions, which torch has since 2.10, read one in 0.07 us.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .. import native

_METH_FASTCALL = 0x80  # in CPython's stable ABI: (self, arguments, count)
# The exports of torch for the fields of fp_python (csrc/flashpage.h), and where. A torch without one has no fast calls.
_OF_TORCH = {
    "is_negative": ("libtorch_cpu.so", "_ZN2at6native6is_negERKNS_6TensorE"),
    "is_inference": ("libtorch_cpu.so", "_ZN2at6native12is_inferenceERKNS_6TensorE"),
    "requires_grad": ("libc10.so", "_ZNK3c1010TensorImpl13requires_gradEv"),
    "is_grad_enabled": ("libc10.so", "_ZN3c108GradMode10is_enabledEv"),
    "storage_bytes": ("libtorch_cpu.so", "aoti_torch_get_storage_size"),
    "storage_offset": ("libtorch_cpu.so", "aoti_torch_get_storage_offset"),
    "bump_version": ("libtorch_cpu.so", "_ZN5torch8autograd4impl12bump_versionERKN2at6TensorE"),
}


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
    judge: Callable[..., int]


_definitions: list[_MethodDef] = []  # kept alive, because builtins refer to them


@functools.cache
def builtins() -> Builtins:
    """The builtins, made once in a process."""
    if _connect():
        return Builtins(*map(_builtin, Builtins._fields))
    return Builtins(*(_other_tensors for _ in Builtins._fields))


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
        tensor_class=id(torch.Tensor),
        tensor_offset=_tensor_offset(),
        **_functions_of_torch(),
    )
    return bool(native.load().fp_python_set(ctypes.addressof(python)) == native.OK)


def _functions_of_torch() -> dict[str, int | None]:
    """Their addresses; nothing where this torch lacks one."""
    folder = Path(torch.__file__).parent / "lib"
    try:
        found = {name: getattr(ctypes.CDLL(str(folder / file)), symbol) for name, (file, symbol) in _OF_TORCH.items()}
    except (OSError, AttributeError):
        return {}
    return {name: _address(function) for name, function in found.items()}


def _tensor_offset() -> int:
    """Bytes from a Python tensor to its at::Tensor, which is the address of a TensorImpl; 0 where it is not found."""
    size, word = torch.Tensor.__basicsize__, ctypes.sizeof(ctypes.c_void_p)
    tensors = [torch.empty(1, device="cpu") for _ in range(3)]
    places = [
        [i for i, found in enumerate((ctypes.c_void_p * (size // word)).from_address(id(tensor))) if found == impl]
        for tensor, impl in ((tensor, tensor._cdata) for tensor in tensors)
    ]
    return places[0][0] * word if len(places[0]) == 1 and places[1:] == places[:-1] else 0


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
