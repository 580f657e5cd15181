"""A row of the case table: a batch, a cache form and options."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from flashpage.kernels import latent_formats

TILE_EDGES = (0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129)  # 0, 1 and tile - 1, tile, tile + 1 of tiles 16, 64, 128
MIXED_Q = (1, 17, 64, 5)
MIXED_KV = (130, 17, 200, 69)  # a decode row, a whole prompt, two appended chunks


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the table. Lengths are lists with one entry a request; options have the names of arguments."""

    name: str
    why: str
    kv_lens: tuple[int, ...]
    q_lens: tuple[int, ...]
    entry: str = "paged"  # decode | paged | sink | ragged | latent | single_decode | single_prefill
    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    head_dim_vo: int = 0  # 0: head_dim
    q_dtype: str = "bfloat16"
    kv_dtype: str = ""  # "": q's
    kv_format: str = ""  # K and V in a format with scales, or in two, joined by "+"
    o_dtype: str = ""  # "": not given: q's, or bfloat16 if that is fp8
    o_scale: str = ""  # that divides fp8 outputs: float | tensor (one value on the device) | small; "": not given
    # each row of q lists the tokens that it sees: padded (entries of -1) | lengths (entries after topk_length are not
    # read); "": all tokens
    selected: str = ""
    second_page: int = (
        0  # selected, deepseek_v4: the later part of a list is of a second cache with such pages; 0: none
    )
    # latent rows in fp8: numbers | tensors | tokens (their scales), deepseek_v32, deepseek_v4; + "-uneven": scales that
    # are no powers of two, "-decades": from 0.01 to 1
    row_format: str = ""
    # latent rows: standard deviations of ckv and kpe, which e4m3 stores over its whole range; zeros: all rows are 0.
    # None: the deviations of stored numbers are 1
    deviations: tuple[float, float] | None = None
    page_size: int = 16
    kv_layout: str = "NHD"
    cache: str = "tuple"  # tests/support/caches.py, FORMS
    causal: bool = False
    window_left: int = -1
    chunk: int = 0  # 0: none
    soft_cap: float = 0.0
    sm_scale: float | None = None  # None: the default
    position: str = "NONE"  # NONE | ROPE_LLAMA | ALIBI
    rope_scale: float = 0.0  # 0: the default
    rope_theta: float = 0.0
    sinks: bool = False
    # "" | float | tensor (one value on the device) | negative (one value) | per_head | signs (by head) | per_request
    scales: str = ""
    mask: str = ""  # "" | dense | packed
    mask_kind: str = "random"  # random | causal | blocks | tree | past | sparse | nothing
    variant: str = ""  # tests/support/cases/variants.py, VARIANTS
    fixed_split_size: int = 0  # pages; 0: balanced
    disable_split_kv: bool = False
    at_run: bool = False  # causal, window, soft cap and sm_scale come with forward(); plan gets other values
    q_strides: str = "contiguous"  # contiguous | fused_qkv | split (latent: two tensors)
    hidden_nan: bool = False  # tokens left of every row's window and chunk are NaN in the cache
    outputs: str = "given"  # given: out= and lse= inside guard bands | strided | returned | no_lse
    lse_mode: str = "base2"  # base2 | basee
    reduced: bool = False  # part of the short table for compute-sanitizer
    card_only: bool = False  # to the CPU's kernel it is a longer batch with the options of another row

    @property
    def value_dim(self) -> int:
        return self.head_dim_vo or self.head_dim

    @property
    def score_scale(self) -> float:
        return self.head_dim**-0.5 if self.sm_scale is None else self.sm_scale

    @property
    def kv_type(self) -> str:
        return "uint8" if self.kv_format else self.kv_dtype or self.q_dtype

    @property
    def packed_format(self) -> str:
        """kv_row_format of latent rows that hold their scales."""
        name = self.row_format.partition("-")[0]
        return name if name in latent_formats.PACKED else ""

    @property
    def has_uneven_scales(self) -> bool:
        found = latent_formats.packed(self.packed_format)
        has_powers = found is not None and found.by_page  # scales after a page's rows are powers of two
        return ("-" in self.row_format and not has_powers) or "_token" in self.kv_format

    @property
    def key_squares(self) -> tuple[float, ...]:
        """The expected square of each element of a key, or an upper bound."""
        if self.deviations is None:
            return (1.0,) * self.head_dim
        ckv, kpe = self.deviations
        return (ckv**2,) * self.value_dim + (kpe**2,) * (self.head_dim - self.value_dim)

    @property
    def out_type(self) -> str:
        return self.o_dtype or ("bfloat16" if self.has_fp8_query else self.q_dtype)

    @property
    def has_fp8_output(self) -> bool:
        return self.out_type.startswith("float8")

    @property
    def out_divisor(self) -> float:
        """The number of o_scale. Values have a standard deviation of one, so outputs are at most about 300; small: most
        are beyond e4m3's largest number."""
        return {"": 1.0, "small": 2e-4}.get(self.o_scale, 0.0125)

    @property
    def has_fp8_query(self) -> bool:
        return self.q_dtype.startswith("float8")

    def runs_on(self, device: str) -> bool:
        """fp32 queries run only on the CPU, and fp32 outputs on cards over latent rows."""
        if device == "cpu":
            return not self.card_only
        return self.q_dtype != "float32" and (self.out_type != "float32" or self.entry == "latent")

    def __str__(self) -> str:
        return self.name


def decode(name: str, why: str, kv_lens: Iterable[int], *, q_len: int = 1, **options: Any) -> Case:
    """A decode row. Several rows of a request are causal among themselves, as in the decode wrapper."""
    kv_lens = tuple(kv_lens)
    return Case(name, why, kv_lens, (q_len,) * len(kv_lens), entry="decode", causal=q_len > 1, **options)


def prefill(name: str, why: str, q_lens: Iterable[int], kv_lens: Iterable[int], **options: Any) -> Case:
    return Case(name, why, tuple(kv_lens), tuple(q_lens), **options)


def on_cards(cases: Iterable[Case], *also_cpu: str) -> list[Case]:
    """Rows whose loaders or tiles only cards have; those with the names in `also_cpu` run on the CPU too."""
    return [case if case.name in also_cpu else dataclasses.replace(case, card_only=True) for case in cases]
