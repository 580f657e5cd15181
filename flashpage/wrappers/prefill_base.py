"""The base of the paged and the ragged prefill wrapper."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..base import env
from ..base.errors import PlanError
from ..plan.batch import Longest
from ..plan.lengths import Given, batch_of
from ..plan.page_indices import GivenPages, Mask
from ..variants.multi_item import NO_ITEMS, ItemArguments, MultiItemMask
from .adapter import Adapter
from .engine_access.attributes import Buffer, Written
from .plan_arguments import PrefillArguments

# In the order of ItemArguments.
_ITEM_ATTRIBUTES = ("_prefix_len_ptr", "_token_pos_in_items_ptr", "_token_pos_in_items_len", "_max_item_len_ptr")


class PrefillWrapper(Adapter):
    """The base of the paged and the ragged prefill wrapper."""

    _prefix_len_ptr = Written(lambda state: state._items_of_plan().prefix_len)
    _token_pos_in_items_ptr = Written(lambda state: state._items_of_plan().token_pos)
    _token_pos_in_items_len = Written(lambda state: state._items_of_plan().token_pos_len)
    _max_item_len_ptr = Written(lambda state: state._items_of_plan().max_item_len)
    _mask_indptr_buf = Buffer(lambda state: state._mask_indptr())

    def _masks(self, custom_mask: Any, packed_custom_mask: Any, items: ItemArguments, qo_indptr: torch.Tensor) -> Any:
        """The variant of multi-item scoring, None without; checks that only one mask is given."""
        if (custom_mask is not None) + (packed_custom_mask is not None) + items.is_given() > 1:
            raise PlanError(
                "custom_mask, packed_custom_mask and prefix_len_ptr (multi-item scoring) are masks: pass one of them."
            )
        return self._multi_item.set(items, batch_of(qo_indptr, "qo_indptr")) if items.is_given() else None

    _rows_written: int | None = None

    @property
    def _max_total_num_rows(self) -> int | None:
        """Graph mode: rows of the first plan, and so of captured launches, or the number that an engine wrote."""
        return self._rows_written if self._planner.most_rows is None else self._planner.most_rows

    @_max_total_num_rows.setter
    def _max_total_num_rows(self, rows: int | None) -> None:
        self._rows_written = self._planner.most_rows = rows

    @functools.cached_property
    def _multi_item(self) -> MultiItemMask:
        session, fixed = self._planner, self._planner.batch.fixed_requests
        most = session.capacity.batch if session.capacity is not None else fixed
        return MultiItemMask(self.device, most if session.is_graph else None)

    def _plan(
        self, arguments: tuple[Any, ...], lengths: Given, pages: GivenPages, mask: Mask | None, longest: Longest
    ) -> None:
        """`arguments`: the entries of PrefillArguments."""
        try:
            is_new = arguments != self._arguments
        except (RuntimeError, ValueError):  # for example an array, which is refused when it is checked
            is_new = True
        if is_new:
            self._check(PrefillArguments(*arguments))
        self._now = self._planned
        if mask is not None and self._planner.is_graph:
            self._check_mask_indptr(lengths[0])
        self._attention.plan(lengths, pages, self._options, self._now, mask, longest)
        if "_multi_item" in self.__dict__:
            self._copy_items()
        if mask is not None and self._planner.is_graph:
            self._fill_mask_indptr(pages[2])

    # ---------------------------------------------------------------- what engines write (engine_access/attributes.py)

    def _mask_indptr(self) -> torch.Tensor | None:
        """Where each request's bytes begin in the packed mask, [batch + 1], int32 on the device."""
        if not self._planner.options.has_mask:
            return None
        ends = ((self._planner.bits() + 7) // 8).cumsum(0)
        return torch.cat([ends.new_zeros(1), ends]).to(self.device, torch.int32)

    def _check_mask_indptr(self, q_indptr: torch.Tensor | None) -> None:
        """Before the plan, which captured launches see."""
        buffer = self._graph_buffers["mask_indptr_buf"]
        needed = batch_of(q_indptr, "qo_indptr") + 1
        if buffer is not None and buffer.numel() < needed:
            self._planner.invalidate()
            raise PlanError(f"mask_indptr_buf has {buffer.numel()} entries: pass [{needed}], batch + 1.")

    def _fill_mask_indptr(self, non_blocking: bool) -> None:
        buffer, numbers = self._graph_buffers["mask_indptr_buf"], self._mask_indptr()
        if buffer is not None and numbers is not None:
            buffer[: numbers.numel()].copy_(numbers, non_blocking=non_blocking)

    def _copy_items(self) -> None:
        if self._options.variant is self._multi_item.variant:
            self._multi_item.copy()
        else:
            self._multi_item.given = NO_ITEMS

    def _items_of_plan(self) -> ItemArguments:
        items = self._multi_item
        is_used = items.variant is not None and items.variant is self._planner.options.variant
        return items.given if is_used else NO_ITEMS

    def _variant_to_plan(self, written: dict[str, Any], batch: int) -> tuple[Any, bool | None]:
        planned, before = self._planner.options, self._items_of_plan()
        items = ItemArguments(*(written.get(name, old) for name, old in zip(_ITEM_ATTRIBUTES, before, strict=True)))
        variant = None if planned.variant is self._multi_item.variant else planned.variant  # the user's
        if not items.is_given():
            return variant, None
        if planned.has_mask:
            raise PlanError("_prefix_len_ptr is written but the last plan had a custom mask: plan without it.")
        return only_items(self._multi_item.set(items, batch), variant), True

    def _check_planned(self) -> None:
        """A mask whose bits are already in the wrapper's buffer, where engines copy them."""
        planner = self._planner
        if not planner.options.has_mask:
            return
        there, needed = planner.mask.tensor, planner.result.mask_bytes
        if there is None or there.numel() < needed:
            held = 0 if there is None else there.numel()
            raise PlanError(f"_custom_mask_buf holds {held} bytes but the batch's mask needs {needed}: make it larger.")
        given, numbers = self._mask_indptr_buf, self._mask_indptr()
        if given is None or numbers is None or not (given.is_cpu or env.is_on("FLASHPAGE_CHECK_INDICES")):
            return
        if not torch.equal(given[: numbers.numel()].to(numbers.dtype), numbers):
            raise PlanError(
                "_mask_indptr_buf does not fit the batch's lengths: write the byte at which each request's bits begin."
            )


def only_items(items: Any, variant: Any) -> Any:
    """Multi-item scoring is a variant itself."""
    if variant is not None:
        raise PlanError("variant and prefix_len_ptr are both given: pass one of them, as multi-item scoring is a mask.")
    return items
