"""Turns a chosen kernel into the planner's struct (csrc/flashpage.h, fp_schedule)."""

from __future__ import annotations

import dataclasses

from .. import native
from .choose import KernelChoice
from .devices import Device
from .options import SPLIT_BALANCED, Options
from .spec import KernelSpec
from .tile import MERGE_COLUMNS

CLUSTER_SIZES = (1, 2, 4, 8, 16)  # CTAs: csrc/flashpage.h, fp_schedule::clusters


@dataclasses.dataclass(frozen=True)
class Clusters:
    """The cluster sizes and counts that a loaded kernel reports (csrc/flashpage.h, fp_kernel_info)."""

    resident: tuple[int, ...] = (0,) * len(CLUSTER_SIZES)  # how many of each size run at once; 0: none can
    rows: int = 0  # packed rows of a unit that a cluster can merge

    @staticmethod
    def of(info: native.KernelInfo, card: Device) -> Clusters:
        """As the driver reports them, and at most as many as the card has; FLASHPAGE_CARD may name a smaller one."""
        if not info.cluster_rows or "clusters" not in card.abilities:
            return NO_CLUSTERS
        ctas = resident_ctas(info, card)
        counts = (min(count, ctas // size) for count, size in zip(info.clusters, CLUSTER_SIZES, strict=True))
        return Clusters(tuple(counts), info.cluster_rows)


NO_CLUSTERS = Clusters()


def resident_ctas(info: native.KernelInfo, card: Device) -> int:
    """CTAs that run at once. The driver knows the limit of an SM; the card of FLASHPAGE_CARD may have less shared
    memory, of which the system takes 1 KiB for each CTA."""
    fitting = card.sm_shared_bytes // (info.shared_bytes + (1 << 10))
    return card.sms * max(1, min(info.ctas_per_sm, fitting))


def schedule(
    choice: KernelChoice, options: Options, num_ctas: int, clusters: Clusters = NO_CLUSTERS
) -> native.Schedule:
    """The schedule of a kernel. A fixed piece is rounded up to whole inner steps of the tile."""
    tile, cost, piece = choice.spec.tile, choice.cost, options.fixed_piece_tokens
    assert tile is not None
    if piece > 0:
        piece = -(-piece // tile.tile_kv) * tile.tile_kv
    return native.Schedule(
        num_ctas=num_ctas,
        heads_on_axis=cost.heads_on_axis,
        tile_q=choice.kernel.unit_rows(choice.spec, options.group_size, choice.contexts),
        tile_kv=tile.tile_kv,
        ns_per_token=cost.ns_per_token,
        ns_per_unit=cost.ns_per_unit,
        least_ns_of_unit=cost.least_ns_of_unit,
        few_rows_cost=cost.few_rows_cost,
        ns_per_piece=cost.ns_per_piece,
        ns_per_merge=cost.ns_per_merge,
        min_piece_tokens=cost.min_piece_tokens,
        max_pieces=cost.max_pieces if piece == SPLIT_BALANCED else 0,
        fixed_piece_tokens=piece,
        merge_rows=cost.merge_rows,
        row_jobs=-(-options.head_dim_vo // MERGE_COLUMNS),
        wave_tokens=_wave_tokens(choice.spec, choice.card),
        are_claimed=choice.spec.mask_source != "implicit" and choice.kernel.visits_mask_tiles(options),
        clusters=clusters.resident,
        cluster_rows=clusters.rows,
        cluster_piece_tokens=cost.cluster.piece_tokens,
        full_speed_share=cost.cluster.full_speed_share,
        ns_per_cluster_unit=cost.cluster.ns_per_unit,
        ns_per_cluster_merge=cost.cluster.ns_per_cluster_merge,
    )


def most_units(options: Options, tile_q: int, batch: int, total_rows: int) -> int:
    """The most units of a batch of so many requests and rows."""
    rows = options.uniform_q_len * options.group_size
    tiles = batch * -(-rows // tile_q) if rows else batch + total_rows * options.group_size // tile_q
    return tiles * options.num_kv_heads


def with_one_cluster_size(found: native.Schedule, units: int) -> tuple[native.Schedule, int]:
    """The schedule for launches whose clusters all have one size, whatever is planned: the largest size of which
    `units` clusters run at once. The CTAs are then a multiple of it. Also returns that size; 0: launches without
    clusters."""
    fitting = [i for i, count in enumerate(found.clusters) if i > 0 and units <= count]
    fixed, best = native.Schedule.from_buffer_copy(found), max(fitting, default=0)
    fixed.num_ctas = found.clusters[best] * CLUSTER_SIZES[best] if best else found.num_ctas
    for i, count in enumerate(found.clusters):
        fixed.clusters[i] = min(count, fixed.num_ctas) if i == 0 else count if i == best else 0
    return fixed, CLUSTER_SIZES[best] if best else 0


def _wave_tokens(spec: KernelSpec, card: Device) -> int:
    """Tokens of a wave, whose units read the same part of the L2: up to a third of it, rounded down to a power of two
    (16 MiB on Hopper: docs/tried.md)."""
    if not card.sm:
        return 0
    wave_bytes = 1 << (max(1, card.l2_bytes // 3).bit_length() - 1)
    return wave_bytes // ((spec.head_dim_qk + spec.head_dim_vo) * spec.kv_dtype.size)
