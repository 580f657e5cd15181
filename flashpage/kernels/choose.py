"""What every attention kernel can do, and the choice among them; a refusal tells each kernel's reasons."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch

from .. import native
from ..base.dtypes import DType
from ..base.errors import CapabilityError
from ..variants.source import asks_much
from . import context_classes
from .options import SPLIT_BALANCED, Options, Problem
from .spec import KernelSpec, VariantSpec, inner_loop
from .tensor_maps import are_whole
from .tile import Cost, InnerLoop, MaskUse, Tile, cpu_tile, sm80_tile, sm90_decode_tile, sm90_prefill_tile, whole_rows

_FLOAT = (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)
_NO_VARIANT = VariantSpec()
CLUSTER_SIZES = (1, 2, 4, 8, 16)  # CTAs: csrc/flashpage.h, fp_schedule::clusters
_HALF = (DType.FLOAT16, DType.BFLOAT16)
_FP8 = (DType.FLOAT8_E4M3, DType.FLOAT8_E5M2)


@dataclasses.dataclass(frozen=True)
class Capability:
    """One row of the table: what a kernel honours. What is not named here, every kernel honours."""

    kernel: str
    device: str  # cpu | cuda
    q_dtypes: tuple[DType, ...]
    out_dtypes: tuple[DType, ...]
    # From the packed rows of a request and KV head, the variant, and KernelSpec.mask_source.
    schedule: Callable[[Options, int, VariantSpec, str], tuple[Tile, Cost]]
    min_sm: int = 0
    head_dims: tuple[int, int, int] = (16, 512, 8)  # smallest, largest, step
    row_alignment: int = 1  # bytes on which rows of q, K, V and out must start; 8 where rows do not divide into it
    max_sm: int = 999  # newer cards cannot run it
    max_packed_rows: int = 2**31 - 1  # of a request and KV head, on average
    rope: Callable[[Options], bool] = lambda options: True  # in the kernel
    merges_in_launch: bool = False  # CUDA: partials are merged without a kernel of their own
    loader: Callable[[Options], str] = lambda options: ""  # KernelSpec.loader
    mask_tiles: Callable[[Options], bool] = lambda options: False  # it visits those that another kernel finds
    row_boxes: bool = False  # it takes q, and stores out, by tensor maps where they have one
    # The tile for such contexts where it is not the usual one, and what to say of it.
    tile_of_contexts: Callable[[KernelSpec, context_classes.Contexts], tuple[Tile, str] | None] = lambda spec, of: None
    runs_beside: bool = False  # with one CTA an SM, it shares the SMs with another launch of the same run (parts.py)

    def refusals(self, problem: Problem, sm: int) -> list[str]:
        """Why this kernel cannot; empty: it can."""
        options, found = problem.options, []
        if not self.min_sm <= sm <= self.max_sm:
            needed = f"{_sm_name(self.max_sm)} at most" if sm > self.max_sm else _sm_name(self.min_sm)
            found.append(f"it needs compute capability {needed}, this card has {_sm_name(sm)}")
        if problem.packed_rows > self.max_packed_rows:
            found.append(
                f"a request and KV head have {problem.packed_rows} packed rows (query rows x query heads), "
                f"it takes {self.max_packed_rows}"
            )
        if options.position_encoding == "ROPE_LLAMA" and not self.rope(options):
            found.append(
                f"it has no in-kernel RoPE (pos_encoding_mode ROPE_LLAMA) over kv_data_type {options.kv_dtype.value}"
            )
        if options.q_dtype not in self.q_dtypes:
            found.append(f"q_data_type {options.q_dtype.value} is not among {_names(self.q_dtypes)}")
        if options.out_dtype not in self.out_dtypes:
            found.append(f"o_data_type {options.out_dtype.value} is not among {_names(self.out_dtypes)}")
        if options.kv_dtype is not options.q_dtype and not options.kv_dtype.is_fp8:
            found.append(
                f"kv_data_type {options.kv_dtype.value} is neither q's {options.q_dtype.value} "
                "or fp8 (float8_e4m3fn, float8_e5m2)"
            )
        low, high, step = self.head_dims
        for name in ("head_dim_qk", "head_dim_vo"):
            dim = getattr(options, name)
            if not low <= dim <= high or dim % step:
                found.append(f"{name} {dim} is not a multiple of {step} from {low} to {high}")
        return found


def _mask_source(problem: Problem, capability: Capability, variant: VariantSpec) -> str:
    if problem.options.has_mask:
        return "packed_bits"
    asks_for_tiles = bool(variant.mask) and problem.has_known_lengths and capability.mask_tiles(problem.options)
    return "function" if asks_for_tiles else "implicit"


def _mask_note(problem: Problem, capability: Capability, source: str) -> str:
    if source != "implicit" and capability.mask_tiles(problem.options):
        return "mask: a kernel before this one finds the tiles that no row sees, which are left out, and the mixed ones"
    if capability.mask_tiles(problem.options):
        return "mask: every token of every tile is asked for, as lengths may change under a captured launch"
    return "mask: looked at for every token of every tile"


def _encoding(options: Options) -> str:
    return "rope" if options.position_encoding == "ROPE_LLAMA" else "none"


def _sm80(options: Options, rows: int, variant: VariantSpec, mask_source: str) -> tuple[Tile, Cost]:
    loop = inner_loop(mask_source, _encoding(options), variant)
    return sm80_tile(options.head_dim_qk, options.head_dim_vo, options.kv_dtype, rows, loop)


def _sm90_decode(options: Options, rows: int, variant: VariantSpec, mask_source: str) -> tuple[Tile, Cost]:
    loop = inner_loop(mask_source, _encoding(options), variant)
    if loop is InnerLoop.LOADING and _boxes_or_rows(options) == "rows":
        loop = InnerLoop.HEAVY  # single rows come too slowly in slots of 16 tokens
    rotates = _encoding(options) == "rope"
    return sm90_decode_tile(options.head_dim_qk, options.head_dim_vo, options.kv_dtype, rows, loop, rotates=rotates)


def _sm90_prefill(options: Options, rows: int, variant: VariantSpec, mask_source: str) -> tuple[Tile, Cost]:
    loader, mask = _prefill_loader(options), mask_use(mask_source, variant)
    if mask_source == "packed_bits" and _visits_tiles(options):
        mask_source = "implicit"  # bits are for few tiles
    return sm90_prefill_tile(
        *(options.head_dim_qk, options.head_dim_vo, inner_loop(mask_source, "none", variant)),
        loader=loader,
        group_size=options.group_size,
        mask=mask,
        rotates=_encoding(options) == "rope",  # who loads does it, not the inner loop
    )


def mask_use(mask_source: str, variant: VariantSpec) -> MaskUse:
    if mask_source == "function":
        return MaskUse.ASKED_MUCH if asks_much(variant) else MaskUse.ASKED
    return MaskUse.BITS if mask_source == "packed_bits" else MaskUse.NONE


def _boxes_or_rows(options: Options) -> str:
    row_bytes = (options.head_dim_qk * options.kv_dtype.size, options.head_dim_vo * options.kv_dtype.size)
    return "boxes" if are_whole(options.page_size, *row_bytes) else "rows"


def _visits_tiles(options: Options) -> bool:
    return _prefill_loader(options) in ("boxes", "rows") and _encoding(options) == "none"


def _prefill_loader(options: Options) -> str:
    if not options.kv_dtype.is_fp8:
        return _boxes_or_rows(options)
    dims = (options.head_dim_qk, options.head_dim_vo)
    is_e4m3 = options.q_dtype is options.kv_dtype is DType.FLOAT8_E4M3
    is_whole = all(dim % 32 == 0 for dim in dims) and _boxes_or_rows(options) == "boxes"
    return "transposed" if is_e4m3 and is_whole and not options.has_mask else "converted"


DECODE_SM90 = Capability(
    *("decode_sm90", "cuda", _HALF + _FP8, _HALF),
    _sm90_decode,
    min_sm=90,
    max_sm=90,
    max_packed_rows=64,
    row_alignment=16,
    loader=_boxes_or_rows,
    merges_in_launch=True,
    runs_beside=True,
)

PREFILL_SM90 = Capability(
    *("prefill_sm90", "cuda", _HALF + _FP8, _HALF),
    _sm90_prefill,
    min_sm=90,
    max_sm=90,
    head_dims=(16, 256, 8),
    rope=lambda options: not options.kv_dtype.is_fp8,
    row_alignment=16,
    loader=_prefill_loader,
    row_boxes=True,
    mask_tiles=_visits_tiles,
    tile_of_contexts=context_classes.tile_of,
    runs_beside=True,
)

CAPABILITIES = (
    Capability(
        *("cpu_attention", "cpu", _FLOAT + _FP8, _FLOAT),
        lambda options, rows, *_: cpu_tile(options.head_dim_qk, options.head_dim_vo, rows),
    ),
    DECODE_SM90,
    PREFILL_SM90,
    Capability(
        *("attention_sm80", "cuda", _HALF + _FP8, _HALF),
        _sm80,
        min_sm=80,
        row_alignment=16,
    ),
)


MANY_ROWS = 1 << 20  # packed, of a request and KV head: a prefill's


@dataclasses.dataclass(frozen=True)
class Choice:
    """The kernel for a problem, and why."""

    spec: KernelSpec
    cost: Cost
    capability: Capability
    reasons: tuple[str, ...]  # for Plan.explain()


@functools.cache
def device_sm(device: torch.device) -> int:
    """90 for compute capability 9.0; 0 for the CPU."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


