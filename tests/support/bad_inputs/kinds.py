"""The kinds of arguments: which values are bad for each.

A badness changes the arguments of one call. Its expected outcome, unless expected.py has another one for the row:

    error    a FlashpageError that names the argument
    works    the result of the good arguments
    safe     one of the two
    clean    a FlashpageError, or any result
    any      any error or result, but no crash
    missing  a TypeError that names the argument
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from .scene import Arguments, Make

Change = Callable[[Make, Any], Any]  # the good value (None if the argument has none) -> the bad one


class NotApplicable(Exception):
    """This badness cannot be made from this value."""


@dataclasses.dataclass(frozen=True)
class Badness:
    name: str
    expect: str
    change: Change = lambda make, value: None
    cuda: bool = True  # False: values on a device are not checked, so the row runs on the CPU alone
    many: Callable[[Make, Arguments, str], None] | None = None  # changes several arguments, in place of `change`

    def apply(self, make: Make, given: Arguments, name: str, good: Any) -> None:
        if self.many is not None:
            self.many(make, given, name)
        else:
            given[name] = self.change(make, good)


def tensor(change: Callable[[torch.Tensor], Any]) -> Change:
    """A change of a tensor, or of the last tensor in a list."""

    def changed(make: Make, value: Any) -> Any:
        if isinstance(value, (list, tuple)) and value and isinstance(value[-1], torch.Tensor):
            return [*value[:-1], change(value[-1])]
        if not isinstance(value, torch.Tensor):
            raise NotApplicable
        return change(value)

    return changed


def constant(value: Any) -> Change:
    return lambda make, good: value


class NoMemory(torch.Tensor):
    """A tensor subclass without memory, such as a DTensor."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> NoMemory:
        made: NoMemory = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{function} of a tensor without memory")


def without_storage(value: torch.Tensor) -> torch.Tensor:
    value = value.clone()
    value.untyped_storage().resize_(0)
    return value


def strided(value: torch.Tensor) -> torch.Tensor:
    """Equal values with a stride of two in the last dimension."""
    if not value.dim() or value.shape[-1] < 2:
        raise NotApplicable
    wide = value.new_zeros(*value.shape[:-1], 2 * value.shape[-1])
    wide[..., ::2] = value
    return wide[..., ::2]


def with_first(number: float, dtype: torch.dtype | None = None) -> Callable[[torch.Tensor], torch.Tensor]:
    def changed(value: torch.Tensor) -> torch.Tensor:
        value = value.to(dtype, copy=True) if dtype is not None else value.clone()
        value.view(-1)[0] = number
        return value

    return changed


def with_last(number: int, dtype: torch.dtype | None = None) -> Callable[[torch.Tensor], torch.Tensor]:
    def changed(value: torch.Tensor) -> torch.Tensor:
        value = value.to(dtype, copy=True) if dtype is not None else value.clone()
        value.view(-1)[-1] = number
        return value

    return changed


def plus_2_32(value: torch.Tensor) -> torch.Tensor:
    """Equal to the good value in its low 32 bits."""
    return value.long() + 2**32


def flipped(value: torch.Tensor) -> torch.Tensor:
    if len(value) < 2 or bool((value == value.flip(0)).all()):
        raise NotApplicable
    return value.flip(0)


def one_more(value: torch.Tensor) -> torch.Tensor:
    return torch.cat([value, value[-1:]])


def expanded(value: torch.Tensor) -> torch.Tensor:
    """Strides of 0: all entries share the memory of the first one."""
    if value.numel() < 2:
        raise NotApplicable
    return value.flatten()[:1].expand(value.numel()).view(value.shape)


