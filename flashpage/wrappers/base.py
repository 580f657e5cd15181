"""Run once a layer: what the public wrappers share. (plan/session.py is the plan side.)

A run with the options of the last one is one call of a builtin (fastcall.py), which compares the tensors' shapes,
strides, dtypes and devices with the last run's, re-points the thread's Binding and launches. Any other run is judged,
bound and kept.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch._C import _len_torch_dispatch_stack
from torch.compiler import is_dynamo_compiling

from .. import native
from ..base import checks
from ..base.errors import PlanError, RunError
from ..kernels.options import Options, Values, Variation, check_rope, check_scale, check_soft_cap, check_window
from ..native import fastcall
from ..plan.bounds import workspace_bounds
from ..plan.lengths import Lengths, batch_of, to_host
from ..plan.option_plan import Combination
from ..plan.session import Planner, current_stream
from ..run.binding import Binding
from ..run.checks import (
    Tensors,
    as_cache,
    check_cache,
    check_output,
    check_run_heads,
    check_run_tensors,
    flat,
    geometry,
    not_a_tensor,
    signature_of,
)
from . import operators
from .engine_access.attributes import EngineState

_MOST_BINDINGS = 64  # signatures that a thread keeps: layers with other strides or options
OptionsKey: TypeAlias = tuple[tuple[Any, ...], ...]  # arguments in rows: shorter to write, and as fast to compare
_DEFAULTS = Values(False, -1, 0.0, None, None, None, "NONE")

_handles = itertools.count(1)


class _Value:
    """An option that engines read and write as the wrapper's attribute; runs take all of them as one tuple."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._field = name[1:]

    def __get__(self, wrapper: PlanRunWrapper, owner: type) -> Any:
        return getattr(wrapper._now, self._field)

    def __set__(self, wrapper: PlanRunWrapper, value: Any) -> None:
        wrapper._now = wrapper._now._replace(**{self._field: value})


class _Local(threading.local):
    """What a thread has bound: the last run's structs, and all of them by geometry."""

    bound: Any = None  # Binding | None

    def __init__(self) -> None:
        self.bindings: dict[Any, Binding] = {}


