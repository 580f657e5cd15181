"""The record of one kernel. `flashpage/kernels/NAME.py` makes it, and it names the C++ header
`include/flashpage/kernels/NAME/kernel.h`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from .. import native
from ..base.dtypes import DType
from ..base.errors import CompileError
from ..variants.source import soft_cap
from . import kv_formats, latent_formats
from .ahead import Ahead
from .context_classes import ContextClass
from .devices import CAPABILITIES, Device
from .options import Options
from .spec import KernelSpec
from .tensor_maps import LINE_BYTES
from .tile import Cost, Tile
from .work import InnerLoop, Work

ANY_BYTES = 1 << 62
COLUMNS = "columns"  # KernelSpec.loader of kernels that read a copy of V by columns; all others refuse it
COLUMN_POSITIONS = 16  # tokens of such a copy that have an order of their own (tile/load/column_boxes.h)

FLOAT = (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)
HALF = (DType.FLOAT16, DType.BFLOAT16)
FP8 = (DType.FLOAT8_E4M3, DType.FLOAT8_E5M2)
NARROW = (*HALF, DType.FLOAT8_E4M3)  # of outputs
LATENT_OUT = (*HALF, DType.FLOAT32)  # of outputs over latent rows; fp32 for states that are merged

Rule = Callable[[Work], "str | None"]  # why the kernel cannot do the work; None: it can


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A compiled kernel: one C++ class over one `Traits` struct, and the parameters of its entry."""

    name: str  # KernelSpec.kernel
    header: str  # under include/
    cpp: str  # the class
    parameters: tuple[tuple[str, str], ...]  # C++ type and name, in the order of Kernel::run
    traits: Callable[[KernelSpec], tuple[str, ...]] = lambda spec: ()  # lines of the struct
    sources: Callable[[KernelSpec], str] = lambda spec: ""  # C++ written for the spec, before Traits
    attributes: Callable[[KernelSpec], str] = lambda spec: ""  # C++ attributes of the entry
    archs: tuple[int, ...] = ()  # architectures for which it can be compiled; empty: any
    has_variant: bool = False  # its source has a `struct Variant`
    include: Path | None = None  # a folder with headers of its own, in addition to the package's

    @property
    def backend(self) -> str:
        """cuda | cpu: names of CPU kernels begin with cpu_."""
        return "cpu" if self.name.startswith("cpu_") else "cuda"


@dataclasses.dataclass(frozen=True)
class AttentionKernel(Kernel):
    """A kernel that runs a plan: what it accepts, its tile and its cost."""

    has_variant: bool = True
    accepts: tuple[Rule, ...] = ()  # an option that no rule refuses must be honoured: nothing else checks it
    tile: Callable[[Work], Tile] = dataclasses.field(kw_only=True)
    cost: Callable[[Work, Tile], Cost] = dataclasses.field(kw_only=True)
    loader: Callable[[Options], str] = lambda options: ""  # KernelSpec.loader
    # The batches of each class of contexts that has tiles of its own; the first row that fits a batch decides.
    context_rows: Callable[[Options, Device], list[native.ContextRow]] = lambda options, card: []
    # The tile for contexts of a class and a note for explain(); None: the usual tile.
    context_tile: Callable[[KernelSpec, ContextClass], tuple[Tile, str] | None] = lambda spec, contexts: None
    # Packed rows of a unit, for a group size and a class of contexts.
    unit_rows: Callable[[KernelSpec, int, ContextClass], int] = lambda spec, group_size, contexts: spec.rows
    visits_mask_tiles: Callable[[Options], bool] = lambda options: False  # only those of mask_tiles
    most_packed_rows: int = 2**31 - 1  # of a request and KV head, on average
    row_alignment: int = 1  # bytes on which rows of q, K, V and out must start; 8 if rows are not multiples of it
    # The spec that reads rows of formats with scales which start on 8 bytes, for the same plan; None: none does.
    on_eight: Callable[[KernelSpec], KernelSpec | None] = lambda spec: None
    scale_alignment: int = 1  # bytes on which a token's scales start (formats), as far as a row's number allows
    most_cache_bytes: int = ANY_BYTES  # that K or V may span
    merges_in_launch: bool = False  # CUDA: partials are merged without another launch, unless they are many
    row_boxes: bool = False  # it loads q and stores out by tensor maps, if they have one
    # Whether it loads q by a tensor map whose boxes may have a part of a group's heads, if q has one.
    query_boxes: Callable[[KernelSpec], bool] = lambda spec: False
    line_bytes: Callable[[KernelSpec], int] = lambda spec: LINE_BYTES  # of boxes of K and V
    gathers_rows: bool = False  # consecutive rows may be worth a copy of single ones (plan/gather_rows.py)
    runs_beside: bool = False  # with one CTA an SM, it can share the SMs with another launch of the same run
    ahead: tuple[Ahead, ...] = ()  # plans whose kernels are built ahead of time

    def refusals(self, work: Work) -> list[str]:
        """Why this kernel cannot do the work; empty: it can."""
        found = []
        if work.packed_rows > self.most_packed_rows:
            found.append(
                f"a request and KV head have {work.packed_rows} packed rows (query rows x query heads), "
                f"it takes {self.most_packed_rows}"
            )
        if work.options.has_value_columns and self.loader(work.options) != COLUMNS:
            found.append("it reads V by rows, and no copy of V by columns")
        found += [reason for rule in self.accepts if (reason := rule(work)) is not None]
        if not found and self.archs and work.card.sm not in self.archs:
            found.append(f"it is not built for compute capability {_sm_name(work.card.sm)}")
        if not found and (ctas := self.tile(work).ctas) > work.card.sms:
            found.append(f"its unit needs {ctas} SMs, this card has {work.card.sms}")
        return found

    def spec(self, work: Work) -> KernelSpec:
        """The spec to compile for the work, with the usual tile."""
        options = work.options
        return KernelSpec(
            kernel=self.name,
            q_dtype=options.q_dtype,
            kv_dtype=options.kv_dtype,
            out_dtype=options.out_dtype,
            head_dim_qk=options.head_dim_qk,
            head_dim_vo=options.head_dim_vo,
            kv_source=options.kv_source,
            latent_format=options.latent_format,
            k_format=options.k_format,
            v_format=options.v_format,
            mask_source=work.mask_source,
            position_encoding=work.position_encoding,
            tile=self.tile(work),
            variant=work.variant,
            loader=self.loader(options),
        )


