"""The shape of one kernel's work, and what the planner must know of its cost."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Tile:
    """The shape of one kernel's work: rendered into Traits, part of the spec's identity."""

    tile_q: int  # packed rows of a unit
    tile_kv: int  # tokens of an inner step
    warps_q: int  # warps side by side along the rows
    warps_kv: int  # warps side by side along the tokens
    stages: int  # KV tiles in flight, at most: the kernel's header takes as many as fit
    ctas_per_sm: int = 1  # CUDA: what registers are bounded for
    warps_v: int = 1  # warps side by side along the value columns
    ctas: int = 1  # CTAs of a cluster: each has its part of the rows, and they read the tokens once
    ring_bytes: int = 0  # shared memory for the stages, at most; 0: the header's own limit
    shared_limit: int = 0  # shared memory of a CTA on the card; 0: the header knows its cards' own

    def paired(self) -> Tile:
        """For two CTAs that have as many rows each."""
        return dataclasses.replace(self, tile_q=2 * self.tile_q, ctas=2)


@dataclasses.dataclass(frozen=True)
class ClusterCost:
    """The cost of units with CTAs of their own (include/flashpage/plan/own_ctas.h)."""

    piece_tokens: int  # no piece of a cluster's unit is shorter
    ns_per_cluster_merge: float  # what merging adds to a launch there
    full_speed_share: float  # share of the CTAs with which memory is as busy as with all


@dataclasses.dataclass(frozen=True)
class Cost:
    """What the planner needs to balance and cut (include/flashpage/plan/schedule.h). Not part of the spec."""

    heads_on_axis: bool  # prefill; False: neighbouring CTAs take the KV heads of the same tokens
    ns_per_token: float  # one unit, one token
    ns_per_unit: float
    ns_per_piece: float
    min_piece_tokens: int
    merge_rows: int
    max_pieces: int = 0  # of one unit; 0: no limit
    few_rows_cost: float = 1.0  # factor of ns_per_token where a request's packed rows fill at most half a row tile
    ns_per_merge: float = 0.0  # what merging adds to a launch, beyond ns_per_piece; 0: not known, units are cut anyway
    cluster: ClusterCost = ClusterCost(0, 0.0, 1.0)


MERGE_CTA_ROWS = 8  # rows that a CTA of kernels/helpers/merge.h takes at a time, one a warp
MERGE_ITEM_ROWS = 64  # rows of a merge item
