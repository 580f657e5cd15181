"""`wrapper._cached_module`: plans from host arrays by position, as engines' planning functions do.

FlashInfer's compiled modules have such a `plan`, which engines call to skip the wrappers' own work. Here it plans
through the wrapper's planner: each argument is taken or refused, and so are the attributes that the engine wrote before
(attributes.py). Anything not passed keeps its value from the last plan.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...base import checks, env
from ...base.errors import PlanError
from ...kernels.options import Options, check_heads, check_soft_cap, check_split, check_window, out_dtype_of
from ...plan.lengths import Lengths, batch_of
from ...plan.page_indices import KEEP_MASK, Pages

if TYPE_CHECKING:
    from ...plan.session import Planner

# Attributes that engines write before they plan: the batch has exactly that number, or at most.
_EXACT = ("_qo_indptr_last", "_batch_size", "_num_qo_heads", "_num_kv_heads", "_q_len_per_req")
_AT_MOST = ("_max_q_len", "_max_kv_len")
_ARRAYS = ("_qo_indptr_buf", "_paged_kv_indptr_buf", "_kv_indptr_buf", "_mask_indptr_buf")  # other kernels read these


class PlanInfo(NamedTuple):
    """The result of `_cached_module.plan`, which engines keep as `_plan_info`."""

    generation: int  # number of the wrapper's plan, which no other plan has
    num_ctas: int
    num_items: int
    num_merges: int
    num_partial_rows: int
    used_bytes: int  # of the int workspace
    total_q: int
    total_kv: int
    max_q_len: int
    max_kv_len: int

    @classmethod
    def of(cls, planner: Planner) -> PlanInfo:
        return cls(planner.generation, *(getattr(planner.result, name) for name in cls._fields[1:]))


class _EngineArguments(NamedTuple):
    """Options that engines pass as arguments of `_cached_module.plan`."""

    num_qo_heads: Any
    num_kv_heads: Any
    page_size: Any
    head_dim_qk: Any
    head_dim_vo: Any
    causal: bool
    window_left: Any
    uniform_q_len: int
    split: tuple[Any, bool] | None = None  # fixed_split_size, disable_split_kv; None: as planned
    logits_soft_cap: float | None = None  # None: as planned
    q_data_type: Any = None  # None: as written, else as planned
    kv_data_type: Any = None


class _Written:
    """Takes what the engine wrote since the last plan, or kept from it; that plan is gone from here on."""

    def __init__(self, wrapper: Any) -> None:
        self.values: dict[str, Any] = wrapper._written()
        names = ("_paged_kv_indices_buf", "_kv_indices_buf")
        self.indices = next((getattr(wrapper, name) for name in names if hasattr(wrapper, name)), None)
        self.block_tables = self.values.get("_block_tables")
        wrapper._planner.invalidate()

    def check(self, wrapper: Any) -> None:
        """Checks the written numbers against the batch; arrays on the device only with FLASHPAGE_CHECK_INDICES=on."""
        for name, value in self.values.items():
            if value is None or name not in (*_EXACT, *_AT_MOST, *_ARRAYS):
                continue
            found = getattr(wrapper, name)
            if name in _ARRAYS:
                if value.is_cpu or env.is_on("FLASHPAGE_CHECK_INDICES"):
                    _check_array(name, value, found)
            elif value != found if name in _EXACT else value < found:
                raise _differs(name, value, found)


def _check_array(name: str, written: torch.Tensor, found: torch.Tensor | None) -> None:
    if found is None or written.shape != found.shape:
        raise _differs(name, written, found)
    if any(differs := [a != b for a, b in zip(written.tolist(), found.tolist(), strict=True)]):
        i = differs.index(True)
        raise _differs(f"{name}[{i}]", int(written[i]), int(found[i]))


def _differs(name: str, written: Any, found: Any) -> PlanError:
    return PlanError(
        f"{name}={checks.shown(written)} was written but the batch has {checks.shown(found)}: write the batch's."
    )


class PlanModule:
    """The module of a wrapper; it keeps no state."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper

    def plan(
        self,
        float_workspace_buffer: torch.Tensor,
        int_workspace_buffer: torch.Tensor,
        page_locked_int_workspace_buffer: torch.Tensor,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_len_arr: torch.Tensor,
        total_num_rows: int,
        batch_size: int,
        num_qo_heads: int,
        num_kv_heads: int,
        page_size: int,
        enable_cuda_graph: bool,
        head_dim_qk: int,
        head_dim_vo: int,
        causal: bool,
        window_left: int = -1,
        fixed_split_size: int = -1,
        disable_split_kv: bool = False,
        num_colocated_ctas: int = 0,
        uniform_q_len: int = 0,
    ) -> PlanInfo:
        """Plans the batch for the wrapper's next runs.

        Args:
            qo_indptr, kv_indptr, kv_len_arr: [batch + 1], [batch + 1] and [batch], on the host (as `plan` takes them).
            total_num_rows: number of rows in the runs' tensors, at least qo_indptr[-1].
            fixed_split_size: pages; -1: balanced.
            num_colocated_ctas: 0.
            uniform_q_len: rows of every request if they are all equal; 0: as qo_indptr says.
        """
        wrapper, written = self._wrapper, _Written(self._wrapper)
        checks.refuse_given(num_colocated_ctas=num_colocated_ctas)
        is_uniform = wrapper._planner.options.uniform_q_len > 0
        rows = checks.whole("uniform_q_len", uniform_q_len, 0) or int(is_uniform)
        if rows:
            _check_uniform(qo_indptr, batch_size, rows)
        given = _EngineArguments(
            *(num_qo_heads, num_kv_heads, page_size, head_dim_qk, head_dim_vo, causal, window_left),
            *(rows if is_uniform else 0, (fixed_split_size, disable_split_kv)),
        )
        _take_memory(wrapper, float_workspace_buffer, int_workspace_buffer, page_locked_int_workspace_buffer)
        lengths = Lengths(None if is_uniform else qo_indptr, kv_indptr, None, kv_len_arr)
        return _plan(wrapper, written, enable_cuda_graph, batch_size, lengths, given, total_num_rows)