def capability(least: int, most: int = 999) -> Rule:
    """Requires a compute capability, times ten."""

    def rule(work: Work) -> str | None:
        if least <= work.card.sm <= most:
            return None
        needed = f"{_sm_name(most)} at most" if work.card.sm > most else _sm_name(least)
        return f"it needs compute capability {needed}, this card has {_sm_name(work.card.sm)}"

    return rule


def ability(name: str) -> Rule:
    """Requires a word of devices.ABILITIES."""

    def rule(work: Work) -> str | None:
        if name in work.card.abilities:
            return None
        least = _sm_name(min(sm for sm, row in CAPABILITIES.items() if name in row.abilities))
        return f"it needs {name} (compute capability {least} on), this card has {_sm_name(work.card.sm)}"

    return rule


def dtypes(q: tuple[DType, ...], out: tuple[DType, ...]) -> tuple[Rule, ...]:
    """Requires element types of q and of the output; K and V have q's type or fp8."""

    def of_q(work: Work) -> str | None:
        given = work.options.q_dtype
        return None if given in q else f"q_data_type {given.value} is not among {_names(q)}"

    def of_out(work: Work) -> str | None:
        given = work.options.out_dtype
        return None if given in out else f"o_data_type {given.value} is not among {_names(out)}"

    def of_kv(work: Work) -> str | None:
        given, query = work.options.kv_dtype, work.options.q_dtype
        if given is query or given.is_fp8 or work.options.has_formats:
            return None
        return f"kv_data_type {given.value} is neither q's {query.value} nor fp8 (float8_e4m3fn, float8_e5m2)"

    return of_q, of_out, of_kv


def no_latent_rows(work: Work) -> str | None:
    return "it reads K and V, and no latent rows (MLA)" if work.options.is_latent else None


def no_kv_formats(work: Work) -> str | None:
    """For kernels that read plain elements of one type."""
    options = work.options
    if not options.has_formats:
        return None
    names = options.k_format if options.k_format == options.v_format else f"{options.k_format}, {options.v_format}"
    return f"it reads K and V of one element type, and no kv_format {names}"


def latent_options(work: Work) -> str | None:
    """Options that no kernel has over latent rows."""
    options = work.options
    if not options.is_latent:
        return None
    if options.out_dtype.is_fp8:
        return f"it writes no outputs of {options.out_dtype.value} over latent rows"
    if work.rotates:
        return "it does not rotate latent rows (pos_encoding_mode ROPE_LLAMA): rotate them before they are cached"
    if options.latent_format == latent_formats.PLAIN and options.kv_dtype is not options.q_dtype:
        return f"it reads no latent rows of {options.kv_dtype.value}"
    if options.latent_format != latent_formats.PLAIN and (
        work.loop is not InnerLoop.PLAIN or work.mask_source != "implicit"
    ):
        return "it has no custom masks, variants and soft caps over latent rows in fp8"
    return None


