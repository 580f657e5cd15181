"""The checked options of `plan`. All of its arguments except the lengths are checked here and nowhere else."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

from .. import native
from ..base import checks
from ..base.dtypes import DType
from ..base.errors import CapabilityError, PlanError
from . import kv_formats, latent_formats

SPLIT_BALANCED, SPLIT_NEVER = 0, -1  # csrc/flashpage.h, fp_schedule::fixed_piece_tokens
_LONGEST = 2**30  # tokens: more than any context
_NO_CAP = 1e30  # of scores
_HEAD_DIMS = range(16, 513, 8)  # columns of K and of V that some kernel of every device takes


@dataclasses.dataclass(frozen=True)
class Options:
    """Everything of a plan but its lengths; with the rows of a request, it decides the kernel and the schedule."""

    # paged | ragged | latent (pages of rows whose first head_dim_vo columns are V as well) | selected (such rows, but a
    # row of q lists the tokens that it reads) | two_lists (a list for each of two caches)
    kv_source: str
    num_q_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    page_size: int  # tokens; 0: ragged
    q_dtype: DType
    kv_dtype: DType
    out_dtype: DType
    causal: bool = False
    window_left: int = -1  # tokens visible left of the row's own; -1: all
    chunk: int = 0  # rows see only tokens of their own chunk of so many; 0: no chunks
    has_soft_cap: bool = False  # its value is given at every run
    position_encoding: str = "NONE"  # NONE | ROPE_LLAMA | ALIBI
    has_mask: bool = False  # the mask alone decides what a row sees; causal is then False, as in FlashInfer
    variant: Any = None  # variants.Variant | None, compared by identity
    fixed_piece_tokens: int = SPLIT_BALANCED  # > 0: every request is cut at multiples of it, in any batch
    latent_format: str = latent_formats.PLAIN  # how latent rows are stored: plain (q's type) or latent_formats.py
    k_format: str = kv_formats.PLAIN  # how rows of K and V are stored: plain (kv_dtype), or both by kv_formats.py
    v_format: str = kv_formats.PLAIN
    uniform_q_len: int = 0  # rows of every request, if all have the same number (decode); 0: the lengths give them
    has_value_columns: bool = False  # V is a copy that lies by columns (plan/value_columns.py)

    @functools.cached_property
    def group_size(self) -> int:
        """Query heads of a KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def is_paged(self) -> bool:
        return self.kv_source != "ragged"

    @property
    def is_selected(self) -> bool:
        return self.kv_source in latent_formats.LISTED

    @property
    def page_span(self) -> int:
        """Tokens of one entry of the page numbers or, if rows list their tokens, of the lists; 0: ragged."""
        return 1 if self.is_selected else self.page_size

    @property
    def is_latent(self) -> bool:
        return self.kv_source in latent_formats.SOURCES

    @property
    def halves(self) -> tuple[str, str]:
        """The names of the two parts of a cached token, for messages."""
        return ("ckv_cache", "kpe_cache") if self.is_latent else ("k", "v")

    @property
    def tail_columns(self) -> int:
        """Columns of latent rows that K alone has."""
        return self.head_dim_qk - self.head_dim_vo

    @property
    def half_dims(self) -> tuple[int, int]:
        """The numbers of columns of the two parts."""
        if self.latent_row_format is not None:
            return self.latent_row_format.row_bytes, 0
        if self.is_latent:
            return self.head_dim_vo, self.tail_columns
        k, v = self.formats
        return k.stored_columns(self.head_dim_qk), v.stored_columns(self.head_dim_vo)

    @functools.cached_property
    def formats(self) -> tuple[kv_formats.KvFormat, kv_formats.KvFormat]:
        """How K and V are stored."""
        return kv_formats.find(self.k_format, self.kv_dtype), kv_formats.find(self.v_format, self.kv_dtype)

    @property
    def has_formats(self) -> bool:
        """Whether K and V are other than plain elements of one type: strides are then in bytes."""
        return self.k_format != kv_formats.PLAIN

    @functools.cached_property
    def hadamard_queries(self) -> bool:
        """Whether rows of K were multiplied by a Hadamard matrix, and so must rows of q be."""
        return self.has_formats and self.formats[0].is_hadamard

    @property
    def rotation_scale(self) -> float:
        """The factor of scores that rotated queries lack (wrappers/rotation.py), whose own is a power of two."""
        return 2**-0.5 if self.hadamard_queries and self.head_dim_qk.bit_length() % 2 == 0 else 1.0

    @property
    def row_bytes(self) -> tuple[int, int]:
        """Bytes of a token's row of K and of V, without scales."""
        k, v = self.formats
        return k.row_bytes(self.head_dim_qk), v.row_bytes(self.head_dim_vo)

    @property
    def latent_row_format(self) -> latent_formats.LatentRowFormat | None:
        """The format of latent rows that hold their scales."""
        return latent_formats.packed(self.latent_format)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's K and V for one head, with their scales."""
        if self.latent_row_format is not None:
            return self.latent_row_format.row_bytes
        if self.is_latent:
            return self.head_dim_qk * self.kv_dtype.size
        return sum(
            side.token_bytes(dim) for side, dim in zip(self.formats, (self.head_dim_qk, self.head_dim_vo), strict=True)
        )

    @property
    def visibility(self) -> native.Visibility:
        """The options that the planner has under the same names (include/flashpage/plan/visible.h)."""
        return native.Visibility(*(int(getattr(self, name)) for name, *_ in native.Visibility._fields_))

    @property
    def most_visible(self) -> int | None:
        """The most tokens that a row sees; None: any number."""
        window = self.window_left + 1 if self.window_left >= 0 else _LONGEST
        most = min(window, self.chunk or _LONGEST)
        return most if most < _LONGEST else None

    @property
    def has_parts(self) -> bool:
        """Whether rows of one request may begin to see tokens at different ones (include/flashpage/plan/visible.h)."""
        return self.chunk > 0 and self.uniform_q_len != 1

    @property
    def needs_variant(self) -> bool:
        """Whether the kernel takes captured values."""
        return self.has_soft_cap or self.position_encoding == "ALIBI" or self.variant is not None

    @functools.cached_property
    def is_batch_invariant(self) -> bool:
        """Whether tile and split depend only on a request's own lengths."""
        return self.fixed_piece_tokens != SPLIT_BALANCED