def packed_rows(options: Options, batch: int, total_rows: int) -> int:
    """Rows that choose the tile, rounded up to a power of two so that batches alike share one choice.

    In the batch-invariant mode they follow from the options alone: decode's rows of a request, else a prefill's.
    """
    if options.uniform_q_len:
        rows = options.uniform_q_len
    elif options.is_batch_invariant:
        rows = 64
    else:
        rows = -(-total_rows // batch) if batch else 1
    return 1 << (max(1, rows * options.group_size) - 1).bit_length()


def choose(problem: Problem, device: torch.device, variant: VariantSpec = _NO_VARIANT) -> Choice:
    """The first kernel of the table that can; CapabilityError with every kernel's reasons where none can."""
    options, sm = problem.options, device_sm(device)
    refused = []
    for capability in CAPABILITIES:
        if capability.device != device.type:
            refused.append(f"{capability.kernel}: it runs on {capability.device}, the work is on {device.type}")
            continue
        reasons = capability.refusals(problem, sm)
        if not reasons:
            mask_source = _mask_source(problem, capability, variant)
            tile, cost = capability.schedule(options, problem.packed_rows, variant, mask_source)
            has_mask = options.has_mask or variant.mask
            spec = _spec(options, capability, tile, variant, mask_source)
            spec, of_contexts = for_contexts(problem, capability, spec)
            assert spec.tile is not None
            notes = (
                f"kernel {capability.kernel}: the first that can",
                *(f"refused {reason}" for reason in refused),
                f"tile {spec.tile.tile_q // spec.ctas} packed rows x {spec.tile.tile_kv} tokens, for about "
                f"{problem.packed_rows} packed rows a "
                "request and KV head",
                *([_mask_note(problem, capability, mask_source)] if has_mask else []),
                *of_contexts,
            )
            return Choice(spec, cost, capability, notes)
        refused.append(f"{capability.kernel}: {'; '.join(reasons)}")
    raise CapabilityError("no kernel can honour this request:\n  " + "\n  ".join(refused))


def for_contexts(problem: Problem, capability: Capability, spec: KernelSpec) -> tuple[KernelSpec, tuple[str, ...]]:
    """The same with the tile that the batch's contexts are best with, and what to say of it."""
    if (found := capability.tile_of_contexts(spec, problem.contexts)) is not None:
        tile, note = found
        return dataclasses.replace(spec, tile=tile), (note,)
    return spec, ()


def offline(problem: Problem, device_type: str) -> Capability:
    """What `choose` would take on the newest card that a kernel is for; the most general one where none can."""
    rows = [capability for capability in CAPABILITIES if capability.device == device_type]
    return next((row for row in rows if not row.refusals(problem, row.min_sm)), rows[-1])


def _spec(options: Options, capability: Capability, tile: Tile, variant: VariantSpec, mask_source: str) -> KernelSpec:
    return KernelSpec(
        kernel=capability.kernel,
        q_dtype=options.q_dtype,
        kv_dtype=options.kv_dtype,
        out_dtype=options.out_dtype,
        head_dim_qk=options.head_dim_qk,
        head_dim_vo=options.head_dim_vo,
        kv_source=options.kv_source,
        mask_source=mask_source,
        position_encoding=_encoding(options),
        tile=tile,
        variant=variant,
        loader=capability.loader(options),
    )


@dataclasses.dataclass(frozen=True)
class Clusters:
    """What a loaded kernel knows of clusters (csrc/flashpage.h, fp_kernel_info)."""

    resident: tuple[int, ...] = (0,) * len(CLUSTER_SIZES)  # of each of CLUSTER_SIZES, that run at once; 0: none do
    rows: int = 0  # packed rows of a unit, at most

    @staticmethod
    def of(info: native.KernelInfo) -> Clusters:
        return Clusters(tuple(info.clusters), info.cluster_rows)


NO_CLUSTERS = Clusters()


def schedule(choice: Choice, options: Options, num_ctas: int, clusters: Clusters = NO_CLUSTERS) -> native.Schedule:
    """The planner's struct; a fixed piece is rounded up to whole inner steps of the tile."""
    tile, cost, piece = choice.spec.tile, choice.cost, options.fixed_piece_tokens
    assert tile is not None
    if piece > 0:
        piece = -(-piece // tile.tile_kv) * tile.tile_kv
    return native.Schedule(
        num_ctas=num_ctas,
        walk=cost.walk,
        tile_q=_unit_rows(choice, options.group_size),
        tile_kv=tile.tile_kv,
        ns_per_token=cost.ns_per_token,
        ns_per_unit=cost.ns_per_unit,
        few_rows_cost=cost.few_rows_cost,
        ns_per_piece=cost.ns_per_piece,
        ns_per_merge=cost.ns_per_merge,
        min_piece_tokens=cost.min_piece_tokens,
        max_pieces=cost.max_pieces if piece == SPLIT_BALANCED else 0,
        fixed_piece_tokens=piece,
        merge_rows=cost.merge_rows,
        wave_tokens=_wave_tokens(choice.spec),
        are_claimed=choice.spec.mask_source != "implicit" and choice.capability.mask_tiles(options),
        clusters=clusters.resident,
        cluster_rows=clusters.rows,
        cluster_piece_tokens=cost.cluster.piece_tokens,
        full_speed_share=cost.cluster.full_speed_share,
        ns_per_cluster_merge=cost.cluster.ns_per_cluster_merge,
    )


def _unit_rows(choice: Choice, group_size: int) -> int:
    """Packed rows of a unit: a tile's, or as many of them as are whole rows of the group, where Q and output can then
    come and leave by boxes."""
    spec = choice.spec
    assert spec.tile is not None
    rows = spec.tile.tile_q
    if choice.capability.row_boxes and spec.loader != "converted" and spec.mask_source == "implicit":
        rows = whole_rows(rows // spec.ctas, group_size) * spec.ctas
    return rows


def most_units(options: Options, tile_q: int, batch: int, total_rows: int) -> int:
    """Units of a batch of so many requests and rows, at most."""
    rows = options.uniform_q_len * options.group_size
    tiles = batch * -(-rows // tile_q) if rows else batch + total_rows * options.group_size // tile_q
    return tiles * options.num_kv_heads


def with_one_cluster_size(found: native.Schedule, units: int) -> tuple[native.Schedule, int]:
    """The schedule for launches whose clusters are all of one size, whatever is planned for them: the largest of which
    `units` run at once. The CTAs are then a multiple of it. That size; 0: launches without clusters."""
    fitting = [i for i, count in enumerate(found.clusters) if i > 0 and units <= count]
    fixed, best = native.Schedule.from_buffer_copy(found), max(fitting, default=0)
    fixed.num_ctas = found.clusters[best] * CLUSTER_SIZES[best] if best else found.num_ctas
    for i, count in enumerate(found.clusters):
        fixed.clusters[i] = min(count, fixed.num_ctas) if i == 0 else count if i == best else 0
    return fixed, CLUSTER_SIZES[best] if best else 0


_WAVE_BYTES = 16 << 20  # a third of Hopper's L2 (docs/tried.md)


def _wave_tokens(spec: KernelSpec) -> int:
    return _WAVE_BYTES // ((spec.head_dim_qk + spec.head_dim_vo) * spec.kv_dtype.size) if spec.backend == "cuda" else 0


def _sm_name(sm: int) -> str:
    return f"{sm // 10}.{sm % 10}"


def _names(dtypes: tuple[DType, ...]) -> str:
    return ", ".join(d.value for d in dtypes)
