"""TracedVariant: a variant's spec together with the tensors and numbers that it captures."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from ..base.errors import VariantError
from .source import ELEMENT_CPP
from .spec import VariantSpec

if TYPE_CHECKING:
    import torch

MAX_TENSORS = 8  # of params.h VariantArgs
MAX_SCALARS = 8
MAX_RANK = 4  # of params.h VariantTensor


@dataclasses.dataclass(frozen=True)
class TracedVariant:
    """The identity of a variant (compiled in) and the values of its slots (given at every run)."""

    spec: VariantSpec = VariantSpec()
    tensors: tuple[torch.Tensor, ...] = ()
    scalars: tuple[float | int, ...] = ()

    def __post_init__(self) -> None:
        for what, slots, most in (
            ("tensors", self.spec.tensors, MAX_TENSORS),
            ("scalars", self.spec.scalars, MAX_SCALARS),
        ):
            if len(slots) > most:
                names = ", ".join(slot[0] for slot in slots)
                raise VariantError(
                    f"the variant captures {len(slots)} {what} ({names}), at most {most}: merge some of them"
                )


def tensor_type(name: str, tensor: torch.Tensor) -> str:
    """The name of the element type in a spec; refuses types that kernels cannot read."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in ELEMENT_CPP:
        raise VariantError(f"captured tensor {name!r} has dtype {dtype}: convert it to one of {', '.join(ELEMENT_CPP)}")
    if tensor.ndim > MAX_RANK:
        raise VariantError(f"captured tensor {name!r} has {tensor.ndim} dimensions, at most {MAX_RANK}: flatten some")
    if str(tensor.layout) != "torch.strided":
        raise VariantError(f"captured tensor {name!r} has layout {tensor.layout}: convert it with .to_dense()")
    if tensor.ndim and tensor.stride(-1) * tensor.element_size() >= 2**31:
        raise VariantError(f"captured tensor {name!r} has stride {tensor.stride(-1)} in its last dimension: copy it")
    return dtype


def scalar_type(name: str, value: float) -> str:
    """ "float" or "int"; refuses other types and integers of more than 32 bits."""
    if isinstance(value, float):
        return "float"
    if isinstance(value, bool) or not isinstance(value, int):
        raise VariantError(f"captured scalar {name!r} is {type(value).__name__}, expected a Python float or int")
    if not -(2**31) <= value < 2**31:
        raise VariantError(f"captured scalar {name!r} is {value}, which 32 bits do not hold: make it a float")
    return "int"
