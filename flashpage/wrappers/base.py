"""Plans and runs in the library's own terms: `plan(lengths, pages, options, values)` once a step, `run(q, cache)` once
a layer. FlashInfer's classes are adapters of this class, and so are cascades, mixed batches, sparse and parallel
attention. (plan/session.py is the plan side.)

A run with the options of the last one is one call of a builtin (native/fastcall.py), which compares the shapes,
strides, dtypes and devices of the tensors with the last run's, re-points the thread's Binding and launches. Any other
run is checked, bound and kept.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C import _len_torch_dispatch_stack
from torch.compiler import is_dynamo_compiling

from .. import native
from ..base import checks
from ..base.errors import PlanError, RunError
from ..base.unique import Unique
from ..kernels.kernel import ANY_BYTES
from ..kernels.options import OptionOverride, Options, RunOptions, check_rope, check_scale
from ..native import fastcall
from ..plan.batch import NO_BOUNDS, Longest
from ..plan.bounds import workspace_of
from ..plan.device_lengths import TableLengths
from ..plan.lengths import Given, Lengths, Names
from ..plan.option_plan import OptionPlan
from ..plan.page_indices import KEEP_MASK, GivenPages, Mask
from ..plan.session import Planner, current_stream
from ..run.binding import Binding
from ..run.checks import (
    NO_SCALES,
    Scales,
    Tensors,
    as_cache,
    check_cache,
    check_output,
    check_plain,
    check_run_heads,
    check_run_tensors,
    flat,
    geometry,
    has_scales,
    parts_of,
    signature_of,
    starts_of,
    wait_for,
)
from ..run.stamps import Recorder
from . import operators
from .lse_mode import in_base_e, is_natural
from .rotation import rotated_queries

PAGED = Names("qo_indptr", "paged_kv_indptr", "paged_kv_last_page_len", "seq_lens", "paged_kv_indices")
RAGGED = Names("qo_indptr", "kv_indptr", "last_page_len", "seq_lens")
DECODE = Names("qo_indptr", "indptr", "last_page_len", "seq_lens", "indices")

_MOST_BINDINGS = 64  # signatures that a thread keeps: layers with other strides or options

_handles = itertools.count(1)


class _Local(threading.local):
    """The bound structs of a thread: the last run's, and all of them by geometry."""

    bound: Any = None  # Binding | None

    def __init__(self) -> None:
        self.bindings: dict[Any, Binding] = {}


