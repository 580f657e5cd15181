"""fp_plan_batch without a wrapper, in one call; the caller holds the arrays."""

from __future__ import annotations

import ctypes
from typing import Any

from flashpage import native

NO_LIMIT = 2**62


class PlanCall:
    """A call that plans one problem; `slots`, `destination` and `capacity` may be given in place of a PlanBuffer's."""

    def __init__(self, problem: native.ProblemStruct, schedule: native.Schedule, **where: Any) -> None:
        arrays = {name: getattr(problem, name) for name in ("q_indptr", "kv_indptr", "last_page_len", "kv_lens")}
        self.batch = native.BatchStruct(
            **arrays,
            requests=problem.batch,
            q_len_per_request=problem.q_len_per_request,
            most_total_rows=NO_LIMIT,
            most_entries=NO_LIMIT,
            most_requests=2**31 - 1,
            longest_q=NO_LIMIT,
            longest_kv=NO_LIMIT,
        )
        if problem.batch or problem.kv_indptr.data:
            native.load().fp_batch_sum_up(ctypes.addressof(self.batch))
        self.schedule = schedule
        self.struct = native.PlanCall(
            batch=ctypes.addressof(self.batch),
            problem=problem,
            schedule=ctypes.addressof(schedule),
            most_partial_rows=NO_LIMIT,
            **where,
        )
        self.address = ctypes.addressof(self.struct)

    def plan(self, stream: int = 0) -> int:
        """Plans; returns the status."""
        status: int = native.load().fp_plan_batch(self.address, stream, True)
        return status
