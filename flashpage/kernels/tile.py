"""The shape of one kernel's work, and its cost for the planner."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Tile:
    """The shape of one kernel's work; it is rendered into Traits and part of the spec's identity."""

    tile_q: int  # packed rows of a unit
    tile_kv: int  # tokens of an inner step
    warps_q: int  # warps that share the rows
    warps_kv: int  # warps that share the tokens
    stages: int  # most KV tiles in flight; the kernel's header uses as many as fit
    ctas_per_sm: int = 1  # CUDA: limits the registers
    warps_v: int = 1  # warps that share the value columns
    ctas: int = 1  # CTAs that share a unit and read its tokens side by side
    ring_bytes: int = 0  # most shared memory for the stages; 0: the header's own limit
    shared_limit: int = 0  # shared memory of a CTA on the card; 0: the header has the limit of its cards

    @property
    def has_few_rows(self) -> bool:
        """Whether warps share the tokens and each has all rows: such a loop is limited by loads. It is has_few_rows of
        attention_sm80/kernel.h."""
        return self.warps_kv > 1 and self.warps_q == 1

    def paired(self) -> Tile:
        """The tile of two CTAs with as many rows each."""
        return dataclasses.replace(self, tile_q=2 * self.tile_q, ctas=2)


@dataclasses.dataclass(frozen=True)
class ClusterCost:
    """The cost of units with CTAs of their own (include/flashpage/plan/own_ctas.h)."""

    piece_tokens: int  # no piece of a cluster's unit is shorter
    ns_per_unit: float  # as Cost's, where no unit follows in the same CTA
    ns_per_cluster_merge: float  # what merging in a cluster adds to a launch
    full_speed_share: float  # fraction of the CTAs that keeps memory as busy as all


@dataclasses.dataclass(frozen=True)
class Cost:
    """The costs by which the planner balances and cuts (include/flashpage/plan/schedule.h). Not part of the spec."""

    heads_on_axis: bool  # prefill; False: neighbouring CTAs take the KV heads of the same tokens
    ns_per_token: float  # of one token in one unit
    ns_per_unit: float
    ns_per_piece: float
    min_piece_tokens: int
    merge_rows: int
    least_ns_of_unit: float = 0.0  # of a whole unit, however few its tokens
    max_pieces: int = 0  # of one unit; 0: no limit
    reading_share: float = 1.0  # of ns_per_token, what reading the token takes; the rest is more work
    few_rows_cost: float = 1.0  # factor of ns_per_token if a request's packed rows fill at most half a row tile
    ns_per_merge: float = 0.0  # what merging adds to a launch besides ns_per_piece; 0: not known
    cluster: ClusterCost = ClusterCost(0, 0.0, 0.0, 1.0)


MERGE_COLUMNS = 128  # columns that a warp of kernels/helpers/merge.h merges at a time
MERGE_ITEM_ROWS = 64  # rows of a merge item
FEW_MERGE_ITEM_ROWS = 8  # the same, of kernels whose units may have fewer rows