class RunOptions(NamedTuple):
    """Options that engines give at run, as the wrapper's attributes hold them; they replace the planned ones."""

    causal: bool
    window_left: int
    logits_soft_cap: float
    sm_scale: float | None
    rope_scale: float | None
    rope_theta: float | None
    pos_encoding_mode: str


class OptionOverride(NamedTuple):
    """The values and shapes of a run that need a plan or a kernel of their own if they differ from the planned ones."""

    causal: bool
    window_left: int
    has_soft_cap: bool
    position_encoding: str
    num_q_heads: int
    num_kv_heads: int

    @staticmethod
    def of(values: RunOptions, num_q_heads: int, num_kv_heads: int) -> OptionOverride:
        cap, mode = values.logits_soft_cap > 0, checks.position_encoding(values.pos_encoding_mode)
        causal, window = checks.flag("causal", values.causal), check_window(values.window_left)
        return OptionOverride(causal, window, cap, mode, num_q_heads, num_kv_heads)

    @staticmethod
    def of_options(options: Options) -> OptionOverride:
        return OptionOverride(*(getattr(options, name) for name in OptionOverride._fields))

    def over(self, planned: Options) -> Options:
        """The planned options with these values in their place."""
        changed = self._asdict()
        changed["causal"] = self.causal and not planned.has_mask
        return dataclasses.replace(planned, **changed)

    def differences(self, planned: Options) -> str:
        """The values that differ from the planned ones, for an error."""
        values = zip(self._fields, self, OptionOverride.of_options(planned), strict=True)
        return ", ".join(f"{name}={value!r} (planned: {before!r})" for name, value, before in values if value != before)


def check_options(
    *,
    kv_source: str,
    num_qo_heads: Any,
    num_kv_heads: Any,
    head_dim_qk: Any,
    head_dim_vo: Any,
    page_size: Any,
    q_data_type: Any,
    kv_data_type: Any,
    o_data_type: Any,
    causal: bool,
    window_left: Any,
    logits_soft_cap: Any,
    pos_encoding_mode: str,
    has_mask: bool,
    variant: Any,
    fixed_split_size: Any,
    disable_split_kv: bool,
    uniform_q_len: Any = 0,
    chunk: Any = None,
    latent_format: str = latent_formats.PLAIN,
    kv_format: Any = None,
    dim_names: tuple[str, str] = ("head_dim_qk", "head_dim_vo"),
) -> Options:
    """Checks every argument of `plan` except the lengths. Options that no kernel supports are refused later
    (choose.py), but for head dims that none takes. `dim_names`: the caller's."""
    page_size = checks.whole("page_size", page_size, 1) if kv_source != "ragged" else 0
    num_q_heads, num_kv_heads = check_heads(num_qo_heads, num_kv_heads)
    q_dtype = checks.dtype("q_data_type", q_data_type)
    if kv_source not in latent_formats.SOURCES:
        head_dim_qk = check_head_dim(dim_names[0], head_dim_qk)
        head_dim_vo = head_dim_qk if head_dim_vo is None else check_head_dim(dim_names[1], head_dim_vo)
    stored = kv_formats.check(kv_format, kv_data_type, q_dtype)
    kv_formats.check_columns(stored, head_dim_qk, head_dim_vo, dim_names)
    return Options(
        kv_source=kv_source,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim_qk=head_dim_qk,
        head_dim_vo=head_dim_vo,
        page_size=page_size,
        q_dtype=q_dtype,
        kv_dtype=stored.kv_dtype,
        k_format=stored.k_format,
        v_format=stored.v_format,
        out_dtype=out_dtype_of(q_dtype) if o_data_type is None else checks.dtype("o_data_type", o_data_type),
        causal=checks.flag("causal", causal) and not has_mask,
        window_left=check_window(window_left),
        chunk=check_chunk(chunk, has_mask, variant),
        has_soft_cap=check_soft_cap(logits_soft_cap) > 0,
        position_encoding=checks.position_encoding(pos_encoding_mode),
        has_mask=has_mask,
        variant=check_variant(variant),
        latent_format=latent_format,
        fixed_piece_tokens=check_split(
            fixed_split_size, disable_split_kv, 1 if kv_source in latent_formats.LISTED else page_size or 1
        ),
        uniform_q_len=checks.whole("q_len_per_req", uniform_q_len, 0),
    )


