"""Chooses the kernels for a set of options, compiles or finds them, loads them and makes their schedule."""

from __future__ import annotations

import copy
import ctypes
import dataclasses

import torch

from .. import jit, native, variants
from ..base import tensor_memory
from ..base.errors import KernelMissingError, PlanError, RunError, VariantError
from ..base.log import LOGGER
from ..kernels import choose, helpers, schedules
from ..kernels.context_classes import ContextClass
from ..kernels.options import Options
from ..kernels.spec import KernelSpec
from ..kernels.tile import MERGE_COLUMNS
from ..kernels.work import Problem
from ..native import fastcall
from . import gather_rows

CPU_CTAS_PER_THREAD = 4  # small shares, so that threads that start late still find work
# Units of more rounds (merge_rounds of include/flashpage/plan/work_item.h) are merged by the merge kernel even if the
# attention launch merges others: one CTA takes as long for them as the additional launch.
MOST_MERGE_ROUNDS = 8
MERGE_CTAS_PER_SM = 4  # merges have little to do; more CTAs than are resident only add launch work


class PreparedKernels:
    """The loaded kernels and the schedule of one set of options on one device, for one class of rows. Shared by
    threads.

    `fixed_for`: requests and rows of a graph's largest batch, whose launches all have one shape; None: each launch has
    the shape of its plan. `gathers`: the attention kernel reads copies that another kernel makes, and
    `attention_options` describe them.
    """

    __slots__ = (
        "_on_eight",
        "attention",
        "attention_options",
        "choice",
        "cluster_size",
        "gather_rows",
        "mask_tiles",
        "merge",
        "merge_ctas",
        "most_merge_ctas",
        "most_merge_rounds",
        "options",
        "problem",
        "schedule",
        "schedule_address",
    )

    def __init__(
        self,
        options: Options,
        packed_rows: int,
        device: torch.device,
        has_known_lengths: bool = True,
        contexts: ContextClass = ContextClass.USUAL,
        fixed_for: tuple[int, int] | None = None,
        gathers: bool = False,
    ) -> None:
        self.options = options
        self.problem = Problem(options, packed_rows, has_known_lengths=has_known_lengths, contexts=contexts)
        self.attention_options = gather_rows.as_rows(options) if gathers else options
        problem = dataclasses.replace(self.problem, options=self.attention_options)
        self.choice = choose.choose(problem, device, trace(options, 1.0, device).spec)
        if gathers:
            self.choice = dataclasses.replace(self.choice, reasons=(*self.choice.reasons, gather_rows.note_of(options)))
        LOGGER.info("chose %s on %s: %s", self.choice.spec.name, device, "; ".join(self.choice.reasons))
        self.attention = jit.get_kernel(self.choice.spec, device)
        self.mask_tiles = self.gather_rows = None
        if device.type == "cuda":
            if gathers:
                self.gather_rows = jit.get_kernel(gather_rows.spec_of(options), device)
            if (spec := mask_tiles_spec(self.choice, options)) is not None:
                self.mask_tiles = jit.get_kernel(spec, device)
            num_ctas = schedules.resident_ctas(self.attention.info, self.choice.card) // self.choice.spec.ctas
        else:
            num_ctas = native.load().fp_cpu_threads() * CPU_CTAS_PER_THREAD
        clusters = schedules.Clusters.of(self.attention.info, self.choice.card)
        self.schedule = schedules.schedule(self.choice, options, num_ctas, clusters)
        self.most_merge_rounds = MOST_MERGE_ROUNDS if self._leaves_merges(device) else 0
        self.merge, self.most_merge_ctas = self._find_merge(device)
        rows, columns = self.schedule.merge_rows, options.head_dim_vo
        self.merge_ctas = rows * -(-columns // MERGE_COLUMNS)  # of an item, if each row has one
        self.cluster_size = 0  # of launches of one shape
        if fixed_for is not None:
            units = schedules.most_units(options, self.schedule.tile_q, *fixed_for)
            self.schedule, self.cluster_size = schedules.with_one_cluster_size(self.schedule, units)
        self.schedule_address = ctypes.addressof(self.schedule)
        self._on_eight: PreparedKernels | None = None

    @property
    def has_on_eight(self) -> bool:
        return self.gather_rows is not None or self.choice.kernel.on_eight(self.choice.spec) is not None

    def on_eight(self, device: torch.device) -> PreparedKernels:
        """For rows of formats with scales that start on 8 bytes, if there is a kernel for such (has_on_eight). A copy's
        rows start on 16, and the kernel that copies reads words of 4."""
        if self.gather_rows is not None:
            return self
        spec = self.choice.kernel.on_eight(self.choice.spec)
        if spec is None:
            raise RunError(
                f"{self.choice.spec.kernel} reads rows that start on 16 bytes, and those of this cache do not: pass K "
                "and V that start on 16 bytes and whose strides are multiples of it, such as copies by .clone()."
            )
        if spec == self.choice.spec:
            return self
        if self._on_eight is None:
            found = copy.copy(self)
            found.choice, found.attention = dataclasses.replace(self.choice, spec=spec), jit.get_kernel(spec, device)
            self._on_eight = found
        return self._on_eight

    def merges_after(self, result: native.PlanResult) -> int:
        """Merges of a plan for a launch after the attention kernel."""
        is_merged = result.cluster_size and self.attention.info.cluster_rows  # by the clusters
        return 0 if is_merged or result.most_merge_rounds <= self.most_merge_rounds else result.num_merges

    def _leaves_merges(self, device: torch.device) -> bool:
        """Whether the attention launch merges units itself, except those of many pieces, and the options have such:
        with few KV heads or many rows, or with pieces of a fixed length."""
        if device.type != "cuda" or not self.choice.kernel.merges_in_launch:
            return False
        options, schedule = self.options, self.schedule
        rows = min(options.uniform_q_len * options.group_size or schedule.tile_q, schedule.tile_q)
        most_pieces = schedule.num_ctas // options.num_kv_heads
        rounds = native.load().fp_merge_rounds(most_pieces, rows * schedule.row_jobs)
        return options.fixed_piece_tokens > 0 or rounds > MOST_MERGE_ROUNDS

    def _find_merge(self, device: torch.device) -> tuple[int | None, int]:
        """The kernel that merges after the attention launch, None if that launch merges all units itself; and its
        largest number of CTAs."""
        if self.choice.kernel.merges_in_launch and not self.most_merge_rounds:
            return None, 0
        out_dtype = self.options.out_dtype
        if device.type == "cpu":
            return native.check_handle(native.load().fp_cpu_merge_kernel(out_dtype.host_code)), 1
        merge = jit.get_kernel(helpers.merge_spec(out_dtype, self.options.head_dim_vo), device)
        return merge.handle, MERGE_CTAS_PER_SM * self.choice.card.sms


def prepare(
    options: Options,
    packed_rows: int,
    device: torch.device,
    has_known_lengths: bool,
    contexts: ContextClass,
    fixed_for: tuple[int, int] | None,
    gathers: bool,
) -> PreparedKernels:
    """The kernels for a class of contexts; the usual ones if the class has a tile that is not built and cannot be
    compiled here."""
    try:
        return PreparedKernels(options, packed_rows, device, has_known_lengths, contexts, fixed_for, gathers)
    except KernelMissingError as error:
        if contexts is ContextClass.USUAL:
            raise
        LOGGER.info("uses the usual tile in place of that of class %s: %s", contexts.name, error)
    return prepare(options, packed_rows, device, has_known_lengths, ContextClass.USUAL, fixed_for, gathers)


def mask_tiles_spec(choice: choose.KernelChoice, options: Options) -> KernelSpec | None:
    """The kernel that finds the tiles of a mask before the attention kernel; None: no tiles are needed."""
    spec = choice.spec
    if spec.mask_source == "implicit" or not choice.kernel.visits_mask_tiles(options):
        return None
    if spec.mask_source == "packed_bits":
        return KernelSpec("mask_tiles", mask_source="packed_bits")
    variant = dataclasses.replace(spec.variant, logit="")
    return KernelSpec("mask_tiles", mask_source="function", tile=spec.tile, variant=variant)


_slopes: dict[tuple[torch.device, int], torch.Tensor] = {}  # never freed: captured launches read them


def _slopes_on(device: torch.device, num_heads: int) -> torch.Tensor:
    """The slopes' tensor, one for all plans and threads."""
    found = _slopes.get((device, num_heads))
    return (
        found
        if found is not None
        else _slopes.setdefault((device, num_heads), variants.alibi_slopes(num_heads).to(device))
    )


def trace(options: Options, soft_cap: float, device: torch.device) -> variants.TracedVariant:
    """The built-in transforms and the user's as one variant: slopes, then cap, then the user's."""
    has_alibi = options.position_encoding == "ALIBI"
    slopes = _slopes_on(device, options.num_q_heads) if has_alibi else None
    traced = variants.builtin(soft_cap if options.has_soft_cap else None, slopes)
    if options.variant is not None:
        traced = variants.compose(traced, options.variant.traced())
    for (name, _, _), tensor in zip(traced.spec.tensors, traced.tensors, strict=True):
        if tensor.device != device:
            raise PlanError(
                f"variant captures {name} on {tensor.device} but the work is on {device}: move it with .to('{device}')."
            )
    return traced


def fill_variant(arguments: native.VariantArgs, traced: variants.TracedVariant) -> None:
    """Pointers, strides and numbers that a variant captured; the caller keeps `traced` alive."""
    if fastcall.builtins().judge(*traced.tensors):  # it found one that C cannot read, or not safely
        for (name, *_), tensor in zip(traced.spec.tensors, traced.tensors, strict=True):
            tensor_memory.address(tensor, f"captured tensor {name!r}", VariantError)
    for i, tensor in enumerate(traced.tensors):
        arguments.tensors[i].data = tensor.data_ptr()
        for axis in range(tensor.dim()):
            arguments.tensors[i].stride[axis] = tensor.stride(axis)
    for i, number in enumerate(traced.scalars):
        arguments.scalars[i] = number
