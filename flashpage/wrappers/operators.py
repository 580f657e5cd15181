"""flashpage's operators in torch: schemas, mutated arguments, fake implementations. torch.ops.flashpage.<name>.

Eager calls go straight to the implementations; the operators are called while torch.compile traces or a dispatch mode
is active. A wrapper's run is an operator with the wrapper's handle, never its plan: planning again compiles nothing.

torch.compile(mode="reduce-overhead") captures its code as CUDA graphs. A captured run keeps the plan of its capture,
unless the wrapper is one for graphs. So runs have two operators: inductor leaves one out of its graphs, and the other
is for wrappers for graphs.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from .. import native
from ..base import checks, kv_view, tensor_memory
from ..base.errors import RunError
from ..base.tensor_memory import waited
from ..kernels.options import Options, RunOptions
from ..native import fastcall
from ..run.checks import Scales, Tensors, cache_of, check_places, has_pages, scales_of
from .append_launch import AppendLaunch
from .append_places import AppendPlaces
from .row_launches import launch_merge, rows_of, vector_rows


class Runnable(Protocol):
    """The part of an Attention (base.py) that an operator uses."""

    handle: int
    options: Options

    @property
    def is_graph(self) -> bool: ...

    @property
    def out_dtype(self) -> torch.dtype: ...

    @property
    def run(self) -> Callable[..., Any]: ...


WRAPPERS: weakref.WeakValueDictionary[int, Runnable] = weakref.WeakValueDictionary()  # by handle

_library = torch.library.Library("flashpage", "DEF")


def is_traced() -> bool:
    """Whether torch traces or intercepts calls: tensors may then have no values."""
    return bool(torch.compiler.is_dynamo_compiling() or torch._C._len_torch_dispatch_stack())


def check_plain(*named: tuple[str, Any]) -> None:
    """Raises for the first tensor whose memory kernels cannot use."""
    for name, value in () if is_traced() else named:
        tensor = checks.tensor(value, name, RunError)
        if waited(tensor) is tensor:
            tensor_memory.address(tensor, name, RunError)


def call(name: str, *args: Any) -> Any:
    """Calls the implementation directly, or the operator if torch traces or intercepts calls."""
    if is_traced():
        return getattr(torch.ops.flashpage, name)(*args)
    return _IMPLEMENTATIONS[name](*judged(name, args))


def judged(name: str, args: tuple[Any, ...]) -> list[Any]:
    """Prepares an operator's arguments: tensors must have memory, and autograd learns which ones are written."""
    found = [[waited(part) for part in arg] if arg.__class__ is list else waited(arg) for arg in args]
    names, written = _arguments_of(name)
    if fastcall.builtins().judge(*(tensor for _, tensor in _tensors(names, found))):
        check_plain(*_tensors(names, found))
    if written:
        torch.autograd.graph.increment_version([t for _, t in _tensors(names, [found[i] for i in written])])
    return found


