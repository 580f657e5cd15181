"""The numpy types of a plan's bytes (include/flashpage/plan/work_item.h, which says what the fields mean)."""

from __future__ import annotations

from typing import Any

import numpy as np


def _all(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


WORK_ITEM = np.dtype(
    _all(np.int64, "kv_offset mask_offset")
    + _all(np.int32, "request q_begin q_len kv_len first_packed_row kv_head num_units kv_begin kv_end partial_row")
    + _all(np.int32, "piece merge")
)
MERGE_ITEM = np.dtype(
    _all(np.int32, "request q_begin first_packed_row num_rows kv_head partial_row partial_stride num_partials")
)
CTA_ITEMS = np.dtype(_all(np.int32, "begin end") + _all(np.uint16, "kv_head walk") + _all(np.int32, "partial_row"))
CTA_START = np.dtype([("items", CTA_ITEMS), ("first", WORK_ITEM)])
PLAN_HEADER = np.dtype(
    _all(np.int32, "num_ctas num_items num_merges num_partial_rows")
    + _all(np.int32, "merges_of_walk items_offset merges_offset used_bytes cluster_size merge_rows")
    + [("unused", np.int32, 2)]
)
RECORDS = {
    "WorkItem": WORK_ITEM,
    "MergeItem": MERGE_ITEM,
    "CtaItems": CTA_ITEMS,
    "CtaStart": CTA_START,
    "PlanHeader": PLAN_HEADER,
}
