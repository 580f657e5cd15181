"""Plans the steps of a group of layers from vLLM's CommonAttentionMetadata.

Which plans a step gets:

- one row for each request: from the lengths on the device, so that the host needs none, and a captured step can be
  replayed for the next lengths;
- other rows, if the host knows all lengths exactly: one plan on the host, in which requests of few rows and of many run
  at the same time (plan/mixed_batch.py). Kernels read vLLM's block table in place;
- other rows else: the first requests (decodes, or drafts that are verified) and the rest are planned from the lengths
  on the device, and run one after the other;
- requests with rows of an image, whose tokens see each other (image_ranges.py), and those after them have a mask. The
  requests before them, decodes first, are planned as above;
- rows that see a window of the tokens after their prompt (reference_windows.py) have a mask in every step;
- an encoder's rows, a prefix that all requests share (cascade.py) and tokens of several ranks (context_parallel.py)
  have parts of their own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ....base.errors import CapabilityError
from ....plan.lengths import Lengths
from ....plan.page_indices import NO_PAGES
from ...plugin.group_plans import MOST_TOKENS, GroupPlans, TableRows, Use
from ...plugin.parts import PagedRows, Part, RaggedRows
from ...plugin.prebuild import prebuild
from . import cascade, context_parallel
from .causal_flags import CausalFlags
from .image_ranges import ImageRanges
from .plan_streams import PlanStreams
from .reference_windows import ReferenceWindows
from .step import Step


class GroupPlanner:
    """Makes the plans of a group; each step replaces the plans of the step before."""

    def __init__(
        self,
        plans: GroupPlans,
        ranks: context_parallel.Ranks | None = None,
        flags: CausalFlags | None = None,
        streams: PlanStreams | None = None,
        images: ImageRanges | None = None,
        prompts: ReferenceWindows | None = None,
    ) -> None:
        self._streams, self._number = streams, 0 if streams is None else streams.add()
        self.plans, self.sizes, self.device, self._flags = plans, plans.sizes, plans.device, flags
        self._images, self._prompts = images, prompts
        self._context = None if ranks is None else context_parallel.ContextPlans(plans, ranks)
        windows = [layer.values[0].window_left + 1 for layer in plans.layers if layer.values[0].window_left >= 0]
        self._least_window = min(windows, default=0)

    def prebuild(self) -> None:
        """Builds all kernels that later steps may need."""
        if self._context is not None:
            prebuild(self.plans, self._context.uses)
            prebuild(self._context.gathered, (Use.DECODE, Use.ROWS))
        else:
            has_mask = any(given is not None for given in (self._flags, self._images, self._prompts))
            rows = (Use.DECODE, Use.ROWS, Use.MASKED) if has_mask else (Use.DECODE, Use.ROWS)
            prebuild(self.plans, (Use.RAGGED,) if self.plans.is_encoder else rows)

    def plan(self, common: Any, common_prefix_len: int = 0) -> Step:
        """Plans a step. `common_prefix_len`: tokens that all requests share, a multiple of the page size."""
        if self._streams is None:
            parts, plan_again = self._parts(common, common_prefix_len)
        else:
            make = functools.partial(self._parts, common, common_prefix_len)
            parts, plan_again = self._streams.plan(self._number, make)
        return Step(common.num_actual_tokens, common.slot_mapping, parts, common, plan_again)

    def _parts(self, common: Any, common_prefix_len: int) -> tuple[tuple[Part, ...], Callable[[], object] | None]:
        requests, rows, sizes = common.num_reqs, common.num_actual_tokens, self.sizes
        if self.plans.is_encoder:
            return (self._ragged(common),), None
        plan: Callable[[], Part]
        is_few = sizes.captures_all or common.max_query_len <= sizes.few_rows
        in_graph = is_few and _is_within(rows, sizes.graph_rows)
        if self._prompts is not None:
            self._prompts.take(common.rswa_prefix_lens)
            use = Use.MASKED_IN_GRAPH if in_graph else Use.MASKED
            plan = functools.partial(self._rows, use, common, (0, requests), rows, False)
            return (plan(),), plan
        has_flags = isinstance(common.causal, torch.Tensor)
        if has_flags and (in_graph or common.max_query_len > 1):
            use = Use.MASKED_IN_GRAPH if in_graph else Use.MASKED
            plan = functools.partial(self._flagged, use, common, requests, rows)
            return (plan(),), plan
        is_causal = has_flags or self._is_causal(common)  # a request's only row sees all of its tokens
        # No captured step has an image: see FlashpageBuilder.get_cudagraph_support.
        first = self._images.take(common, self._bounds(common)) if self._images is not None and is_causal else None
        if first is not None:
            return self._with_images(common, first), None
        if self._context is not None:
            part, plan_again = self._context.plan(common, is_causal)
            return (part,), plan_again
        if common_prefix_len:
            return (cascade.plan(self.plans, common, common_prefix_len),), None
        # A step must get the plan that captured steps of its size read, whatever its own rows.
        if in_graph:
            plan = functools.partial(self._rows, Use.ROWS_IN_GRAPH, common, (0, requests), rows, is_causal)
            return (plan(),), plan
        # Requests without rows are padding after the others, unless the host knows better.
        if common.max_query_len <= 1 and (rows >= requests or int(common.query_start_loc_cpu[rows]) == rows):
            use = Use.DECODE_IN_GRAPH if _is_within(requests, sizes.graph_requests) else Use.DECODE
            plan = functools.partial(self._decode, use, common, requests)
            return (plan(),), plan
        return self._any_rows(common, requests, is_causal), None

    def _is_causal(self, common: Any) -> bool:
        is_causal, window = bool(common.causal), self._least_window
        # A row that is not causal sees all later tokens of its request, at most max_query_len - 1.
        if not is_causal and 0 < window < common.max_query_len:
            raise CapabilityError(
                f"a request has {common.max_query_len} rows that see later tokens too, and a window of {window} "
                "tokens. Draft fewer tokens."
            )
        return is_causal

    def _host_lengths(self, common: Any) -> torch.Tensor | None:
        """The tokens of each request on the host, if they are exact there and a plan on the host can count their
        pages."""
        if not self.sizes.has_exact_lengths:
            return None
        tables = common.block_table_tensor[: common.num_reqs]
        return self._bounds(common) if tables.numel() * self.sizes.page_size < MOST_TOKENS else None

    def _bounds(self, common: Any) -> torch.Tensor | None:
        """The most tokens of each request on the host, exact without drafts and for prompts. vLLM 0.26 makes the steps
        of cross attention and of attention in chunks from the decoder's: there the bound is still the decoder's, and
        another field is right, which newer versions may lack."""
        if self.device.type == "cpu":
            lens: torch.Tensor | None = common.seq_lens
        else:
            lens = getattr(common, "_seq_lens_cpu", None)
            lens = common.seq_lens_cpu_upper_bound if lens is None else lens
        return lens

    # ---------------------------------------------------------------- parts

    def _decode(self, use: Use, common: Any, requests: int) -> PagedRows:
        """One row for each of the first requests; being the last one, it sees all tokens."""
        tables = TableRows(
            _first(common.seq_lens, requests), _first(common.block_table_tensor, requests), None, requests
        )
        return PagedRows(self.plans.plan_tables(use, tables, False), requests, False)

    def _rows(self, use: Use, common: Any, requests: tuple[int, int], end: int, is_causal: bool) -> PagedRows:
        """The rows of requests [begin, end), numbered as in the whole step; `end`: of the rows."""
        first, last = requests
        tables = TableRows(
            common.seq_lens[first:last],
            common.block_table_tensor[first:last],
            common.query_start_loc[first : last + 1],
            end,
        )
        return PagedRows(self.plans.plan_tables(use, tables, is_causal), end, is_causal)

    def _flagged(self, use: Use, common: Any, requests: int, end: int) -> PagedRows:
        """All rows; a flag for each request says whether they are causal."""
        if self._flags is None:
            raise CapabilityError(
                "causal differs between the requests of a step, which flashpage plans for diffusion models alone. "
                "Choose another attention backend."
            )
        self._flags.take(common.causal[:requests])
        return self._rows(use, common, (0, requests), end, False)

    def _with_images(self, common: Any, first: int) -> tuple[Part, ...]:
        """A mask for the requests from `first` on, which image_ranges.py numbers from there."""
        requests, starts, lens = (first, common.num_reqs), common.query_start_loc_cpu, self._host_lengths(common)
        if lens is None:
            masked = self._rows(Use.MASKED, common, requests, common.num_actual_tokens, False)
        else:
            masked = self._on_host(Use.MASKED, common, lens, requests, False)
        if bool((starts[1 : first + 1] - starts[:first] == 1).all()):
            return (self._decode(Use.DECODE, common, first), masked) if first else (masked,)
        return *self._any_rows(common, first, True), masked

    def _any_rows(self, common: Any, requests: int, is_causal: bool) -> tuple[Part, ...]:
        """The rows of the first requests."""
        lens = self._host_lengths(common)
        if lens is not None:
            return (self._on_host(Use.ROWS, common, lens, (0, requests), is_causal),)
        return self._apart(common, requests, is_causal)

    def _on_host(
        self, use: Use, common: Any, lens: torch.Tensor, requests: tuple[int, int], is_causal: bool
    ) -> PagedRows:
        """The rows of requests [begin, end)."""
        first, last = requests
        starts, tables = common.query_start_loc_cpu[first : last + 1], common.block_table_tensor[first:last]
        begin = int(starts[0]) if first else 0
        own_starts = starts - begin if begin else starts
        attentions = self.plans.plan_on_host(own_starts, lens[first:last], tables, is_causal, use)
        return PagedRows(attentions, _end_of(common, last), is_causal, begin)

    def _apart(self, common: Any, requests: int, is_causal: bool) -> tuple[Part, ...]:
        """The first requests, of few rows each, and the others."""
        starts = common.query_start_loc_cpu
        counts = starts[1 : requests + 1] - starts[:requests]
        is_many = counts > self.sizes.few_rows
        few = int(is_many.int().argmax()) if bool(is_many.any()) else requests
        parts: list[Part] = []
        if few and bool((counts[:few] == 1).all()):
            parts.append(self._decode(Use.DECODE, common, few))
        elif few:
            parts.append(self._rows(Use.FEW_ROWS, common, (0, few), int(starts[few]), is_causal))
        if few < requests:
            parts.append(self._rows(Use.ROWS, common, (few, requests), _end_of(common, requests), is_causal))
        return tuple(parts)

    def _ragged(self, common: Any) -> RaggedRows:
        """An encoder's rows, whose numbers the host knows, over their own K and V."""
        indptr = common.query_start_loc_cpu[: common.num_reqs + 1]
        attentions = self.plans.of(Use.RAGGED)
        for kind, attention in attentions.items():
            attention.plan(Lengths(indptr, indptr), NO_PAGES, *self.plans.options(Use.RAGGED, kind, False))
        return RaggedRows(attentions, int(indptr[-1]), False)


def _is_within(count: int, captured: int) -> bool:
    """Whether captured steps may have so many requests or rows; `captured`: the most of them, 0 without graphs."""
    return 0 < captured >= count


def _end_of(common: Any, requests: int) -> int:
    """Where the rows of the first requests end; those of all requests with the rows that pad a step."""
    return int(common.num_actual_tokens if requests == common.num_reqs else common.query_start_loc_cpu[requests])


def _first(rows: torch.Tensor, count: int) -> torch.Tensor:
    """The first rows; all of them as they are, since a view takes a tenth of a step's plan."""
    return rows if rows.shape[0] == count else rows[:count]