class PlanRunWrapper(EngineState):
    """Plans of one wrapper are made by one thread at a time; any thread may run them, one at a time on one stream."""

    _length_names = ("qo_indptr", "paged_kv_indptr", "paged_kv_last_page_len", "seq_lens")  # the caller's words

    _causal, _window_left, _logits_soft_cap, _sm_scale = _Value(), _Value(), _Value(), _Value()
    _rope_scale, _rope_theta, _pos_encoding_mode = _Value(), _Value(), _Value()

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str,
        use_cuda_graph: bool,
        backend: str,
        jit_args: Any = None,
        jit_kwargs: Any = None,
    ) -> None:
        checks.refuse_given(jit_args=jit_args, jit_kwargs=jit_kwargs)
        self._kv_layout = checks.layout(kv_layout)
        self._backend = checks.backend(backend)
        self.device = device = checks.tensor(float_workspace_buffer, "float_workspace_buffer", PlanError).device
        if device.type not in ("cpu", "cuda"):
            raise PlanError(f"float_workspace_buffer is on {device}: pass one on the CPU or on a CUDA device.")
        self._planner = Planner(device, bool(use_cuda_graph), self._length_names, float_workspace_buffer)
        self._device_index = self._planner.device_index
        self._run_kernels = native.load().fp_run
        builtins = fastcall.builtins()
        self._bind_tensors, self._run_tensors = builtins.bind, builtins.run
        self._raw_stream = torch._C._cuda_getCurrentRawStream if self._device_index >= 0 else None
        self._local = _Local()
        self._key: OptionsKey | None = None  # options as they were given, compared to skip judging them again
        self._planned = self._now = _DEFAULTS
        self._handle = next(_handles)
        operators.WRAPPERS[self._handle] = self

    @property
    def resolved_backend(self) -> str:
        """The name of the kernel that the present plan runs; of two, joined by " + "."""
        combination = self._last_combination()
        parts = [combination.prepared] + ([combination.second.prepared] if combination.second else [])
        return " + ".join(prepared.choice.spec.kernel for prepared in parts)

    @property
    def last_plan(self) -> Any:
        """The Plan of the last run, or the one just made: work_items(), explain(), to_svg(path)."""
        return self._last_combination().make_plan()

    def _last_combination(self) -> Combination:
        self._require_plan("last_plan")
        bound = getattr(self._local, "bound", None)
        if bound is not None and bound.generation == self._planner.generation:
            return bound.combination
        return self._planner.active[0]

    def _require_plan(self, name: str) -> None:
        if not self._planner.is_planned:
            raise RunError(f"{name}: {type(self).__name__} has no plan: call plan(...) first (again, where it failed).")

    # ---------------------------------------------------------------- plan

    def _workspace_size(self, options: Options, given: Lengths) -> tuple[int, int]:
        q_indptr, kv_indptr, _, kv_lens = to_host(given)
        assert kv_indptr is not None
        batch = batch_of(kv_indptr, self._length_names[1])
        total_q = options.uniform_q_len * batch if q_indptr is None else int(q_indptr[-1])
        if kv_lens is None:
            total_kv = int(kv_indptr[-1] - kv_indptr[0]) * max(1, options.page_size)
        else:
            total_kv = int(kv_lens.sum())
        return workspace_bounds(options, batch, total_q, total_kv, self.device)

    def _use_options(self, key: OptionsKey, options_of: Callable[..., tuple[Options, Values]]) -> None:
        """Configures the wrapper, unless the last plan, on the host or on the device, had the same options: `key` are
        the arguments of `options_of`, as they were given."""
        if key == self._key:
            self._now = self._planned
            return
        self._key = None
        self._planner.invalidate()
        options, values = options_of(*itertools.chain.from_iterable(key))
        check_scale(values.sm_scale, options.head_dim_qk)
        check_rope(values.rope_scale, values.rope_theta)
        self._planner.configure(options)
        self._planned = self._now = values
        self._options, self._out_dtype = options, options.out_dtype.torch
        self._key = key

    def _take_values(self, **changed: Any) -> None:
        """`forward` sets the attributes for this run and those that follow, its defaults included, as FlashInfer's
        does."""
        if changed.get("pos_encoding_mode") is None:
            changed["pos_encoding_mode"] = self._pos_encoding_mode
        changed["window_left"] = check_window(changed["window_left"])
        changed["logits_soft_cap"] = check_soft_cap(changed["logits_soft_cap"])
        self._now = self._now._replace(**changed)

    def _values(self, window_left: int | None) -> Values:
        """Of the next run."""
        return self._now if window_left is None else self._now._replace(window_left=window_left)

    # ---------------------------------------------------------------- run

    def _run(
        self,
        values: Values,
        q: torch.Tensor,
        cache: Any,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        return_lse: bool,
        scales: tuple[Any, Any, Any],
        sinks: torch.Tensor | None,
        enable_pdl: bool | None,
    ) -> Any:
        """One layer: straight to C, or through the operator where torch traces or watches."""
        if is_dynamo_compiling() or _len_torch_dispatch_stack():
            return operators.run(
                self, values, Tensors(q, as_cache(cache), out, lse), return_lse, scales, sinks, enable_pdl
            )
        bound = self._local.bound
        if (
            bound is None
            or bound.generation != self._planner.generation
            or (values is not bound.values and values != bound.values)
            or (scales is not bound.scales and not bound.has_scales(scales))
            or sinks is not None
            or bound.sinks is not None
            or enable_pdl is not bound.enable_pdl
        ):
            return self._run_judged(
                values, Tensors(q, as_cache(cache), out, lse), return_lse, scales, sinks, enable_pdl
            )
        to = torch.empty(bound.out_shape, dtype=bound.out_dtype, device=self.device) if out is None else out
        lse_to = (
            torch.empty(bound.lse_shape, dtype=torch.float32, device=self.device) if return_lse and lse is None else lse
        )
        stream = 0 if self._raw_stream is None else self._raw_stream(self._device_index)
        if cache.__class__ is tuple and len(cache) == 2:
            status = self._run_tensors(bound.address, q, *cache, to, lse_to, stream)
        else:
            status = self._run_tensors(bound.address, q, cache, None, to, lse_to, stream)
        if status:
            if status == native.OTHER_TENSORS:
                tensors = Tensors(q, as_cache(cache), out, lse)
                return self._run_judged(values, tensors, return_lse, scales, sinks, enable_pdl)
            native.check(status)
        return (to, lse_to) if return_lse else to

    def _run_judged(
        self,
        values: Values,
        tensors: Tensors,
        return_lse: bool,
        scales: tuple[Any, Any, Any],
        sinks: torch.Tensor | None,
        enable_pdl: bool | None,
    ) -> Any:
        """A run that differs from the last one: other options or tensors, or none that C could compare."""
        q, cache, out, lse = tensors
        try:
            signature = signature_of(values, q, cache, out, lse)
        except (AttributeError, ValueError):
            raise not_a_tensor(tensors) from None
        bound = self._local.bound
        if bound is None or bound.signature != signature or bound.generation != self._planner.generation:
            bound = self._bind(signature, values, tensors)
        if out is None:
            out = torch.empty(bound.out_shape, dtype=bound.out_dtype, device=self.device)
        if return_lse and lse is None:
            lse = torch.empty(bound.lse_shape, dtype=torch.float32, device=self.device)
        if scales is not bound.scales:
            bound.set_scales(scales)
        if sinks is not bound.sinks or sinks is not None:
            bound.set_sinks(sinks)
        if enable_pdl is not bound.enable_pdl:
            bound.set_pdl(enable_pdl)
        bound.point(q, cache, out, lse)
        self._bind_tensors(bound.address, q, *(cache if cache.__class__ is tuple else (cache, None)), out, lse)
        if self._device_index >= 0:
            bound.args.stream = current_stream(self._device_index)
        if status := self._run_kernels(bound.args_address):
            native.check(status)
        return (out, lse) if return_lse else out

    def _bind(self, signature: Any, values: Values, tensors: Tensors) -> Binding:
        """Judges a run that differs from the last one, and finds or makes its structs."""
        self._require_plan("run")
        combination = self._judge(values, tensors)
        key = (combination, values, *(geometry(t) for t in flat(tensors)))
        bindings = self._local.bindings
        bound = bindings.get(key)
        if bound is None:
            if len(bindings) >= _MOST_BINDINGS:
                bindings.clear()
            bound = Binding(self._planner, self._kv_layout, values, combination, tensors)
            bindings[key] = bound
        if bound.generation != self._planner.generation:
            bound.refresh(self._planner)
        bound.signature = signature
        bound.lse_shape = lse_shape = tensors.q.shape[:-1]
        bound.out_shape = (*lse_shape, bound.head_dim_vo)
        self._local.bound = bound
        return bound

    def _judge(self, values: Values, tensors: Tensors) -> Combination:
        """Shapes, dtypes and devices of a run against the plan; the combination of options that it needs."""
        planner, options = self._planner, self._options
        q = check_run_tensors(tensors, options, self.device)
        num_kv_heads = check_cache(tensors.cache, options, self._kv_layout, planner.indices.max_page, planner.kv_end)
        heads = check_run_heads(q.shape[1], num_kv_heads, options)
        rows = planner.total_q
        if q.shape[0] != rows and not (planner.is_graph and q.shape[0] > rows):
            raise RunError(f"q has {q.shape[0]} rows but the plan is for {rows}: plan again for this batch.")
        for name, found, shape, dtype in (
            ("out", tensors.out, (*q.shape[:2], options.head_dim_vo), self._out_dtype),
            ("lse", tensors.lse, tuple(q.shape[:2]), torch.float32),
        ):
            if found is not None:
                check_output(found, name, shape, dtype, self.device)
        return planner.find(Variation.of(values, *heads))
