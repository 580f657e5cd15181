"""The base of FlashInfer's plan/run classes: they turn arguments into options, plan and run an Attention with them, and
carry the private names that engines read and write."""

from __future__ import annotations

from typing import Any

import torch

from ..base import checks
from ..kernels.options import Options, RunOptions, check_window, checked_values
from .base import PAGED, Attention
from .engine_access.attributes import EngineState
from .plan_arguments import Arguments


class _Value:
    """An option that engines read and write as the wrapper's attribute; runs take all of them as one tuple."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._field = name[1:]

    def __get__(self, wrapper: Adapter, owner: type) -> Any:
        return getattr(wrapper._now, self._field)

    def __set__(self, wrapper: Adapter, value: Any) -> None:
        wrapper._now = wrapper._now._replace(**{self._field: value})


class Adapter(EngineState):
    """One thread at a time makes a wrapper's plans; any thread may run them, one at a time on one stream."""

    _length_names = PAGED  # the caller's names
    _attention_class = Attention

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
        self._attention = self._attention_class(
            float_workspace_buffer,
            kv_layout,
            is_graph=checks.flag("use_cuda_graph", use_cuda_graph),
            names=self._length_names,
            owner=type(self).__name__,
        )
        self._planner = self._attention.session
        self.device = self._attention.device
        self._arguments: Arguments | None = None  # of the last plan: equal arguments are not checked again
        self._options: Options
        self._planned = self._now = self._attention.values

    @property
    def resolved_backend(self) -> str:
        """The name of the kernel of the present plan; names of two kernels are joined by " + "."""
        return self._attention.resolved_backend

    @property
    def last_plan(self) -> Any:
        """The Plan of the last run, or a newer one: work_items(), explain(), to_svg(path)."""
        return self._attention.last_plan

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        """Takes other workspaces; call plan again before the next run."""
        self._attention.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether runs may be captured and replayed after later plans."""
        return self._planner.is_graph

    def _check(self, arguments: Arguments) -> None:
        """Takes arguments that differ from the last plan's, on the host or on the device."""
        self._arguments = None
        self._planner.invalidate()
        self._options, self._planned = arguments.checked()
        self._arguments = arguments

    def _take_values(self, **changed: Any) -> None:
        """Sets the attributes for this run and later ones, defaults included, as FlashInfer's `forward` does."""
        if changed.get("pos_encoding_mode") is None:
            changed["pos_encoding_mode"] = self._pos_encoding_mode
        self._now = checked_values(self._now, **changed)

    def _values(self, window_left: int | None) -> RunOptions:
        """The options of this run."""
        if window_left.__class__ is not int:
            window_left = None if window_left is None else check_window(window_left)
        return self._now if window_left is None else self._now._replace(window_left=window_left)

    def end_forward(self) -> None:
        """Does nothing: a plan needs no end."""
