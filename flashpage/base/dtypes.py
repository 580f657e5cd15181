"""The element types that kernels support, and their names in torch and in C++."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import dtype as TorchDtype  # the class below has a property named torch


class DType(enum.Enum):
    """An element type. Its value is its name in specs, caches and messages, which is torch's name."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT8_E4M3 = "float8_e4m3fn"
    FLOAT8_E5M2 = "float8_e5m2"
    BYTES = "uint8"  # of caches whose formats say what they hold (kernels/kv_formats.py); not a caller's choice

    @staticmethod
    def elements() -> tuple[DType, ...]:
        """The types that tensors of numbers have."""
        return tuple(dtype for dtype in DType if dtype is not DType.BYTES)

    @property
    def size(self) -> int:
        """Bytes of one element."""
        return {"float32": 4, "float16": 2, "bfloat16": 2}.get(self.value, 1)

    @property
    def is_fp8(self) -> bool:
        return self in (DType.FLOAT8_E4M3, DType.FLOAT8_E5M2)

    @property
    def widened(self) -> DType:
        """The type in which a card computes with stored values of this type: fp16 holds every fp8 number exactly."""
        return DType.FLOAT16 if self.size == 1 else self

    @property
    def cpp(self) -> str:
        """The C++ type of include/flashpage/common/types.h."""
        return _CPP[self]

    @property
    def host_code(self) -> int:
        """The number of an element type that the host library can merge (element_type in csrc/flashpage.h)."""
        return _HOST_CODES[self]

    @property
    def torch(self) -> TorchDtype:
        import torch

        return getattr(torch, self.value)

    @staticmethod
    def of(value: TorchDtype | str | DType) -> DType:
        """From a torch dtype, a name ("bfloat16", "torch.bfloat16") or a DType; KeyError for types without a kernel."""
        if isinstance(value, DType):
            return value
        found = _BY_NAME.get(value)  # torch dtypes are added to this table at their first look-up
        if found is None:
            found = _BY_NAME[str(value).removeprefix("torch.")]
            _BY_NAME[value] = found
        return found


_CPP = {
    DType.FLOAT32: "float",
    DType.FLOAT16: "flashpage::Half",
    DType.BFLOAT16: "flashpage::Bf16",
    DType.FLOAT8_E4M3: "flashpage::E4m3",
    DType.FLOAT8_E5M2: "flashpage::E5m2",
    DType.BYTES: "flashpage::u8",
}
_HOST_CODES = {DType.FLOAT32: 0, DType.FLOAT16: 1, DType.BFLOAT16: 2, DType.FLOAT8_E4M3: 3}
_BY_NAME: dict[object, DType] = {
    **{d.value: d for d in DType.elements()},
    "half": DType.FLOAT16,
    "float": DType.FLOAT32,
}