def head_dims(least: int, most: int, step: int) -> Rule:
    def rule(work: Work) -> str | None:
        wrong = [
            f"{name} {dim} is not a multiple of {step} from {least} to {most}"
            for name in ("head_dim_qk", "head_dim_vo")
            if not least <= (dim := getattr(work.options, name)) <= most or dim % step
        ]
        return "; ".join(wrong) or None

    return rule


def no_rope_over_hadamard_keys(work: Work) -> str | None:
    """RoPE in the kernel would come after the Hadamard matrix, and must come before it."""
    if not (work.rotates and work.options.hadamard_queries):
        return None
    over, other = work.options.k_format, kv_formats.unrotated(work.options.k_format)
    return (
        f"it has no in-kernel RoPE (pos_encoding_mode ROPE_LLAMA) over kv_format {over}: apply it to q and K before, "
        f"or pass {other!r}"
    )


def no_rope_over_fp8(work: Work) -> str | None:
    if not (work.rotates and work.options.kv_dtype.is_fp8):
        return None
    return f"it has no in-kernel RoPE (pos_encoding_mode ROPE_LLAMA) over kv_data_type {work.options.kv_dtype.value}"


def tanh_trait(spec: KernelSpec, product: DType) -> tuple[str, ...]:
    """Soft caps by the card's tanh (tanh.approx), for kernels that are limited by arithmetic: prefill on Hopper is 1.3
    times faster by it (docs/tried.md). Scores are off by up to 2^-11 of themselves. Outputs of bf16 weights were as
    exact as before (docs/numerics.md); fp16 weights would lose bits that they hold. `product`: the type of the
    weights."""
    approximates = bool(soft_cap(spec.variant)) and product is not DType.FLOAT16
    return (f"static constexpr bool approximates_tanh = {str(approximates).lower()};",)


def attention_traits(spec: KernelSpec, query: DType, cache: DType, layout: str) -> tuple[str, ...]:
    """The lines of Traits that every attention kernel of a card has. `query`, `cache`: the types in which it
    computes."""
    tile = spec.tile
    if tile is None:
        raise CompileError(f"spec {spec.name} has no tile: {spec.kernel} needs one, as plans choose it.")
    numbers = {
        "head_dim_qk": spec.head_dim_qk,
        "head_dim_vo": spec.head_dim_vo,
        **{f.name: getattr(tile, f.name) for f in dataclasses.fields(tile)},
        # Rows of a CTA; latent_columns_sm90: those of the unit / ctas, as both CTAs have all rows.
        "tile_q": tile.tile_q // tile.ctas,
    }
    return (
        *types(StoredQuery=spec.q_dtype, Query=query, StoredCache=spec.kv_dtype, Cache=cache, Out=spec.out_dtype),
        "using Variant = flashpage::Variant;",
        *(f"static constexpr int {name} = {number};" for name, number in numbers.items()),
        f"static constexpr KvSource kv_source = KvSource::{spec.kv_source};",
        f"static constexpr MaskSource mask_source = MaskSource::{spec.mask_source};",
        f"static constexpr PositionEncoding position_encoding = PositionEncoding::{spec.position_encoding};",
        f"static constexpr RowsLayout layout = RowsLayout::{layout};",
        f"static constexpr bool trace = {str(spec.trace).lower()};",
        *format_traits(spec),
        *([f"static constexpr Loader loader = Loader::{spec.loader};"] if spec.loader else []),
    )


def format_traits(spec: KernelSpec) -> tuple[str, ...]:
    """The formats of K and V, if they are other than plain elements of StoredCache."""
    if not spec.has_formats:
        return ()
    key, value = spec.formats
    return f"using KeyFormat = flashpage::{key.cpp};", f"using ValueFormat = flashpage::{value.cpp};"


def latent_trait(spec: KernelSpec) -> str:
    """How latent rows are stored."""
    return f"static constexpr flashpage::LatentFormat latent_format = flashpage::LatentFormat::{spec.latent_format};"


def types(**named: DType) -> tuple[str, ...]:
    return tuple(f"using {name} = {dtype.cpp};" for name, dtype in named.items())


def _sm_name(sm: int) -> str:
    return f"{sm // 10}.{sm % 10}"


def _names(dtypes: tuple[DType, ...]) -> str:
    return ", ".join(d.value for d in dtypes)