class DecodePlanModule:
    """The module of a decode wrapper without `use_tensor_cores`: rows and lengths are not among the arguments."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper

    def plan(
        self,
        float_workspace_buffer: torch.Tensor,
        int_workspace_buffer: torch.Tensor,
        page_locked_int_workspace_buffer: torch.Tensor,
        indptr: torch.Tensor,
        batch_size: int,
        num_qo_heads: int,
        num_kv_heads: int,
        page_size: int,
        enable_cuda_graph: bool,
        window_left: int,
        logits_soft_cap: float,
        head_dim_qk: int,
        head_dim_vo: int,
        empty_q_data: torch.Tensor,
        empty_kv_cache: torch.Tensor,
    ) -> PlanInfo:
        """Plans the batch for the wrapper's next runs; its lengths follow from `_paged_kv_last_page_len_buf`.

        Args:
            indptr: [batch + 1], on the host (as `plan` takes it).
            empty_q_data, empty_kv_cache: their types are those of q and of the cache.
        """
        wrapper, rows = self._wrapper, self._wrapper._q_len_per_req
        last_page_len = None if page_size == 1 else wrapper._paged_kv_last_page_len_buf
        written = _Written(wrapper)
        rows = wrapper._planner.options.uniform_q_len if rows is None else checks.whole("_q_len_per_req", rows, 1)
        given = _EngineArguments(
            *(num_qo_heads, num_kv_heads, page_size, head_dim_qk, head_dim_vo, rows > 1, window_left, rows, None),
            logits_soft_cap=check_soft_cap(logits_soft_cap),
            q_data_type=checks.tensor(empty_q_data, "empty_q_data", PlanError).dtype,
            kv_data_type=checks.tensor(empty_kv_cache, "empty_kv_cache", PlanError).dtype,
        )
        _take_memory(wrapper, float_workspace_buffer, int_workspace_buffer, page_locked_int_workspace_buffer)
        lengths = Lengths(None, indptr, last_page_len)
        return _plan(wrapper, written, enable_cuda_graph, batch_size, lengths, given, batch_size * rows)


class LatentPlanModule:
    """The module of a wrapper for latent rows: page numbers and all other options stay as planned."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper

    def plan(
        self,
        float_workspace_buffer: torch.Tensor,
        int_workspace_buffer: torch.Tensor,
        page_locked_int_workspace_buffer: torch.Tensor,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_heads: int,
        head_dim_ckv: int,
        causal: bool,
    ) -> PlanInfo:
        """Plans the batch for the wrapper's next runs.

        Args:
            qo_indptr, kv_indptr, kv_len_arr: [batch + 1], [batch + 1] and [batch], on the host.
        """
        wrapper, written = self._wrapper, _Written(self._wrapper)
        _take_memory(wrapper, float_workspace_buffer, int_workspace_buffer, page_locked_int_workspace_buffer)
        planned = wrapper._planner.options
        ckv = checks.whole("head_dim_ckv", head_dim_ckv, 1)
        options = dataclasses.replace(
            planned,
            num_q_heads=checks.whole("num_heads", num_heads, 1),
            head_dim_qk=ckv + planned.tail_columns,
            head_dim_vo=ckv,
            page_size=checks.whole("_page_size", written.values.get("_page_size", planned.page_size), 1),
            causal=checks.flag("causal", causal),
        )
        options = wrapper._attention.options if options == planned else options
        wrapper._now = wrapper._now._replace(causal=options.causal)
        lengths = Lengths(qo_indptr, kv_indptr, None, kv_len_arr)
        wrapper._attention.plan(lengths, Pages(written.indices), options, wrapper._now, KEEP_MASK)
        wrapper._options, wrapper._arguments = options, None
        return PlanInfo.of(wrapper._planner)