def out_dtype_of(q_dtype: DType) -> DType:
    """The output's type if the caller names none: q's, or bfloat16 for fp8 queries, as outputs of fp8 need a scale."""
    return DType.BFLOAT16 if q_dtype.is_fp8 else q_dtype


def check_heads(num_qo_heads: Any, num_kv_heads: Any) -> tuple[int, int]:
    num_qo_heads = checks.whole("num_qo_heads", num_qo_heads, 1)
    num_kv_heads = checks.whole("num_kv_heads", num_kv_heads, 1)
    if num_qo_heads % num_kv_heads:
        raise PlanError(
            f"num_qo_heads={num_qo_heads} is not a multiple of num_kv_heads={num_kv_heads}: every KV head serves the "
            "same number of query heads."
        )
    return num_qo_heads, num_kv_heads


def check_head_dim(name: str, value: Any) -> int:
    """The columns of a row of K or V."""
    dim = checks.whole(name, value, -(2**31))
    if dim not in _HEAD_DIMS:
        error = CapabilityError if dim > 0 else PlanError
        raise error(f"{name}={dim} is not supported: pass a multiple of 8 from {_HEAD_DIMS[0]} to {_HEAD_DIMS[-1]}.")
    return dim


def check_window(window_left: Any) -> int:
    """-1: no window. Windows that no context fills become -1 too, because kernels subtract them in int32."""
    window = checks.whole("window_left", window_left, -(2**31))
    return window if 0 <= window < _LONGEST else -1


def check_chunk(chunk: Any, has_mask: bool, variant: Any) -> int:
    """Returns 0, for no chunks, if `chunk` is None, 0 or more than any context."""
    chunk = 0 if chunk is None else checks.whole("chunk", chunk, 0)
    if not 0 < chunk < _LONGEST:
        return 0
    if has_mask or (variant is not None and check_variant(variant).traced().spec.mask):
        raise CapabilityError(
            f"chunk={chunk} is not supported with a mask of the caller's own: put the chunks into the mask, or leave "
            "the mask out."
        )
    return chunk


def check_soft_cap(logits_soft_cap: Any) -> float:
    """Returns 0, for no cap, if `logits_soft_cap` is None, 0, negative, or larger than any score: fp32 has no inverse
    of the largest caps."""
    cap = 0.0 if logits_soft_cap is None else checks.real("logits_soft_cap", logits_soft_cap)
    return cap if 0 < cap < _NO_CAP else 0.0


def check_variant(variant: Any) -> Any:
    if variant is not None and not hasattr(variant, "traced"):
        raise PlanError(
            f"variant={checks.shown(variant)} is of type {type(variant).__name__}: pass a flashpage.Variant, such as "
            "flashpage.Variant(score_mod=function)."
        )
    return variant


def check_scale(sm_scale: Any, head_dim_qk: int) -> float:
    """The factor of scores; None: head_dim ** -0.5."""
    return head_dim_qk**-0.5 if sm_scale is None else checks.real("sm_scale", sm_scale)


def check_rope(rope_scale: Any, rope_theta: Any) -> tuple[float, float]:
    scale = checks.DEFAULT_ROPE_SCALE if rope_scale is None else rope_scale
    theta = checks.DEFAULT_ROPE_THETA if rope_theta is None else rope_theta
    return checks.real("rope_scale", scale, positive=True), checks.real("rope_theta", theta, positive=True)


def checked_values(before: RunOptions, **changed: Any) -> RunOptions:
    """A caller's values for this run and later ones, judged before they replace the ones so far."""
    values = before._replace(**changed)
    check_scale(values.sm_scale, 1)
    check_rope(values.rope_scale, values.rope_theta)
    return values._replace(
        causal=checks.flag("causal", values.causal),
        window_left=check_window(values.window_left),
        logits_soft_cap=check_soft_cap(values.logits_soft_cap),
        pos_encoding_mode=checks.position_encoding(values.pos_encoding_mode),
    )


def check_split(fixed_split_size: Any, disable_split_kv: bool, tokens: int) -> int:
    """Turns fixed_split_size, which counts pages (ragged: tokens), to tokens; None and -1: balanced. No context is
    longer than _LONGEST."""
    if checks.flag("disable_split_kv", disable_split_kv):
        return SPLIT_NEVER
    if fixed_split_size is None:
        return SPLIT_BALANCED
    size = checks.whole("fixed_split_size", fixed_split_size, -1)
    if size == -1:
        return SPLIT_BALANCED
    piece = checks.whole("fixed_split_size", size, 1) * tokens
    return piece if piece < _LONGEST else SPLIT_NEVER