def _tensors(names: tuple[str, ...], args: list[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, arg in zip(names, args, strict=False):
        for value in arg if arg.__class__ is list else (arg,):
            if isinstance(value, torch.Tensor):
                yield name, value


@functools.cache
def _arguments_of(operator: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """An operator's arguments, and the positions of those that it writes."""
    arguments = getattr(torch.ops.flashpage, operator).default._schema.arguments
    is_written = [argument.alias_info is not None and argument.alias_info.is_write for argument in arguments]
    return tuple(argument.name for argument in arguments), tuple(i for i, written in enumerate(is_written) if written)


# ---------------------------------------------------------------- run


def run(
    wrapper: Runnable,
    values: tuple[Any, ...],
    tensors: Tensors,
    return_lse: bool,
    scales: Scales,
    sinks: torch.Tensor | None,
    enable_pdl: bool | None,
    indices: torch.Tensor | None = None,
) -> Any:
    """A wrapper's run as an operator; it allocates the outputs, so that the graph knows their shapes. `indices`: the
    lists of a SelectedAttention (latent_sparse.py)."""
    checks.flag("return_lse", return_lse, RunError)
    q, cache, out, lse = tensors
    parts = [part for part in cache if part is not None] if isinstance(cache, tuple) else [cache]
    _check_gradients(wrapper, tensors, parts, scales, sinks)
    if out is None:
        out = q.new_empty((q.shape[0], q.shape[1], wrapper.options.head_dim_vo), dtype=wrapper.out_dtype)
    if return_lse and lse is None:
        lse = q.new_empty((q.shape[0], q.shape[1]), dtype=torch.float32)
    numbers = [None if isinstance(s, torch.Tensor) else s for s in (*scales, None)]
    arrays = [s if isinstance(s, torch.Tensor) else None for s in (*scales, None)]
    name = f"run_{wrapper.options.kv_source}{'_captured' if wrapper.is_graph else ''}"
    operator = getattr(torch.ops.flashpage, name)
    of_inputs = (*numbers[:3], *arrays[:3])
    operator(wrapper.handle, q, parts, out, lse, *values, *of_inputs, sinks, enable_pdl, numbers[3], arrays[3], indices)
    return (out, lse) if return_lse else out


def _check_gradients(
    wrapper: Runnable, tensors: Tensors, parts: list[torch.Tensor], scales: Scales, sinks: torch.Tensor | None
) -> None:
    """Refuses tensors that require one: the operator itself gets none of these from compiled code."""
    of_parts = ("k", "v") if wrapper.options.kv_source == "ragged" else ("paged_kv_cache",) * len(parts)
    given = {"q": tensors.q, "out": tensors.out, "lse": tensors.lse, "sinks": sinks}
    of_scales = zip(("q_scale", "k_scale", "v_scale", "o_scale"), scales, strict=False)
    for name, value in (*given.items(), *zip(of_parts, parts, strict=False), *of_scales):
        if isinstance(value, torch.Tensor):
            checks.no_gradient(value, name, RunError)


def _run(
    handle: int,
    q: torch.Tensor,
    cache: list[torch.Tensor],
    out: torch.Tensor,
    lse: torch.Tensor | None,
    causal: bool,
    window_left: int,
    logits_soft_cap: float,
    sm_scale: float | None,
    rope_scale: float | None,
    rope_theta: float | None,
    pos_encoding_mode: str,
    q_scale: float | None,
    k_scale: float | None,
    v_scale: float | None,
    q_scales: torch.Tensor | None,
    k_scales: torch.Tensor | None,
    v_scales: torch.Tensor | None,
    sinks: torch.Tensor | None,
    enable_pdl: bool | None,
    o_scale: float | None = None,
    o_scales: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
) -> None:
    wrapper: Any = WRAPPERS.get(handle)
    if wrapper is None:
        raise RunError(
            f"handle={handle} is of a wrapper that no longer exists: keep the wrapper as long as its graph runs."
        )
    values = RunOptions(causal, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta, pos_encoding_mode)
    parts = cache_of(cache, wrapper.options)
    numbers, arrays = (q_scale, k_scale, v_scale, o_scale), (q_scales, k_scales, v_scales, o_scales)
    scales = scales_of(*(array if number is None else number for number, array in zip(numbers, arrays, strict=True)))
    if indices is None:
        wrapper.run(q, parts, out, lse, False, values, scales, sinks, enable_pdl)
    else:
        wrapper.run_indices(Tensors(q, parts, out, lse), indices, False, scales, sinks, enable_pdl)


# ---------------------------------------------------------------- merging


def _merge_pair(
    v: torch.Tensor, s: torch.Tensor, v_other: torch.Tensor, s_other: torch.Tensor, mask: torch.Tensor | None,
    out: torch.Tensor, lse: torch.Tensor,
) -> None:  # fmt: skip
    v, v_other, s, s_other = rows_of(v), rows_of(v_other), rows_of(s), rows_of(s_other)
    if not v.is_cpu:
        v, v_other = vector_rows(v), vector_rows(v_other)
    if v.stride() != v_other.stride():
        v_other = v_other.contiguous() if v.is_contiguous() else torch.empty_like(v).copy_(v_other)
        v = v if v.stride() == v_other.stride() else v.contiguous()
    if s.stride() != s_other.stride():
        s, s_other = s.contiguous(), s_other.contiguous()
    params = native.MergeStatesParams(
        v=v.data_ptr(),
        s=s.data_ptr(),
        v_other=v_other.data_ptr(),
        s_other=s_other.data_ptr(),
        mask=None if mask is None else mask.data_ptr(),
        out=out.data_ptr(),
        lse=lse.data_ptr(),
        v_row_stride=v.stride(0),
        v_head_stride=v.stride(1),
        s_row_stride=s.stride(0),
        num_states=2,
        rows=v.shape[0],
        num_heads=v.shape[1],
        head_dim=v.shape[2],
    )
    launch_merge(params, v)


def _merge_state(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = _merge_state_fake(v_a, s_a, v_b, s_b)
    _merge_pair(v_a, s_a, v_b, s_b, None, out, lse)
    return out, lse


def _merge_state_fake(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return v_a.new_empty(v_a.shape), s_a.new_empty(s_a.shape)


def _merge_state_in_place(
    v: torch.Tensor, s: torch.Tensor, v_other: torch.Tensor, s_other: torch.Tensor, mask: torch.Tensor | None
) -> None:
    for name, written, other in (("v", v, v_other), ("s", s, s_other)):
        if written.data_ptr() != other.data_ptr():
            tensor_memory.check_apart(written, name, other, f"{name}_other", RunError)
    _merge_pair(v, s, v_other, s_other, None if mask is None else mask.contiguous(), v, s)


def _merge_states(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = _merge_states_fake(v, s)
    _merge_states_into(v, s, out, lse)
    return out, lse


def _merge_states_into(v: torch.Tensor, s: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
    tensor_memory.check_apart(lse, "lse", out, "out", RunError)
    v, s = rows_of(v), rows_of(s)
    if not v.is_cpu:
        v = vector_rows(v)
    params = native.MergeStatesParams(
        v=v.data_ptr(),
        s=s.data_ptr(),
        out=out.data_ptr(),
        lse=lse.data_ptr(),
        v_state_stride=v.stride(1),
        v_row_stride=v.stride(0),
        v_head_stride=v.stride(2),
        s_state_stride=s.stride(1),
        s_row_stride=s.stride(0),
        num_states=v.shape[1],
        rows=v.shape[0],
        num_heads=v.shape[2],
        head_dim=v.shape[3],
    )
    launch_merge(params, v)


def _merge_states_fake(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, _, heads, dim = v.shape
    return v.new_empty((rows, heads, dim)), s.new_empty((rows, heads))


# ---------------------------------------------------------------- append


def _append_paged_kv_cache(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    cache: list[torch.Tensor],
    kv_layout: str,
) -> None:
    if append_key.is_cpu and bool((batch_indices < 0).any()):  # padding, which the kernel on a card skips itself
        given = (batch_indices >= 0).nonzero().squeeze(1)
        append_key, append_value = append_key[given], append_value[given]
        batch_indices, positions = batch_indices[given], positions[given]
    if append_key.shape[0] == 0:
        return
    if append_key.is_cpu:
        k, _ = kv_view.paged_views((cache[0], cache[1]) if len(cache) == 2 else cache[0], kv_layout)
        check_places(batch_indices, positions, kv_indices, kv_indptr, k)
    elif not has_pages(batch_indices, kv_indices):
        return
    places = AppendPlaces(batch_indices=batch_indices, positions=positions, kv_indices=kv_indices, kv_indptr=kv_indptr)
    AppendLaunch(append_key, append_value, cache, kv_layout).run(append_key, append_value, cache, places)


def _nothing(*_: Any) -> None:
    """The fake implementation of an operator that only writes into its arguments."""


_RUN_SCHEMA = (
    "(int handle, Tensor q, Tensor[] cache, Tensor(a!) out, Tensor(b!)? lse, bool causal, int window_left, "
    "float logits_soft_cap, float? sm_scale, float? rope_scale, float? rope_theta, str pos_encoding_mode, "
    "float? q_scale, float? k_scale, float? v_scale, Tensor? q_scales, Tensor? k_scales, Tensor? v_scales, "
    "Tensor? sinks, bool? enable_pdl, float? o_scale=None, Tensor? o_scales=None, "
    "Tensor? indices=None) -> ()"
)
_SOURCES = "paged", "ragged", "latent", "selected"  # two_lists: not traced; Options.kv_source
_OPERATORS: tuple[tuple[str, str, Callable[..., Any], Callable[..., Any]], ...] = (
    *((f"run_{kv}{kind}", _RUN_SCHEMA, _run, _nothing) for kv in _SOURCES for kind in ("", "_captured")),
    (
        "merge_state",
        "(Tensor v_a, Tensor s_a, Tensor v_b, Tensor s_b) -> (Tensor, Tensor)",
        *(_merge_state, _merge_state_fake),
    ),
    (
        "merge_state_in_place",
        "(Tensor(a!) v, Tensor(b!) s, Tensor v_other, Tensor s_other, Tensor? mask) -> ()",
        *(_merge_state_in_place, _nothing),
    ),
    ("merge_states", "(Tensor v, Tensor s) -> (Tensor, Tensor)", _merge_states, _merge_states_fake),
    (
        "merge_states_into",
        "(Tensor v, Tensor s, Tensor(a!) out, Tensor(b!) lse) -> ()",
        *(_merge_states_into, _nothing),
    ),
    (
        "append_paged_kv_cache",
        "(Tensor append_key, Tensor append_value, Tensor batch_indices, Tensor positions, Tensor kv_indices, "
        "Tensor kv_indptr, Tensor(a!)[] cache, str kv_layout) -> ()",
        *(_append_paged_kv_cache, _nothing),
    ),
)
_IMPLEMENTATIONS = {name: implementation for name, _, implementation, _ in _OPERATORS}


OUT_OF_GRAPHS: tuple[Any, ...] = (torch.Tag.cudagraph_unsafe,) if hasattr(torch.Tag, "cudagraph_unsafe") else ()


def define(
    name: str,
    schema: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any] = _nothing,
    *,
    tags: tuple[Any, ...] = (),
    keys: tuple[str, ...] = ("CPU", "CUDA"),
) -> None:
    """Registers an operator; `tags`: OUT_OF_GRAPHS if inductor must not capture it; `keys`: where it is dispatched."""
    _library.define(name + schema, tags=(torch.Tag.needs_fixed_stride_order, *tags))
    for key in keys:
        _library.impl(name, implementation, key)
    torch.library.register_fake(f"flashpage::{name}", fake, lib=_library)


for _operator in _OPERATORS:
    define(*_operator, tags=OUT_OF_GRAPHS if _operator[0] in {f"run_{kv}" for kv in _SOURCES} else ())