class Attention(Unique):
    """One thread at a time makes plans; any thread may run them, one at a time on one stream.

    Attributes:
        session: the plans.
        options, values: of the last plan.
    """

    options: Options
    recorder: Recorder | None = None  # of stamps
    _hadamard_queries = False
    values = RunOptions(False, -1, 0.0, None, None, None, "NONE")

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        *,
        is_graph: bool = False,
        names: Names = PAGED,
        owner: str = "Attention",
    ) -> None:
        self.owner = owner  # the caller's name for this object
        self.kv_layout = checks.layout(kv_layout)
        self.device = device = checks.tensor(float_workspace_buffer, "float_workspace_buffer", PlanError).device
        if device.type not in ("cpu", "cuda"):
            raise PlanError(f"float_workspace_buffer is on {device}: pass one on the CPU or on a CUDA device.")
        self.session = Planner(device, is_graph, names, float_workspace_buffer)
        self._device_index = self.session.device_index
        self._run_kernels = native.load().fp_run
        builtins = fastcall.builtins()
        self._bind_tensors, self._run_tensors, self._judge_tensors = builtins.bind, builtins.run, builtins.judge
        self._raw_stream = torch._C._cuda_getCurrentRawStream if self._device_index >= 0 else None
        self._local = _Local()
        self._configured: Options | None = None
        self.handle = next(_handles)
        operators.WRAPPERS[self.handle] = self

    @property
    def is_graph(self) -> bool:
        """Whether captured runs serve later plans."""
        return self.session.is_graph

    @property
    def out_dtype(self) -> torch.dtype:
        """The type of the outputs that runs allocate."""
        return self.options.out_dtype.torch

    @property
    def resolved_backend(self) -> str:
        """The name of the kernel of the present plan; names of two kernels are joined by " + "."""
        return " + ".join(part.prepared.choice.spec.kernel for part in self._last_option_plan().parts)

    @property
    def last_plan(self) -> Any:
        """The Plan of the last run, or a newer one: work_items(), explain(), to_svg(path)."""
        return self._last_option_plan().make_plan()

    def _last_option_plan(self) -> OptionPlan:
        self.require_plan("last_plan")
        bound = getattr(self._local, "bound", None)
        if bound is not None and bound.generation == self.session.generation:
            return bound.option_plan
        return self.session.active[0]

    def require_plan(self, name: str) -> None:
        """Raises if nothing may run."""
        if not self.session.is_planned:
            raise RunError(f"{name}: {self.owner} has no plan: call plan(...) first, and again if it failed.")

    # ---------------------------------------------------------------- plan

    def plan(
        self,
        lengths: Given,
        pages: GivenPages,
        options: Options,
        values: RunOptions,
        mask: Mask | None = None,
        longest: Longest = NO_BOUNDS,
    ) -> None:
        """Plans a batch for options that were checked (kernels/options.py); runs use `values` unless they get
        others."""
        session, (indices, tables, non_blocking, row_runs) = self.session, pages
        if options is not self._configured:
            self._configure(options)
        self.values = values
        if non_blocking is not True:
            session.invalidate()
            checks.flag("non_blocking", non_blocking)
        if tables is not None:
            session.invalidate()
            indices = session.page_numbers_of(tables, lengths, indices)
        if mask is not None and mask is not KEEP_MASK and session.needs_judged_mask:
            session.judge_mask(mask, lengths)
        if row_runs is not session.batch.row_runs:
            session.batch.use_row_runs(row_runs)
        session.plan(lengths, indices, non_blocking, longest)
        if mask is not KEEP_MASK and (mask is not None or session.mask.tensor is not None):
            session.set_mask(mask, non_blocking)
        if tables is not None:
            session.block_tables = tables

    def plan_on_device(self, tables: TableLengths, options: Options, values: RunOptions) -> None:
        """Plans by a launch on the current stream, from lengths that only the device knows."""
        if options is not self._configured:
            self._configure(options)
        self.values = values
        self.session.batch.check_requests(tables.batch)
        self.session.plan_on_device(tables)
        if self.session.mask.tensor is not None:
            self.session.set_mask(None, True)

    def workspace_size(self, lengths: Lengths, options: Options) -> tuple[int, int]:
        """Bytes of the float and of the int workspace that suffice for this batch and every smaller one."""
        return workspace_of(lengths, options, self.session.batch.names, self.device)

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        """Takes other workspaces; call plan again before the next run."""
        self.session.use_float_buffer(float_workspace_buffer)
        self.session.use_int_buffer(int_workspace_buffer)

    def _configure(self, options: Options) -> None:
        self._configured = None
        self.session.invalidate()
        if not self.session.active or options != self.session.options:
            self.session.configure(options)
        self.options = self._configured = options
        self._hadamard_queries = options.hadamard_queries

    # ---------------------------------------------------------------- run

    @contextlib.contextmanager
    def recorded(self) -> Iterator[Recorder]:
        """Within it this thread's runs are stamped, each one bound again and so slower on the host."""
        if self.recorder is not None:
            raise RunError(f"{self.owner} is being recorded: end one recording before the next one.")
        local = self._local
        recorder = self.recorder = Recorder()
        local.bound = None
        local.bindings.clear()
        try:
            yield recorder
        finally:
            self.recorder = local.bound = None
            local.bindings.clear()

    def run(
        self,
        q: torch.Tensor,
        cache: Any,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        values: RunOptions | None = None,
        scales: Scales = NO_SCALES,
        sinks: torch.Tensor | None = None,
        enable_pdl: bool | None = None,
        *,
        q_tail: torch.Tensor | None = None,
    ) -> Any:
        """Runs one layer: in C at once, or through the operator if torch traces or intercepts calls. `values` None: as
        planned; `scales`: of q, k and v, and of fp8 outputs; `q_tail`: of LatentAttention alone, which joins it."""
        if values is None:
            values = self.values
        if is_dynamo_compiling() or _len_torch_dispatch_stack():  # operators.is_traced would be a frame more
            tensors = Tensors(q, as_cache(cache), out, lse)
            return operators.run(self, values, tensors, return_lse, scales, sinks, enable_pdl)
        if self._hadamard_queries:
            q = rotated_queries(q, self.options)
        bound = self._local.bound
        if (
            bound is None
            or bound.generation != self.session.generation
            or (values is not bound.values and values != bound.values)
            or (scales is not bound.scales.given and not bound.scales.take(scales))
            or sinks is not None
            or bound.sinks is not None
            or enable_pdl is not bound.enable_pdl
            or (return_lse is not False and return_lse is not True)
        ):
            tensors = Tensors(q, as_cache(cache), out, lse)
            return self._run_judged(values, tensors, return_lse, scales, sinks, enable_pdl, q_tail)
        to = torch.empty(bound.out_shape, dtype=bound.out_dtype, device=self.device) if out is None else out
        lse_to = (
            torch.empty(bound.lse_shape, dtype=torch.float32, device=self.device) if return_lse and lse is None else lse
        )
        stream = 0 if self._raw_stream is None else self._raw_stream(self._device_index)
        if q_tail is not None:
            k, v = cache if cache.__class__ is tuple else (cache, None)
            status = self._run_tensors(bound.address, q, k, v, to, lse_to, stream, None, None, q_tail)
        elif cache.__class__ is tuple and len(cache) == 2:
            status = self._run_tensors(bound.address, q, *cache, to, lse_to, stream)
        elif cache.__class__ is tuple and len(cache) == 4:
            status = self._run_tensors(bound.address, q, *cache[:2], to, lse_to, stream, *cache[2:])
        else:
            status = self._run_tensors(bound.address, q, cache, None, to, lse_to, stream)
        if status:
            if status == native.OTHER_TENSORS:
                tensors = Tensors(q, as_cache(cache), out, lse)
                return self._run_judged(values, tensors, return_lse, scales, sinks, enable_pdl, q_tail)
            native.check(status)
        return (to, lse_to) if return_lse else to

    def run_of(self, lse_mode: str) -> Callable[..., Any]:
        """`run` with LSEs of a mode: itself for "base2"; for "basee" the LSE is multiplied by ln 2 in place."""
        return self._run_in_base_e if is_natural(lse_mode) else self.run

    def _run_in_base_e(
        self, q: torch.Tensor, cache: Any, out: Any = None, lse: torch.Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        return in_base_e(self.run(q, cache, out, lse, *args, **kwargs), lse)

    def _run_judged(
        self,
        values: RunOptions,
        tensors: Tensors,
        return_lse: bool,
        scales: Scales,
        sinks: torch.Tensor | None,
        enable_pdl: bool | None,
        q_tail: torch.Tensor | None = None,
    ) -> Any:
        """A run that differs from the last one: other options or tensors, or tensors that C cannot compare."""
        return_lse = checks.flag("return_lse", return_lse, RunError)
        outputs = (output for output in (tensors.out, tensors.lse) if output is not None)
        is_odd = tensors.cache.__class__ is tuple and len(tensors.cache) not in (2, 4)
        if is_odd or self._judge_tensors(tensors.q, *parts_of(tensors.cache).values(), *outputs):
            tensors = wait_for(tensors)
            check_plain(tensors)
        q, cache, out, lse = tensors
        signature = signature_of(values, q, cache, out, lse)
        bound = self._local.bound
        if bound is None or bound.signature != signature or bound.generation != self.session.generation:
            bound = self._bind(signature, values, tensors)
        unused = self.session.first_row  # rows of no request
        if out is None:
            out = torch.empty(bound.out_shape, dtype=bound.out_dtype, device=self.device)
            if unused:
                out[:unused].zero_()
        if return_lse and lse is None:
            lse = torch.empty(bound.lse_shape, dtype=torch.float32, device=self.device)
            if unused:
                lse[:unused].fill_(-torch.inf)
        if scales is not bound.scales.given:
            bound.set_scales(scales, cache)
        if sinks is not bound.sinks or sinks is not None:
            bound.set_sinks(sinks)
        if enable_pdl is not bound.enable_pdl:
            bound.set_pdl(enable_pdl)
        bound.resize(q, cache)
        pair = cache[:2] if cache.__class__ is tuple else (cache, None)
        scales_of_rows = cache[2:] if has_scales(cache) else ()
        # C cannot read these tensors, or not safely; plans with unused rows always run this way.
        if self._bind_tensors(bound.address, None if unused else q, *pair, out, lse, 0, *scales_of_rows):
            check_plain(Tensors(q, cache, out, lse))
            bound.point(q, cache, out, lse)
            bound.point_scales(scales_of_rows, (out, lse))
            torch.autograd.graph.increment_version([out] if lse is None else [out, lse])
        if self._device_index >= 0:
            bound.args.stream = current_stream(self._device_index)
        if status := self._run_kernels(bound.args_address):
            native.check(status)
        return (out, lse) if return_lse else out

    def _bind(self, signature: Any, values: RunOptions, tensors: Tensors) -> Binding:
        """Checks a run that differs from the last one, and finds or makes its structs."""
        self.require_plan("run")
        option_plan = self._judge(values, tensors)
        places = (option_plan.scale_alignment, *starts_of(tensors.cache))
        key = (option_plan, values, *places, *(geometry(t) for t in flat(tensors)))
        bindings = self._local.bindings
        try:
            bound = bindings.get(key)
        except TypeError:  # a value that cannot be hashed is no number
            check_scale(values.sm_scale, 1)
            check_rope(values.rope_scale, values.rope_theta)
            raise
        if bound is None:
            if len(bindings) >= _MOST_BINDINGS:
                bindings.clear()
            bound = Binding(self.session, self.kv_layout, values, option_plan, tensors)
            bindings[key] = bound
        if bound.generation != self.session.generation:
            bound.refresh(self.session)
        if bound.most_cache_bytes < ANY_BYTES:
            bound.check_span(tensors.cache)
        bound.generation = self.session.generation  # from here on C may run these tensors without another check
        if self.recorder is not None:
            self.recorder.record(bound)
        bound.signature = signature
        bound.lse_shape = lse_shape = tensors.q.shape[:-1]
        bound.out_shape = (*lse_shape, bound.head_dim_vo)
        self._local.bound = bound
        return bound

    def _judge(self, values: RunOptions, tensors: Tensors) -> OptionPlan:
        """Checks shapes, dtypes and devices of a run against the plan; returns the set of options that it needs."""
        session, options = self.session, self.options
        q = check_run_tensors(tensors, options, self.device)
        lengths = session.batch.names
        names = (lengths.kv_indptr, lengths.indices if session.batch.tables is None else "block_tables")
        reach = (session.indices.max_page, session.kv_end)
        num_kv_heads = check_cache(tensors.cache, options, self.kv_layout, *reach, names)
        heads = check_run_heads(q.shape[1], num_kv_heads, options)
        rows = session.total_q
        tables = session.batch.tables
        is_bound = tables is not None and q.shape[0] < rows and tables.takes(q.shape[0])
        if q.shape[0] != rows and not is_bound and not (session.is_graph and q.shape[0] > rows):
            by = f" by {lengths.q_indptr}" if not options.uniform_q_len else ""
            raise RunError(f"q has {q.shape[0]} rows but the plan is for {rows}{by}: plan again for this batch.")
        for name, found, shape, dtype in (
            ("out", tensors.out, (*q.shape[:2], options.head_dim_vo), self.out_dtype),
            ("lse", tensors.lse, tuple(q.shape[:2]), torch.float32),
        ):
            if found is not None:
                check_output(found, name, shape, dtype, self.device)
        return session.find(OptionOverride.of(values, *heads))
