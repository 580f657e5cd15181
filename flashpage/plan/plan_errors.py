"""The errors of plans that the planner refuses."""

from __future__ import annotations

from .. import native
from ..base.errors import DeviceError, FlashpageError, PlanError
from ..kernels.options import Options
from . import lengths
from .batch import BOUND_NAMES, Batch
from .workspaces import partial_bytes

_ROWS, _ENTRIES, _PARTIAL_ROWS, _Q_LEN, _KV_LEN, _REQUESTS = range(1, 7)  # csrc/plan_call.h, fp_limit


def error_of(status: int, call: native.PlanCall, batch: Batch, options: Options) -> FlashpageError:
    """The error of a plan's status, which is not OK."""
    result = call.result
    if status == native.BAD_LENGTHS:
        return lengths.complaint(result, batch.names, options.page_span)
    if status == native.WORKSPACE_TOO_SMALL:
        return PlanError(
            f"int_workspace_buffer has {call.capacity} bytes but this plan needs {result.used_bytes}. "
            "As a graph may read it, it does not grow. "
            "Call reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer) before the first plan."
        )
    if status != native.OVER_LIMIT:
        return DeviceError(native.last_error())
    if call.exceeded == _PARTIAL_ROWS:
        return _too_many_partials(batch.workspaces.float_bytes, result.num_partial_rows, options)
    return _over_limit(call, batch, options)


def _too_many_partials(float_bytes: int, rows: int, options: Options) -> PlanError:
    return PlanError(
        f"float_workspace_buffer has {float_bytes} bytes but this plan needs "
        f"{partial_bytes(rows, options.head_dim_vo)}. It has {rows} partial rows. "
        "Pass a larger one (workspace_size gives a bound), or disable_split_kv=True."
    )


def _over_limit(call: native.PlanCall, batch: Batch, options: Options) -> PlanError:
    """The error for a batch that is larger than the wrapper's limits."""
    struct, result = batch.struct, call.result
    if call.exceeded == _REQUESTS:
        batch.check_requests(struct.requests)
    if call.exceeded in (_Q_LEN, _KV_LEN):
        is_q = call.exceeded == _Q_LEN
        bound, longest = batch.longest[0 if is_q else 1], result.max_q_len if is_q else result.max_kv_len
        name = BOUND_NAMES[0 if is_q else 1]
        return PlanError(f"{name}={bound} but a request of the batch has {longest}: pass at least that, or None.")
    if batch.capacity is not None:
        return batch.capacity.complaint(call.exceeded == _ROWS, struct.rows_end, struct.kv_end, options)
    return PlanError(
        f"{batch.names[0]} ends at {struct.rows_end} but the first plan of this wrapper (use_cuda_graph=True) had "
        f"{struct.most_total_rows} rows: plan the largest batch first."
    )
