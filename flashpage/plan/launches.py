"""The launches of a run as a list: which kernels run in which order, and their arguments. fp_run executes it
(csrc/cuda/launch.cpp)."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from .. import native

if TYPE_CHECKING:
    from ..jit.loader import LoadedKernel
    from .mixed_batch import Part
    from .prepared_kernels import PreparedKernels


class Addresses(NamedTuple):
    """Addresses of the structs of one part's attention launch and merge."""

    params: int
    merge: int
    boxes: int | None


class LaunchList:
    """The list. A kernel that finds mask tiles, copies K and V or rotates q and K comes before the attention kernel
    that reads them; a merge comes after its attention kernel.

    Two parts of a batch run at the same time, on two streams: on one stream the second would not begin before the first
    ends, not even as a dependent launch with its own SMs. The first part is launched first, so that whole SMs are free
    for all its CTAs. Neither attention kernel is then a dependent launch, since both wait for an event.
    """

    __slots__ = ("_variant", "args", "attentions")

    def __init__(self, variant: int | None = None) -> None:
        self.args = native.RunArgs()
        self.attentions: list[native.RunLaunch] = []  # the rows of the attention kernels, one for each part
        self._variant = variant

    def clear(self) -> None:
        """Removes all launches."""
        self.args.count = 0
        self.attentions = []

    def add_ahead(self, kernel: LoadedKernel, params: int) -> None:
        """Adds a kernel with as many CTAs as are resident, for whose result the attention kernel waits."""
        ctas = kernel.info.ctas_per_sm * kernel.info.num_sms
        self._add(native.RunLaunch(kernel.handle, params, self._variant, None, None, ctas, 0, True, False))

    def add_parts(
        self, parts: Sequence[Part], structs: Iterable[Addresses], mask_tiles: int | None, fork: int | None
    ) -> None:
        """Adds the attention kernels and merges of a plan; with two parts on a card, the first runs on a second
        stream."""
        are_two = len(parts) > 1
        self.args.fork = fork if are_two else None
        for part, (params, merge, boxes) in zip(parts, structs, strict=True):
            prepared, is_aside = part.prepared, are_two and part is parts[0]
            grid = part.num_ctas * prepared.choice.spec.ctas
            given = (prepared.attention.handle, params, self._variant, boxes, mask_tiles, grid, part.cluster_size)
            self.attentions.append(self._add(native.RunLaunch(*given, not are_two, is_aside)))
            if merge_ctas := _merge_ctas(prepared, part.num_merges):
                self._add(native.RunLaunch(prepared.merge, merge, None, None, None, merge_ctas, 0, True, is_aside))
        if parts[0].num_ctas == 0:
            self.clear()

    def _add(self, launch: native.RunLaunch) -> native.RunLaunch:
        """A launch's row in the list."""
        rows, i = self.args.launches, self.args.count
        rows[i] = launch
        self.args.count = i + 1
        row: native.RunLaunch = rows[i]
        return row

    def run(self, stream: int) -> None:
        """Runs the launches now."""
        self.args.stream = stream
        native.check(native.load().fp_run(ctypes.addressof(self.args)))


def _merge_ctas(prepared: PreparedKernels, num_merges: int) -> int:
    """CTAs of the merge's launch; 0: no merge is needed."""
    if prepared.merge is None:
        return 0
    return min(num_merges * prepared.merge_ctas, prepared.most_merge_ctas)
