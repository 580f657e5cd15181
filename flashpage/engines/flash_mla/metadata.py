"""FlashMLA's metadata of a step: what all calls pass that may share a plan."""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Hashable
from typing import Any

import numpy as np
import torch
from torch.compiler import is_dynamo_compiling

from ...base import checks
from ...base.errors import CapabilityError, RunError
from ...wrappers import operators

_STEP = "flashpage_step"  # the attribute of get_mla_decoding_metadata's tensors; its value names their step
_COLUMNS = 8  # of FlashMLA's tile_scheduler_metadata
_numbers = itertools.count()
_by_number: weakref.WeakValueDictionary[int, FlashMLASchedMeta] = weakref.WeakValueDictionary()


@dataclasses.dataclass
class FlashMLASchedMeta:
    """The plan of the calls that pass it, which must have equal shapes and equal values of cache_seqlens. Each graph
    wants metadata of its own, as its first call makes the plan at every replay."""

    @dataclasses.dataclass
    class Config:
        """Shapes and options of the first call."""

        b: int
        s_q: int
        h_q: int
        page_block_size: int
        h_k: int
        causal: bool
        is_fp8_kvcache: bool
        topk: int | None = None
        extra_page_block_size: int | None = None
        extra_topk: int | None = None
        enable_batch_invariant: bool = False

    have_initialized: bool = False
    config: Config | None = None
    tile_scheduler_metadata: torch.Tensor | None = None  # get_mla_decoding_metadata's, or None; no call writes it
    num_splits: torch.Tensor | None = None  # as tile_scheduler_metadata
    step: int | None = dataclasses.field(default=None, init=False, repr=False, compare=False)  # None: see __post_init__
    handle: torch.Tensor = dataclasses.field(init=False, repr=False, compare=False)  # the step as int64 [1]

    def __post_init__(self) -> None:
        if is_dynamo_compiling():  # a number would be a constant of its code, so each run of the code makes a tensor
            self.handle = torch.ops.flashpage.flash_mla_step()
            return
        self._begin()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy of metadata that no call has used yet is a step of its own, as its first call plans in FlashMLA."""
        self.__dict__.update(state)
        if self.config is None:
            self._begin()

    def _begin(self) -> None:
        self.step = next(_numbers)
        self.handle = _handle_of(self.step)
        _by_number[self.step] = self

    @property
    def key(self) -> Hashable:
        """Equal for calls that may share a plan."""
        step: object = getattr(self.tile_scheduler_metadata, _STEP, self.step)
        return int(self.handle) if step is None else step

    def first_used(self, config: Config) -> None:
        """Keeps the shapes and options of the first call that ran; a refused call leaves none."""
        if self.config is None:
            self.config, self.have_initialized = config, True


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """Makes the `tile_scheduler_metadata` and `num_splits` that all calls of one step pass.

    Args:
        args, kwargs: accepted and not used, as in FlashMLA.
    """
    return FlashMLASchedMeta(), None


def get_mla_decoding_metadata(
    seqlens_k: torch.Tensor,
    num_q_tokens_per_head_k: int,
    h_k: int,
    h_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
    use_legacy: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Marks a new step of a FlashMLASchedMeta that is kept: assign the result to its tile_scheduler_metadata and
    num_splits. The plan is made by the first call that passes them, so that the tensors hold zeros.

    Args:
        seqlens_k: [batch] int32, tokens of each request; not read.
        num_q_tokens_per_head_k: rows of q for each KV head, at least 1.
        h_k: KV heads, 1.
        h_q: query heads.
        is_fp8_kvcache, topk, use_legacy: accepted and not used, as every call says them itself.

    Returns:
        int32 [1, 8] and [batch + 1], on the device of seqlens_k.
    """
    if is_dynamo_compiling():  # without fullgraph, torch then runs this function as it is
        raise RunError(
            "get_mla_decoding_metadata() cannot be compiled: call it outside of torch.compile, and assign its result "
            "to the metadata that the compiled function gets."
        )
    lengths = checks.tensor(seqlens_k, "seqlens_k", RunError)
    if lengths.dim() != 1 or lengths.dtype != torch.int32:
        raise RunError(f"seqlens_k has shape {tuple(lengths.shape)} and dtype {lengths.dtype}: pass int32 [batch].")
    checks.whole("num_q_tokens_per_head_k", num_q_tokens_per_head_k, 1, error=RunError)
    if checks.whole("h_k", h_k, 1, error=RunError) != 1:
        raise CapabilityError(f"h_k={h_k} is not supported: latent rows have one head, pass 1.")
    for name, value in (("h_q", h_q), ("topk", topk)):
        if value is not None:
            checks.whole(name, value, 1, error=RunError)
    checks.flag("is_fp8_kvcache", is_fp8_kvcache, RunError)
    checks.flag("use_legacy", use_legacy, RunError)
    step = object()
    # torch counts writes to tensors of this mode everywhere. It would compile a comprehension where compiled code calls
    # this function, and what compiled code returns may count as written.
    with torch.inference_mode(False):
        schedule = torch.zeros((1, _COLUMNS), dtype=torch.int32, device=lengths.device)
        splits = torch.zeros((len(lengths) + 1,), dtype=torch.int32, device=lengths.device)
    for tensor in (schedule, splits):
        setattr(tensor, _STEP, step)
    return schedule, splits