def _plan(
    wrapper: Any, written: _Written, is_graph: bool, batch: int, lengths: Lengths, given: _EngineArguments, room: int
) -> PlanInfo:
    planner, kv_indptr = wrapper._planner, lengths.kv_indptr
    if bool(is_graph) != planner.is_graph:
        raise PlanError(f"enable_cuda_graph={is_graph} but the wrapper has use_cuda_graph={planner.is_graph}.")
    if batch_of(kv_indptr, "kv_indptr") != batch:
        raise PlanError(f"batch_size={batch} but kv_indptr has {batch_of(kv_indptr, 'kv_indptr')} requests.")
    rows = batch * given.uniform_q_len
    if lengths.q_indptr is not None:
        rows = int(lengths.q_indptr[batch_of(lengths.q_indptr, "qo_indptr")])
    if rows > room:
        raise PlanError(f"total_num_rows={room} but qo_indptr ends at {rows}: pass at least that.")
    options = _options_of(wrapper, written, batch, given)
    pages = Pages(written.indices, written.block_tables)
    waits = planner.is_graph and (bool(written.values) or options.has_mask)  # for checks that need the plan
    if waits:
        planner.wait()
    try:
        wrapper._attention.plan(lengths, pages, options, wrapper._now, KEEP_MASK)
        wrapper._check_planned()
        written.check(wrapper)
    except BaseException:
        planner.is_planned = False
        raise
    finally:
        if waits:
            planner.publish_at_once()
    if waits:
        planner.publish()
    wrapper._copy_items()
    return PlanInfo.of(planner)


def _take_memory(wrapper: Any, float_workspace: Any, int_workspace: Any, staging: Any) -> None:
    planner = wrapper._planner
    if float_workspace is not planner.workspaces.float_buffer:
        planner.use_float_buffer(float_workspace)
    if int_workspace is not planner.workspaces.int_buffer:
        planner.use_int_buffer(int_workspace)
    if staging is not wrapper._staging:
        wrapper._pin_memory_int_workspace_buffer = staging


def _options_of(wrapper: Any, written: _Written, batch: int, given: _EngineArguments) -> Options:
    """The last plan's options; `given` and attributes that the engine wrote replace theirs."""
    planned = wrapper._planner.options
    variant, causal = wrapper._variant_to_plan(written.values, batch)
    dtypes = tuple(written.values.get(f"_cached_{which}_data_type", _NOT_WRITTEN) for which in ("q", "kv", "o"))
    key = (planned, variant, causal, dtypes, given)
    if key == wrapper._module_key:
        return wrapper._attention.options
    if causal is not None:
        given = given._replace(causal=causal)
    options = dataclasses.replace(_options(planned, given, dtypes), variant=variant)
    if options == planned:
        options = wrapper._attention.options
    else:
        wrapper._options, wrapper._arguments = options, None
    wrapper._module_key = (options, *key[1:])
    return options


_NOT_WRITTEN = ""  # None means q's type


def _options(planned: Options, given: _EngineArguments, dtypes: tuple[Any, ...]) -> Options:
    num_q_heads, num_kv_heads = check_heads(given.num_qo_heads, given.num_kv_heads)
    page_size = checks.whole("page_size", given.page_size, 1)
    if planned.kv_source == "ragged":
        if page_size != 1:
            raise PlanError(f"page_size={page_size} but K and V are ragged: pass 1.")
        page_size = 0
    pieces, has_cap = planned.fixed_piece_tokens, planned.has_soft_cap
    q, kv, out = dtypes
    q, kv = given.q_data_type or q, given.kv_data_type or kv
    q_dtype = checks.dtype("_cached_q_data_type", q) if q else planned.q_dtype
    kv_dtype = checks.dtype("_cached_kv_data_type", kv) if kv else planned.kv_dtype if kv is not None else q_dtype
    is_kept = out == _NOT_WRITTEN and q_dtype == planned.q_dtype
    if out:
        out_dtype = checks.dtype("_cached_o_data_type", out)
    else:
        out_dtype = planned.out_dtype if is_kept else out_dtype_of(q_dtype)
    return dataclasses.replace(
        planned,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim_qk=checks.whole("head_dim_qk", given.head_dim_qk, 1),
        head_dim_vo=checks.whole("head_dim_vo", given.head_dim_vo, 1),
        page_size=page_size,
        q_dtype=q_dtype,
        kv_dtype=kv_dtype,
        out_dtype=out_dtype,
        causal=checks.flag("causal", given.causal) and not planned.has_mask,
        window_left=check_window(given.window_left),
        has_soft_cap=has_cap if given.logits_soft_cap is None else given.logits_soft_cap > 0,
        fixed_piece_tokens=pieces if given.split is None else check_split(*given.split, page_size or 1),
        uniform_q_len=given.uniform_q_len,
    )


def _check_uniform(qo_indptr: Any, batch: int, rows: int) -> None:
    """Checks the array, which the planner does not read if every request has the same number of rows."""
    checks.tensor(qo_indptr, "qo_indptr", PlanError)
    expected = torch.arange(batch + 1, dtype=qo_indptr.dtype, device=qo_indptr.device) * rows
    if not torch.equal(qo_indptr, expected):
        raise PlanError(f"qo_indptr has other rows than uniform_q_len: pass {batch} requests of {rows} rows each.")
