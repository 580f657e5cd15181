"""Attributes of a wrapper that engines read and write, under FlashInfer's private names.

Engines' planning functions write here what they are about to plan, and then call `_cached_module.plan`
(cached_module.py), which takes or checks all of it. `plan` and `run` do not use them: values are made when read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ...base import checks
from ...base.errors import PlanError
from ...base.unique import Unique
from ..graph_buffers import take_graph_buffers
from ..prewarm import Prewarmed
from .cached_module import PlanInfo, PlanModule

if TYPE_CHECKING:
    from ...plan.capacity import Capacity
    from ...plan.session import Planner
    from ..base import Attention


class Written:
    """Reads what was written since the last plan, or else that plan's value (None without a plan)."""

    def __init__(self, of_plan: Callable[[Any], Any]) -> None:
        self._of_plan = of_plan

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, state: EngineState, owner: type) -> Any:
        written = state._written()
        if self._name in written:
            return written[self._name]
        return self._of_plan(state) if state._planner.is_planned else None

    def __set__(self, state: EngineState, value: Any) -> None:
        state._written()[self._name] = value


class Buffer(Written):
    """An array of the batch on the device. With graph buffers it is the constructor's tensor, and cannot be
    replaced."""

    def __get__(self, state: EngineState, owner: type) -> Any:
        if state._has_graph_buffers:
            return state._graph_buffer(self._name)
        return super().__get__(state, owner)

    def __set__(self, state: EngineState, value: Any) -> None:
        if not state._has_graph_buffers:
            super().__set__(state, value)
        elif value is not state._graph_buffer(self._name):
            raise PlanError(
                f"{self._name} is fixed by the constructor with use_cuda_graph=True: copy the values into it."
            )


def array_of_plan(i: int) -> Buffer:
    """Array 0: q_indptr, 1: kv_indptr, 2: last_page_len."""
    return Buffer(lambda state: state._planner.arrays()[i].to(state.device, torch.int32))


class EngineState(Unique):
    """A wrapper's workspaces and graph buffers, and the numbers of its plan."""

    _planner: Planner
    device: torch.device

    _qo_indptr_last = Written(lambda state: state._planner.total_q)
    _max_q_len = Written(lambda state: state._planner.result.max_q_len)
    _max_kv_len = Written(lambda state: state._planner.result.max_kv_len)
    _batch_size = Written(lambda state: state._planner.batch.requests)
    _num_qo_heads = Written(lambda state: state._planner.options.num_q_heads)
    _num_kv_heads = Written(lambda state: state._planner.options.num_kv_heads)
    _cached_q_data_type = Written(lambda state: state._planner.options.q_dtype.torch)
    _cached_kv_data_type = Written(lambda state: state._planner.options.kv_dtype.torch)
    _cached_o_data_type = Written(lambda state: state._planner.options.out_dtype.torch)
    _qo_indptr_buf = array_of_plan(0)

    _written_at: tuple[int, dict[str, Any]] = (-1, {})  # number of the planner's plan, and what was written since
    _staging: torch.Tensor | None = None
    _module_key: Any = None  # the last plan of _cached_module: equal arguments are not checked again
    _attention: Attention
    _options: Any
    _arguments: Any

    def _written(self) -> dict[str, Any]:
        generation = self._planner.generation
        if self._written_at[0] != generation:
            self._written_at = generation, {}
        return self._written_at[1]

    # ---------------------------------------------------------------- planning without `plan`

    @property
    def _cached_module(self) -> Any:
        """Plans this wrapper from host arrays; None before the first `plan`, which sets all that these arrays leave
        open."""
        return PlanModule(self) if self._planner.active else None

    @property
    def _plan_info(self) -> PlanInfo | None:
        """The present plan as numbers; runs use the plan itself, so another plan cannot be put in its place."""
        return PlanInfo.of(self._planner) if self._planner.is_planned else None

    @_plan_info.setter
    def _plan_info(self, info: Any) -> None:
        if info is None:
            self._planner.invalidate()
        elif tuple(info) != self._plan_info:
            raise PlanError("_plan_info is of a plan that is gone: write the result of the last _cached_module.plan.")

    def _variant_to_plan(self, written: dict[str, Any], batch: int) -> tuple[Any, bool | None]:
        """The variant that `_cached_module` plans with, and causal if the variant decides it."""
        return self._planner.options.variant, None

    def _check_planned(self) -> None:
        """Checks a plan through `_cached_module` for what `plan` would have checked after the planner."""

    def _copy_items(self) -> None:
        """Copies the arrays of multi-item scoring to where captured launches read them."""

    # ---------------------------------------------------------------- workspaces

    @property
    def _float_workspace_buffer(self) -> torch.Tensor:
        return self._planner.workspaces.float_buffer

    @property
    def _int_workspace_buffer(self) -> torch.Tensor:
        return self._planner.workspaces.int_buffer

    @_int_workspace_buffer.setter
    def _int_workspace_buffer(self, buffer: torch.Tensor) -> None:
        self._planner.use_int_buffer(buffer)

    @property
    def _pin_memory_int_workspace_buffer(self) -> torch.Tensor:
        """Host memory that engines pass on; plans are staged in the wrapper's own ring, which needs no waiting."""
        if self._staging is None:
            self._staging = torch.empty(0, dtype=torch.uint8, device="cpu")
        return self._staging

    @_pin_memory_int_workspace_buffer.setter
    def _pin_memory_int_workspace_buffer(self, buffer: torch.Tensor) -> None:
        name = "_pin_memory_int_workspace_buffer"
        checks.same_device(checks.tensor(buffer, name, PlanError), torch.device("cpu"), name, PlanError)
        self._staging = buffer

    # ---------------------------------------------------------------- graph buffers

    @property
    def _custom_mask_buf(self) -> torch.Tensor | None:
        mask = self._planner.mask
        return mask.tensor if mask.buffer is None else mask.buffer

    def _graph_buffer(self, attribute: str) -> torch.Tensor | None:
        name = attribute[1:]
        if (
            name == "qo_indptr_buf" and name not in self._graph_buffers
        ):  # decode: every request has the same number of rows
            fixed = self._planner.batch.fixed_requests
            assert fixed is not None
            rows = self._planner.options.uniform_q_len if self._planner.active else 1
            numbers = torch.arange(fixed + 1, dtype=torch.int32, device=self.device) * rows
            self._graph_buffers[name] = numbers
        return self._graph_buffers.get(name)

    @property
    def _has_graph_buffers(self) -> bool:
        """Whether the constructor got the batch's arrays, which fix its size."""
        return self._planner.is_graph and self._planner.capacity is None

    def _take_graph_buffers(self, capacity: Capacity | None, **buffers: torch.Tensor | None) -> None:
        """Buffers by the constructor's names, which may end in "_buf" or "_buffer"."""
        self._graph_buffers = {
            name.removesuffix("fer").removesuffix("_buf") + "_buf": buffer for name, buffer in buffers.items()
        }
        take_graph_buffers(self._attention, capacity, buffers)


class PagedState(Prewarmed):
    """EngineState's attributes, and those of K and V in pages."""

    _paged_kv_indptr_buf = array_of_plan(1)
    _paged_kv_last_page_len_buf = array_of_plan(2)
    _paged_kv_indices_buf = Buffer(lambda state: state._planner.indices.as_int32())
    _block_tables = Written(lambda state: state._planner.block_tables)
