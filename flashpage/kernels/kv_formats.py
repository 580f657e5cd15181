"""How caches store rows of K and V: plain elements, or numbers with scales (include/flashpage/formats).

A new format with scales, of numbers of 4 or 8 bits, is a file there and a row here. Kernels of the CPU then read and
append it, and cases, benchmarks and tests of the kernels that append and widen take it. What else it needs:
- on cards one scale a row, or one for 16 columns (decode_sm90: `_LAYOUTS`; appends:
  include/flashpage/kernels/helpers/append_quantised.h); attention_sm80 reads scales of 8, 16, 32 and more columns;
- what its bits mean, apart from its header: `NUMBERS` of tests/kernels/test_kv_formats.py, and `_quantised` and `_read`
  of tests/support/format_rows.py;
- a case of tests/kernels/test_decode_formats.py if decode_sm90 takes it;
- a row of the tables in docs/guides/kv-formats.md, and its error (tests/bench/format_accuracy.py).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from ..base import checks
from ..base.dtypes import DType
from ..base.errors import PlanError

PLAIN = "plain"  # KernelSpec.k_format and v_format: elements of kv_dtype


@dataclasses.dataclass(frozen=True)
class KvFormat:
    """How a row of K or V is stored. include/flashpage/formats/HEADER.h converts it."""

    name: str
    header: str  # file of include/flashpage/formats, without .h
    cpp: str  # its struct
    stored: tuple[str, ...]  # torch's names of types that the tensor may have; a type may hold two numbers of 4 bits
    bits: int  # of a number: 4 or 8, and of plain elements 8, 16 or 32
    scale_columns: int  # columns that share a scale; 0: no scales of its own; WHOLE_ROW: one for a token and head
    scales: tuple[str, ...]  # torch's names of types that scales may have
    has_zero: bool  # whether a scale holds a zero point
    # The format of the same rows before a Hadamard matrix multiplies them as they are appended, and queries too: for K
    # alone. Empty: no matrix does.
    unrotated: str
    why: str

    def __post_init__(self) -> None:
        if not self.is_plain and self.bits not in (4, 8):
            raise ValueError(
                f"format {self.name} has bits={self.bits}: pass 4 or 8, and store narrower numbers in one of these, as "
                "kernels find a number by whole or half bytes."
            )

    @property
    def is_hadamard(self) -> bool:
        return bool(self.unrotated)

    @property
    def is_plain(self) -> bool:
        return self.scale_columns == 0

    @property
    def stored_size(self) -> int:
        """Bytes of an element of the tensor."""
        return max(1, self.bits // 8)

    @property
    def scale_size(self) -> int:
        """Bytes of a scale."""
        return 0 if self.is_plain else torch_dtype(self.scales[0]).itemsize

    def stored_columns(self, columns: int) -> int:
        """Elements of a row in the tensor."""
        return columns * self.bits // 8 // self.stored_size

    def row_bytes(self, columns: int) -> int:
        return columns * self.bits // 8

    def row_scales(self, columns: int) -> int:
        """Scales of a row."""
        return 0 if self.is_plain else -(-columns // self.scale_columns)

    def scales_shape(self, rows: tuple[int, ...], columns: int) -> tuple[int, ...]:
        """The shape of the scales of a tensor of rows: one scale a row has no dimension."""
        count = self.row_scales(columns)
        return (*rows[:-1], count) if count > 1 else tuple(rows[:-1])

    def token_bytes(self, columns: int) -> int:
        """Bytes of a row with its scales."""
        return self.row_bytes(columns) + self.row_scales(columns) * self.scale_size


WHOLE_ROW = 1 << 16  # whole_row of include/flashpage/formats/format.h


def _with_token_scale(
    name: str, cpp: str, stored: tuple[str, ...], bits: int, why: str, has_zero: bool = False, unrotated: str = ""
) -> KvFormat:
    header, scales = unrotated or name, ("float32",)
    return KvFormat(name, header, cpp, stored, bits, WHOLE_ROW, scales, has_zero, unrotated, why)


_ROWS = (
    KvFormat(
        name="nvfp4",
        header="nvfp4",
        cpp="Nvfp4",
        stored=("uint8", "float4_e2m1fn_x2"),
        bits=4,
        scale_columns=16,
        scales=("float8_e4m3fn", "uint8"),
        has_zero=False,
        unrotated="",
        why="FlashInfer's and vLLM's cache of 4.5 bits: e2m1, an e4m3 scale for 16 columns, k_scale and v_scale",
    ),
    _with_token_scale("e4m3_token", "E4m3Token", ("float8_e4m3fn", "uint8"), 8, "fp8 that needs no calibration"),
    _with_token_scale(
        "int8_token", "Int8Token", ("int8",), 8, "as e4m3_token, with an error of half a step everywhere"
    ),
    _with_token_scale(
        name="int4_token",
        cpp="Int4Token",
        stored=("uint8",),
        bits=4,
        why="vLLM's int4_per_token_head, 4.25 bits for 128 columns",
        has_zero=True,
    ),
    _with_token_scale(
        name="int4_token_rotated",
        cpp="Int4Token",
        stored=("uint8",),
        bits=4,
        why="int4_token whose outlier channels are spread over a row",
        has_zero=True,
        unrotated="int4_token",
    ),
)
FORMATS = {row.name: row for row in _ROWS}
_PLAIN = {
    dtype.value: KvFormat(
        name=dtype.value,
        header="format",
        cpp=f"PlainFormat<{dtype.cpp}>",
        stored=(dtype.value,),
        bits=8 * dtype.size,
        scale_columns=0,
        scales=(),
        has_zero=False,
        unrotated="",
        why="elements as they are",
    )
    for dtype in DType.elements()
}
NAMES = (PLAIN, *FORMATS, *_PLAIN)  # what KernelSpec.k_format and v_format may be


def find(name: str, kv_dtype: DType) -> KvFormat:
    """The format of that name; PLAIN: of elements of kv_dtype."""
    return FORMATS.get(name) or _PLAIN[kv_dtype.value if name == PLAIN else name]


def unrotated(name: str) -> str:
    """The format by which kernels convert rows of that format, of any name in NAMES."""
    return name if name not in FORMATS else FORMATS[name].unrotated or name


def torch_dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found


@dataclasses.dataclass(frozen=True)
class StoredAs:
    """Fields of Options that say how K and V are stored."""

    kv_dtype: DType  # BYTES: k_format and v_format say it
    k_format: str = PLAIN
    v_format: str = PLAIN


def check(kv_format: Any, kv_data_type: Any, q_dtype: DType) -> StoredAs:
    """From the arguments of plan: kv_format is a name, or a pair of names and element types for K and V."""
    if kv_format is None:
        if is_fp4(kv_data_type):
            return StoredAs(DType.BYTES, "nvfp4", "nvfp4")
        return StoredAs(q_dtype if kv_data_type is None else _element_type(kv_data_type))
    is_pair = isinstance(kv_format, (tuple, list))
    if is_pair and len(kv_format) != 2:
        raise PlanError(f"kv_format has {len(kv_format)} entries: pass one name, or a pair for K and V.")
    sides = zip(("kv_format[0]", "kv_format[1]"), kv_format, strict=True) if is_pair else [("kv_format", kv_format)] * 2
    k, v = (_name(place, entry, q_dtype) for place, entry in sides)
    if is_pair and unrotated(v) != v:
        found = checks.shown(kv_format)
        raise PlanError(f"kv_format={found}: rows of V are not rotated: pass {unrotated(v)!r} for V.")
    v = unrotated(v)
    if is_pair and kv_format[0] is kv_format[1] is None:
        raise PlanError(f"kv_format={checks.shown(kv_format)} names no format: leave it None.")
    if k == v and k in _PLAIN:
        raise PlanError(f"kv_format={checks.shown(kv_format)} is an element type: pass it as kv_data_type.")
    if k in FORMATS and FORMATS[k].is_hadamard and q_dtype.is_fp8:
        raise PlanError(
            f"kv_format={k!r} rotates queries, which q_data_type {q_dtype.value} is too coarse for: pass "
            f"q_data_type=torch.bfloat16, or kv_format={unrotated(k)!r}."
        )
    _check_data_type(kv_data_type, k, v)
    return StoredAs(DType.BYTES, k, v)


def stored_as(dtype: torch.dtype) -> str:
    """The first format whose rows have that type; empty if there is none."""
    name = str(dtype).removeprefix("torch.")
    return next((row.name for row in FORMATS.values() if name in row.stored), "")


def is_fp4(kv_data_type: Any) -> bool:
    return str(kv_data_type).removeprefix("torch.") in FORMATS["nvfp4"].stored


def _element_type(kv_data_type: Any) -> DType:
    if isinstance(kv_data_type, str) and kv_data_type in FORMATS:
        raise PlanError(f"kv_data_type={kv_data_type!r} is a format: pass kv_format={kv_data_type!r}.")
    if str(kv_data_type).removeprefix("torch.") == "int8":
        raise PlanError("kv_data_type=torch.int8 has no scales of its own: pass kv_format='int8_token'.")
    return checks.dtype("kv_data_type", kv_data_type)


def _name(place: str, entry: Any, q_dtype: DType) -> str:
    """The name of one side's format; None: q's type. `place`: the argument, for messages."""
    if isinstance(entry, str) and entry in FORMATS:
        return entry
    if entry is None:
        return q_dtype.value
    try:
        return DType.of(entry).value
    except (KeyError, TypeError):
        raise PlanError(
            f"{place}={checks.shown(entry)} is unknown: pass {', '.join(map(repr, FORMATS))}, or a pair of these "
            "and element types for K and V."
        ) from None


def _check_data_type(kv_data_type: Any, k: str, v: str) -> None:
    """kv_data_type may repeat the type of the tensors."""
    if kv_data_type is None:
        return
    given = str(kv_data_type.value if isinstance(kv_data_type, DType) else kv_data_type).removeprefix("torch.")
    stored = [find(name, DType.BYTES).stored for name in (k, v)]
    if not all(given in names for names in stored):
        raise PlanError(
            f"kv_data_type={checks.shown(kv_data_type)} is not how kv_format={(k, v)} is stored "
            f"({stored[0][0]}, {stored[1][0]}): leave kv_data_type None."
        )


def columns_of(row: torch.Tensor, kv_format: Any, kv_data_type: Any, q_dtype: DType, side: int) -> int:
    """head_dim of a tensor of K (side 0) or V (1), whose last dimension holds stored numbers."""
    stored = check(kv_format, kv_data_type, q_dtype)
    found = find((stored.k_format, stored.v_format)[side], stored.kv_dtype)
    return row.shape[-1] * found.stored_size * 8 // found.bits


def check_columns(
    stored: StoredAs,
    head_dim_qk: int,
    head_dim_vo: int,
    names: tuple[str, str] = ("head_dim_qk", "head_dim_vo"),
) -> None:
    """Rows of 4 bits start on 8 bytes, and columns that share a scale are all there. `names`: the caller's."""
    for name, dim, side in zip(names, (head_dim_qk, head_dim_vo), (stored.k_format, stored.v_format), strict=True):
        if side not in FORMATS:
            continue
        row = FORMATS[side]
        step = math.lcm(16 if row.bits == 4 else 1, row.scale_columns % WHOLE_ROW or 1)
        if dim % step:
            raise PlanError(f"{name}={dim} is not a multiple of {step}, which rows of {side} have: pad the rows.")
        if row.is_hadamard and dim & (dim - 1):
            raise PlanError(
                f"{name}={dim} is not a power of two, as rows of {side} must be: pass kv_format={unrotated(side)!r}."
            )
