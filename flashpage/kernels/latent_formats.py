"""How caches store latent rows (MLA) in fp8; the formats themselves are in include/flashpage/params/latent_format.h.

A new format is a struct and a `LatentFormatOf` in that header, a name in `LatentFormat`
(include/flashpage/common/types.h), and a row here. It also needs

- `_write_packed` of flashpage/wrappers/latent_append.py, which appends on the CPU;
- `_stored` of latent_decode_sm90.py and `_value_columns` of latent_wide_sm90.py, which say what converting warps take;
- `FORMATS` and `ahead` of latent_e4m3_sm90.py, and `has_e4m3_scores` of tests/support/tolerance.py, if it has fp32
  scales of 128 columns; latent_columns_sm90 then takes it, too. Fewer columns also change `arrange` and `piece_bytes`
  of latent_e4m3_sm90/load.h, `E4m3Tokens` of shared.h, the steps that share a scale in `multiply_keys` (scores.h,
  token_scores.h), `read_tile` of values.h, where two tiles share quotients, and `Row` of latent_columns_sm90/convert.h;
  another type of scales changes `arrange` and `Row`, or needs a converter as latent_wide_sm90/convert.h;
- `_ROW_FORMATS` of flashpage/engines/vllm/plugin/sparse.py, if a cache type of vLLM has it;
- `_packed` and `arrange` of tests/support/latent_rows.py, `row_format` of tests/support/cases/case.py, cases in
  tests/support/cases/latent.py and tests/kernels/test_latent_kernel.py, and `Kind` of tests/native/table_rows.h with
  `ROWS` of tests/support/arm_table.py;
- docs/latent_sm90.md, docs/guides/mla.md, and `kv_row_format` in the docstrings of wrappers/latent.py and
  wrappers/append.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ..base import checks
from ..base.dtypes import DType
from ..base.errors import PlanError

PLAIN = "plain"  # rows of q's type, in one tensor or two
SCALED = "scaled"  # e4m3 in one tensor or two, with scales that are given at run
DEEPSEEK_V32 = "deepseek_v32"

# Values of Options.kv_source: rows of q that list their tokens, and all sources of latent rows.
LISTED = ("selected", "two_lists")
SOURCES = ("latent", *LISTED)


@dataclasses.dataclass(frozen=True)
class LatentRowFormat:
    """A format whose rows hold their scales: the cache is one tensor of bytes, [pages, page_size, row_bytes]."""

    row_bytes: int
    head_dims: tuple[int, int]  # head_dim_ckv and head_dim_kpe
    quantised: int  # columns of e4m3; the others are bf16
    scale_columns: int  # that share a scale
    why: str
    by_page: bool = False  # scales follow all rows of a page, so that tokens are not row_bytes apart
    has_two_caches: bool = False  # a row of q may read lists of two, in one softmax


PACKED = {
    DEEPSEEK_V32: LatentRowFormat(
        row_bytes=656,
        head_dims=(512, 64),
        quantised=512,
        scale_columns=128,
        why="DeepSeek V3.2, GLM-5: 512 e4m3, four fp32 scales, 64 bf16",
    ),
    "deepseek_v4": LatentRowFormat(
        row_bytes=584,
        head_dims=(512, 0),
        quantised=448,
        scale_columns=64,
        why="DeepSeek V4: 448 e4m3, 64 bf16, eight bytes of scales",
        by_page=True,
        has_two_caches=True,
    ),
}


def packed(name: str) -> LatentRowFormat | None:
    """The format of that name, if its rows hold their scales."""
    return PACKED.get(name)


def has_two_caches(name: str) -> bool:
    """Whether rows of q may list tokens of two caches in this format."""
    found = packed(name)
    return found is not None and found.has_two_caches


def check_format(kv_row_format: Any, kv_dtype: DType | None, head_dims: tuple[int, int]) -> tuple[str, DType | None]:
    """The format's name and the type of stored elements, from arguments of plan."""
    if kv_row_format is None:
        return (SCALED if kv_dtype is DType.FLOAT8_E4M3 else PLAIN), kv_dtype
    name = checks.choice("kv_row_format", kv_row_format, tuple(PACKED))
    ckv, kpe = PACKED[name].head_dims
    if head_dims != (ckv, kpe):
        raise PlanError(
            f"kv_row_format={name!r} has other rows than head_dim_ckv={head_dims[0]} and head_dim_kpe={head_dims[1]}: "
            f"pass {ckv} and {kpe}."
        )
    if kv_dtype not in (None, DType.FLOAT8_E4M3):
        raise PlanError(
            f"kv_row_format={name!r} holds float8_e4m3fn but kv_data_type is {kv_dtype.value}: leave kv_data_type None."
        )
    return name, DType.FLOAT8_E4M3