def overlapping_rows(value: torch.Tensor) -> torch.Tensor:
    """Rows that overlap: each begins half a row after the one before."""
    if value.dim() < 2 or value.shape[0] < 2:
        raise NotApplicable
    row = value[0].numel()
    memory = value.new_zeros(row * value.shape[0])
    return memory.as_strided(value.shape, (row // 2, *value.stride()[1:]))


def inside_q(make: Make, given: Arguments, name: str) -> None:
    """Gives the argument memory that begins in the middle of q's."""
    source = next((n for n in ("q", "query") if isinstance(given.get(n), torch.Tensor)), None)
    if source is None:
        raise NotApplicable
    q = given[source]
    memory = q.new_zeros(2 * q.numel())
    given[source] = memory[: q.numel()].view(q.shape).copy_(q)
    if name == "lse":
        given[name] = memory.view(torch.uint8).view(torch.float32)[: q[..., 0].numel()].view(q.shape[:-1])
    else:
        given[name] = memory[q.numel() // 2 :][: q.numel()].view(q.shape)


def to_meta(value: torch.Tensor) -> torch.Tensor:
    return value.to("meta")


def is_float(value: torch.Tensor) -> torch.Tensor:
    if not value.dtype.is_floating_point:
        raise NotApplicable
    return value


# ---------------------------------------------------------------- kinds of tensors

NO_TENSORS = (
    Badness("type-list", "error", lambda make, value: [1, 2]),
    Badness("type-number", "error", constant(3)),
    Badness("type-numpy", "error", lambda make, value: np.zeros(4, np.float32)),
    Badness("type-text", "error", constant("tensor")),
)
ANY_TENSOR = (
    Badness("device-meta", "error", tensor(to_meta)),
    Badness("storage-gone", "error", tensor(without_storage)),
    Badness("no-memory", "error", tensor(NoMemory)),
    Badness("sparse", "error", tensor(lambda value: value.to_sparse())),
    Badness("complex", "error", tensor(lambda value: value.to(torch.complex64))),
    Badness("shape-less", "error", tensor(lambda value: value[0])),
    Badness("shape-more", "error", tensor(lambda value: value[None])),
)
NEGATED = Badness("negative-bit", "safe", tensor(lambda value: torch._neg_view(-value)))
DATA = (
    *NO_TENSORS,
    *ANY_TENSOR,
    NEGATED,
    Badness("dtype-double", "error", tensor(lambda value: value.double())),
    Badness("dtype-int", "error", tensor(lambda value: value.int())),
    Badness("shape-narrow", "error", tensor(lambda value: value[..., :-3].contiguous())),
    Badness("stride-last", "safe", tensor(strided)),
    Badness("requires-grad", "error", tensor(lambda value: is_float(value).detach().requires_grad_())),
    Badness("nan", "clean", tensor(with_first(float("nan")))),
)
ROWS = (
    *DATA,
    Badness("shape-rows", "error", tensor(one_more)),
    Badness("heads-none", "error", tensor(lambda value: value[..., :0, :])),
)
CACHE = (
    *DATA,
    Badness("pair-of-one", "error", lambda make, value: (value[:, 0],)),
    Badness("pair-of-three", "error", lambda make, value: (value[:, 0],) * 3),
    Badness("pair-with-none", "error", lambda make, value: (value[:, 0], None)),
    Badness("pair-with-number", "error", lambda make, value: (value[:, 0], 1)),
    Badness("pair-unequal", "error", lambda make, value: (value[:, 0], one_more(value[:, 1]))),
    Badness("pair-dtypes", "error", lambda make, value: (value[:, 0], value[:, 1].double())),
    Badness("pair-list", "works", lambda make, value: [value[:, 0], value[:, 1]]),
    Badness("pages-few", "error", tensor(lambda value: value[:3]), cuda=False),  # only the host checks pages
)
OUTPUT = (
    *(badness for badness in DATA if badness.name not in ("nan", "negative-bit")),
    Badness("negative-bit", "error", tensor(lambda value: torch._neg_view(value))),
    Badness("shape-rows", "error", tensor(one_more)),
    Badness("stride-zero", "error", tensor(expanded)),
    Badness("stride-overlap", "error", tensor(overlapping_rows)),
    Badness("inside-q", "error", many=inside_q),
)
INDEX = (
    *NO_TENSORS,
    *ANY_TENSOR,
    NEGATED,
    Badness("dtype-float", "error", tensor(lambda value: value.float())),
    Badness("dtype-int16", "error", tensor(lambda value: value.short())),
    Badness("dtype-bool", "error", tensor(lambda value: value.bool())),
    Badness("dtype-int64", "safe", tensor(lambda value: value.long())),
    Badness("stride", "safe", tensor(strided)),
    Badness("shape-empty", "error", tensor(lambda value: value[:0])),
    Badness("shape-short", "error", tensor(lambda value: value[:-1]), cuda=False),
    Badness("range-negative", "error", tensor(with_first(-5)), cuda=False),
    Badness("range-2^30", "error", tensor(with_last(2**30)), cuda=False),
    Badness("range-2^31", "error", tensor(with_last(2**31, torch.int64)), cuda=False),
    Badness("range-2^32", "error", tensor(plus_2_32), cuda=False),
    Badness("range-2^62", "error", tensor(with_last(2**62, torch.int64)), cuda=False),
)
INDPTR = (
    *INDEX,
    Badness("shape-long", "error", tensor(one_more)),
    Badness("falls", "error", tensor(flipped), cuda=False),
)
LENGTHS = (*INDEX, Badness("shape-long", "error", tensor(one_more)))
LISTS = tuple(badness for badness in INDEX if badness.name != "shape-more")  # of tokens, [rows, topk]
LISTS_OF_ANY_ROWS = tuple(badness for badness in LISTS if badness.name not in ("shape-empty", "shape-short"))
LIST_OF_INDICES = (
    *(badness for badness in INDEX if badness.name not in ("type-list", "shape-short")),
    Badness("type-tensor", "error", lambda make, value: value[0]),
    Badness("list-short", "error", lambda make, value: value[:-1]),
    Badness("list-long", "error", lambda make, value: [*value, value[-1]]),
    Badness("list-with-none", "error", lambda make, value: [*value[:-1], None]),
    Badness("list-with-list", "error", lambda make, value: [*value[:-1], [0, 1]]),
)
MASK = (
    *NO_TENSORS,
    *(badness for badness in ANY_TENSOR if badness.name not in ("shape-less", "shape-more")),
    Badness("dtype-float", "error", tensor(lambda value: value.float())),
    Badness("dtype-int64", "error", tensor(lambda value: value.long())),
    Badness("shape-short", "error", tensor(lambda value: value.flatten()[:-9])),
    Badness("shape-empty", "error", tensor(lambda value: value.flatten()[:0])),
)
BITS = (*NO_TENSORS, *(b for b in ANY_TENSOR if b.name not in ("shape-less", "shape-more")))
WORKSPACE = (
    *NO_TENSORS,
    *(badness for badness in ANY_TENSOR if badness.name not in ("shape-less", "shape-more", "complex")),
    Badness("misaligned", "error", tensor(lambda value: value[3:])),
    Badness("stride", "error", tensor(lambda value: value[::2])),
    Badness("empty", "clean", tensor(lambda value: value[:0])),
    Badness("stride-zero", "error", tensor(expanded)),
)
SCALE = (
    Badness("nan", "error", constant(float("nan"))),
    Badness("inf", "error", constant(float("inf"))),
    Badness("too-large", "error", constant(1e39)),
    Badness("text", "error", constant("a")),
    Badness("list", "error", constant([1.0, 2.0])),
    Badness("complex", "error", constant(1j)),
    Badness("numpy", "error", lambda make, value: np.ones(3, np.float32)),
    Badness("shape-long", "error", lambda make, value: make.ones(77)),
    Badness("shape-2d", "error", lambda make, value: make.ones(2, 2, 2)),
    Badness("shape-empty", "error", lambda make, value: make.ones(0)),
    Badness("dtype-half", "safe", lambda make, value: make.ones(1).half()),  # one element on the host is a number
    Badness("dtype-int", "safe", lambda make, value: make.ones(1).int()),
    Badness("device-meta", "error", lambda make, value: make.ones(1).to("meta")),
    Badness("no-memory", "error", lambda make, value: NoMemory(make.ones(1))),
    Badness("storage-gone", "error", lambda make, value: without_storage(make.ones(1))),
    Badness("one", "works", constant(1.0)),
    Badness("one-int", "works", constant(1)),
)

# ---------------------------------------------------------------- kinds of numbers and words

NO_NUMBERS = (
    Badness("text", "error", constant("4")),
    Badness("list", "error", constant([4])),
    Badness("nan", "error", constant(float("nan"))),
    Badness("tensor-of-two", "error", lambda make, value: make.ints(4, 4)),
    Badness("complex", "error", constant(4j)),
)
WHOLE = (*NO_NUMBERS, Badness("fraction", "error", constant(2.5)), Badness("2^63", "error", constant(2**63)))
NOT_NEGATIVE = (*WHOLE, Badness("negative", "error", constant(-1)))
COUNT = (*NOT_NEGATIVE, Badness("zero", "error", constant(0)), Badness("2^31", "error", constant(2**31)))
SPLIT = (  # -1: balanced, as FlashInfer has it
    *(badness for badness in COUNT if badness.name not in ("negative", "2^31")),
    Badness("negative", "works", constant(-1)),
    Badness("-2", "error", constant(-2)),
)
CHUNK = (*NOT_NEGATIVE, Badness("zero", "works", constant(0)))  # 0: no chunks
WINDOW = (*WHOLE, Badness("2^31-1", "clean", constant(2**31 - 1)), Badness("-2", "clean", constant(-2)))
REAL = (
    *NO_NUMBERS,
    Badness("inf", "error", constant(float("inf"))),
    Badness("-inf", "error", constant(float("-inf"))),
    Badness("too-large", "error", constant(1e39)),
)
POSITIVE = (*REAL, Badness("zero", "error", constant(0.0)), Badness("negative", "error", constant(-1.0)))
SOFT_CAP = (*REAL, Badness("negative", "works", constant(-1.0)))  # no cap, as FlashInfer has it
FLAG = (
    Badness("text", "error", constant("False")),
    Badness("fraction", "error", constant(1.5)),
    Badness("list", "error", constant([])),
    Badness("tensor", "error", lambda make, value: torch.tensor(True, device=make.device)),
    Badness("tensor-of-two", "error", lambda make, value: torch.tensor([True, False], device=make.device)),
)
DTYPE = (
    Badness("int8", "error", constant(torch.int8)),
    Badness("double", "error", constant(torch.float64)),
    Badness("unknown", "error", constant("int4")),
    Badness("number", "error", constant(3)),
    Badness("list", "error", constant([])),
)
WORD = (
    Badness("unknown", "error", constant("NDH")),
    Badness("number", "error", constant(3)),
    Badness("none", "error", constant(None)),
    Badness("list", "error", constant([])),
)
MODE = WORD[:-2] + WORD[-1:]  # without `none`, which means the planned mode
DEVICE = (
    Badness("unknown", "error", constant("banana")),
    Badness("number", "error", constant(3.5)),
    Badness("meta", "error", constant("meta")),
)
REFUSED = (
    Badness("true", "error", constant(True)),
    Badness("tensor", "error", lambda make, value: make.ones(2)),
)
REFUSED_WORD = (Badness("unknown", "error", constant("e")), Badness("number", "error", constant(3)))
FORMAT = (
    Badness("unknown", "error", constant("int5")),
    Badness("number", "error", constant(3)),
    Badness("three", "error", constant(("nvfp4",) * 3)),
    Badness("list", "error", constant([])),
)
TOLD_LATER = (Badness("number", "clean", constant(3)),)  # checked only if other arguments are given, too
CALLABLE = (Badness("number", "error", constant(3)), Badness("text", "error", constant("score")))
EXPRESSION = (Badness("number", "error", constant(3)), Badness("brackets", "error", constant("score + (a")))
MAPPING = (Badness("number", "error", constant(3)), Badness("list", "error", constant([1])))
NUMBERS = (
    Badness("number", "error", constant(3)),
    Badness("negative", "error", constant([-5, 3])),
    Badness("text", "error", constant("ab")),
    Badness("short", "error", constant([2])),
)
VARIANT = (
    Badness("callable", "error", constant(lambda score: score)),
    Badness("number", "error", constant(3)),
    Badness("text", "error", constant("score")),
)
ANYTHING = (Badness("list", "clean", constant([1])),)  # plain arithmetic, which raises Python's own errors
