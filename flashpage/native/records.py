"""The numpy types of a plan's bytes; include/flashpage/plan/work_item.h defines the fields."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import structs


def _record(struct: Any) -> np.dtype[np.void]:
    return np.dtype(struct)


WORK_ITEM = _record(structs.WorkItem)
MERGE_ITEM = _record(structs.MergeItem)
CTA_ITEMS = _record(structs.CtaItems)
CTA_START = _record(structs.CtaStart)
PLAN_HEADER = _record(structs.PlanHeader)
