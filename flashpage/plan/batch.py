"""The batch that a session hands down to its option plans, and the memory and streams that it is planned for."""

from __future__ import annotations

import ctypes

import torch

from .. import native
from ..kernels import devices
from .capacity import Capacity
from .device_lengths import TableLengths
from .lengths import HeldLengths
from .mixed_batch import Fork
from .page_indices import MaskBits
from .prepared_kernels import Prepared
from .workspaces import Workspaces


class Batch:
    """One object a session, filled again at every plan: a new one each time would cost the plan a microsecond."""

    __slots__ = (
        *("capacity", "card", "device", "device_index", "fork", "generation", "held", "is_graph", "lengths", "mask"),
        *("most_rows", "names", "problem", "problem_address", "problem_of", "rows", "stream", "tables", "workspaces"),
    )

    def __init__(
        self, device: torch.device, is_graph: bool, names: tuple[str, str, str, str], workspaces: Workspaces
    ) -> None:
        self.device, self.is_graph, self.workspaces = device, is_graph, workspaces
        self.device_index = -1 if device.type == "cpu" else device.index
        self.card = devices.of(device)
        self.names = names  # the caller's words for the arrays of lengths
        self.capacity: Capacity | None = None  # graph mode: of all batches; None: buffers fix the batch
        self.fork = Fork(self.device_index)
        self.mask = MaskBits(device)
        self.problem = native.ProblemStruct()
        self.problem_address = ctypes.addressof(self.problem)
        self.problem_of: Prepared | None = None  # whose options the struct holds
        self.held = HeldLengths(self.problem, names)
        self.lengths = self.held.struct
        self.tables: TableLengths | None = None  # where the device plans
        self.generation = 0  # of the session's plan that this batch belongs to
        self.rows = self.most_rows = 0  # of q; the latter: of all of a graph's plans
        self.stream = 0

    @property
    def requests(self) -> int:
        """Requests of the batch; where only the device knows how many, the most."""
        return self.problem.batch if self.tables is None else self.tables.batch