def _handle_of(step: int) -> torch.Tensor:
    return torch.from_numpy(np.array([step], np.int64))  # in a third of torch.tensor's time


def of_handle(handle: torch.Tensor) -> FlashMLASchedMeta:
    """The metadata with this handle; for one that compiled code made, or that is gone, one with an equal key."""
    found = _by_number.get(number := int(handle))
    if found is None:
        found = FlashMLASchedMeta()
        found.step = number
    return found


operators.define(
    "flash_mla_step",
    "() -> Tensor",
    lambda: _handle_of(next(_numbers)),
    lambda: torch.empty(1, dtype=torch.int64, device="cpu"),
    tags=(torch.Tag.nondeterministic_seeded, *operators.OUT_OF_GRAPHS),  # two calls have different results
    keys=("CompositeExplicitAutograd",),
)


def check_given(meta: Any, num_splits: Any) -> None:
    """Refuses what is no metadata of get_mla_metadata."""
    if not isinstance(meta, FlashMLASchedMeta):
        raise RunError(f"tile_scheduler_metadata={checks.shown(meta)}: pass the first result of get_mla_metadata().")
    if num_splits is not None:
        raise RunError(
            f"num_splits is {checks.shown(num_splits)}: leave it None, as the plan says where requests are cut."
        )


def take(meta: Any, num_splits: Any, config: FlashMLASchedMeta.Config) -> None:
    """Checks the metadata: all calls that pass it have the shapes and options of the first."""
    check_given(meta, num_splits)
    _check_assigned(meta, config.b)
    if meta.config is not None and meta.config != config:
        differ = (f.name for f in dataclasses.fields(config) if getattr(config, f.name) != getattr(meta.config, f.name))
        name = next(differ)
        raise RunError(
            f"tile_scheduler_metadata was first used with {name}={getattr(meta.config, name)}, now {name} is "
            f"{getattr(config, name)}: call get_mla_metadata() for each step."
        )


def _check_assigned(meta: FlashMLASchedMeta, batch: int) -> None:
    """Refuses tensors of another scheduler, as they would not decide where requests are cut."""
    for name, value in (("tile_scheduler_metadata", meta.tile_scheduler_metadata), ("num_splits", meta.num_splits)):
        if value is not None and (not hasattr(value, _STEP) or value._version):
            raise RunError(
                f"{name} of the metadata was written: assign get_mla_decoding_metadata's result itself, or leave it "
                "None, as flashpage has plans of its own; enable_batch_invariant=True cuts no request."
            )
    splits = meta.num_splits
    if getattr(meta.tile_scheduler_metadata, _STEP, None) is not getattr(splits, _STEP, None):
        raise RunError(
            "tile_scheduler_metadata and num_splits of the metadata are of two calls: assign both of one "
            "get_mla_decoding_metadata()."
        )
    if splits is not None and len(splits) != batch + 1:
        raise RunError(
            f"num_splits of the metadata is for {len(splits) - 1} requests but q has {batch}: call "
            "get_mla_decoding_metadata() with this step's lengths."
        )
