"""Plans whose kernels are built ahead of time. Each kernel's file lists its own; aot/specs.py reads them."""

from __future__ import annotations

import dataclasses

from ..base.dtypes import DType
from ..variants.spec import VariantSpec
from ..variants.variant import TracedVariant, builtin, compose
from . import kv_formats, latent_formats
from .context_classes import ContextClass
from .options import Options, out_dtype_of
from .work import Problem

BF16, FP16, E4M3, BYTES = DType.BFLOAT16, DType.FLOAT16, DType.FLOAT8_E4M3, DType.BYTES
HEAD_DIMS = (64, 128, 256)
RAGGED, ONE_TOKEN = 0, 1  # page sizes; the others are multiples of 8


@dataclasses.dataclass(frozen=True)
class Ahead:
    """A plan, described by what decides its kernel. Its spec is the one that `choose` returns for the target's card."""

    q_dtype: DType
    kv_dtype: DType
    head_dims: tuple[int, int]
    packed_rows: int  # of a request and KV head
    page_size: int = 16
    has_mask: bool = False
    has_soft_cap: bool = False
    rotates: bool = False
    contexts: ContextClass = ContextClass.USUAL
    kv_source: str = ""  # latent, selected or two_lists; empty: by the page size
    latent_format: str = latent_formats.PLAIN
    kv_format: str = kv_formats.PLAIN  # of K and V
    v_format: str = ""  # of V, if it is another
    kv_heads: int = 8
    user: VariantSpec = VariantSpec()  # a variant of the user's
    has_known_lengths: bool = True  # Problem.has_known_lengths
    out_dtype: DType | None = None  # None: as out_dtype_of says
    has_value_columns: bool = False  # V is a copy by columns
    is_default: bool = True  # used by most models: `--default-only` builds these

    @property
    def problem(self) -> Problem:
        kv_heads = 1 if self.kv_source else self.kv_heads
        return Problem(
            Options(
                kv_source=self.kv_source or ("paged" if self.page_size else "ragged"),
                num_q_heads=kv_heads,
                num_kv_heads=kv_heads,
                head_dim_qk=self.head_dims[0],
                head_dim_vo=self.head_dims[1],
                page_size=self.page_size,
                q_dtype=self.q_dtype,
                kv_dtype=self.kv_dtype,
                out_dtype=self.out_dtype or out_dtype_of(self.q_dtype),
                latent_format=self.latent_format,
                k_format=self.kv_format,
                v_format=self.v_format or self.kv_format,
                has_mask=self.has_mask,
                has_soft_cap=self.has_soft_cap,
                position_encoding="ROPE_LLAMA" if self.rotates else "NONE",
                has_value_columns=self.has_value_columns,
            ),
            self.packed_rows,
            self.has_known_lengths,
            self.contexts,
        )

    @property
    def variant(self) -> VariantSpec:
        cap = 50.0 if self.has_soft_cap else 0.0  # the value is not compiled in
        return compose(builtin(soft_cap=cap), TracedVariant(self.user)).spec


def latent_rows(*packed_rows: int, page_size: int = 64, kv_source: str = "latent") -> tuple[Ahead, ...]:
    """DeepSeek's rows in bf16."""
    return more(*(Ahead(BF16, BF16, (576, 512), n, page_size, kv_source=kv_source) for n in packed_rows))


def fp8_rows(name: str, packed_rows: int, kv_source: str, out_dtype: DType | None = None) -> Ahead:
    """Rows in fp8, of DeepSeek V3's columns where the format leaves them open."""
    packed = latent_formats.packed(name)
    dims = packed.head_dims if packed else (512, 64)
    return Ahead(
        BF16,
        E4M3,
        (sum(dims), dims[0]),
        packed_rows,
        64,
        kv_source=kv_source,
        latent_format=name,
        out_dtype=out_dtype,
    )


def rows_of_two_caches(*packed_rows: int) -> tuple[Ahead, ...]:
    """DeepSeek V4's rows. Outputs are fp32 if a sink multiplies them later, and in compiled models, which call each
    cache's lists by themselves and merge (engines/flash_mla/sparse.py)."""
    kinds = (("two_lists", None), ("two_lists", DType.FLOAT32), ("selected", DType.FLOAT32))
    return more(*(fp8_rows("deepseek_v4", rows, source, out) for rows in packed_rows for source, out in kinds))


def more(*rows: Ahead) -> tuple[Ahead, ...]:
    """Marks rows that are not among the default ones."""
    return tuple(dataclasses.replace(row, is_default=False) for row in rows)
