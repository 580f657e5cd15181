"""Multi-item scoring: many items that follow a shared prefix, each of which sees the prefix and itself, as a mask
variant."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..base import checks, env
from ..base.errors import PlanError
from ..base.memory import GrowingMemory, allocate
from .variant import Variant

# Visible are the prefix and the row's own item, which began token_pos tokens before the row. Causal, even if a run is
# not.
_MASK = (
    "logical_and(kv_idx <= q_idx, logical_or(kv_idx < prefix_len(b), "
    "q_idx - kv_idx <= token_pos(b, min(max(q_idx - prefix_len(b), 0), max_token_pos))))"
)


def is_zero(value: Any) -> bool:
    """Whether a value is the number 0; a tensor is not compared."""
    return value.__class__ is int and value == 0


class ItemArguments(NamedTuple):
    """The arguments in the form that plan takes."""

    prefix_len: Any = None  # [batch] tokens
    token_pos: Any = None  # [batch x token_pos_len], distance of each token after the prefix from its item's delimiter
    token_pos_len: Any = 0
    max_item_len: Any = None  # [batch] tokens of the longest item; kernels use the positions instead

    def is_given(self) -> bool:
        tensors = (self.prefix_len, self.token_pos, self.max_item_len)
        return not is_zero(self.token_pos_len) or any(tensor is not None for tensor in tensors)


NO_ITEMS = ItemArguments()


class MultiItemMask:
    """One variant for all plans of a wrapper; its tensors are copies of the present batch's arrays, written once the
    plan has succeeded (`copy`).

    Args:
        most_requests: graph mode: of any batch; None without graphs. Captured launches read the memory of the first
            plan, so later ones write there.
    """

    def __init__(self, device: torch.device, most_requests: int | None) -> None:
        self.device, self._most_requests = device, most_requests
        self._to_copy: dict[str, torch.Tensor] = {}
        self._memory: dict[str, GrowingMemory] = {}  # without graphs
        self.given = self._next = NO_ITEMS  # of the last plan that succeeded, and of the one being made
        self.variant: Variant | None = None
        self._check_on_device = env.is_on("FLASHPAGE_CHECK_INDICES")

    def set(self, given: ItemArguments, batch: int) -> Variant:
        prefix_len, token_pos, token_pos_len, max_item_len = given
        token_pos_len = checks.whole("token_pos_in_items_len", token_pos_len, 0)
        for name, value in (("prefix_len_ptr", prefix_len), ("token_pos_in_items_ptr", token_pos)):
            if value is None:
                raise PlanError(f"{name}=None: multi-item scoring needs prefix_len_ptr and token_pos_in_items_ptr.")
            checks.tensor(value, name, PlanError)
        if token_pos_len == 0 and batch == 1:
            token_pos_len = token_pos.numel()
        if prefix_len.numel() != batch or token_pos_len < 1 or token_pos.numel() != batch * token_pos_len:
            raise PlanError(
                f"prefix_len_ptr has {prefix_len.numel()} entries and token_pos_in_items_ptr {token_pos.numel()} but "
                f"the batch has {batch} requests and token_pos_in_items_len={token_pos_len}: pass one prefix length a "
                "request and token_pos_in_items_len positions a request, filled up with zeros."
            )
        if max_item_len is not None:
            self._check_longest(max_item_len, token_pos, batch)
        tensors = {
            "prefix_len": prefix_len.to(self.device).to(torch.int32),
            "token_pos": token_pos.to(self.device).to(torch.int32).view(batch, token_pos_len),
        }
        if self._most_requests is None:
            places = {name: self._place(name, tensor) for name, tensor in tensors.items()}
        elif self.variant is None:
            places = {
                name: allocate((self._most_requests, *t.shape[1:]), torch.int32, self.device, "multi-item scoring")
                for name, t in tensors.items()
            }
        elif (most := self.variant.tensors["token_pos"].shape[1]) < token_pos_len:
            raise PlanError(
                f"token_pos_in_items_len={token_pos_len} but captured runs read {most} positions a request: plan the "
                "longest items first."
            )
        if self.variant is None:
            self.variant = Variant(mask=_MASK, tensors=places, scalars={"max_token_pos": token_pos_len - 1})
        self._next, self._to_copy = given, tensors
        return self.variant

    def _place(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Memory of that shape; a captured launch of an earlier plan keeps what it reads."""
        if name not in self._memory:
            self._memory[name] = GrowingMemory(torch.int32, self.device, "multi-item scoring")
        return self._memory[name].at_least(tensor.numel())[: tensor.numel()].view(tensor.shape)

    def copy(self) -> None:
        """Copies the numbers of the batch that was planned to the memory that launches read."""
        variant = self.variant
        if variant is None or not self._to_copy:
            return
        if self._most_requests is None:
            variant.tensors.update({name: self._place(name, tensor) for name, tensor in self._to_copy.items()})
            variant.scalars["max_token_pos"] = self._to_copy["token_pos"].shape[1] - 1
        for name, tensor in self._to_copy.items():
            memory = variant.tensors[name][: len(tensor)]
            if name == "token_pos":
                memory[:, : tensor.shape[1]].copy_(tensor)
                memory[:, tensor.shape[1] :] = tensor[:, -1:]
            else:
                memory.copy_(tensor)
        self.given, self._to_copy = self._next, {}

    def _check_longest(self, max_item_len: Any, token_pos: torch.Tensor, batch: int) -> None:
        """Checks on the device, which waits; only if FLASHPAGE_CHECK_INDICES is on."""
        checks.tensor(max_item_len, "max_item_len_ptr", PlanError)
        if max_item_len.numel() != batch:
            raise PlanError(f"max_item_len_ptr has {max_item_len.numel()} entries: pass one a request, [{batch}].")
        if not (max_item_len.is_cpu and token_pos.is_cpu) and not self._check_on_device:
            return
        longest = token_pos.cpu().int().view(batch, -1).amax(1)
        given = max_item_len.cpu().int().view(-1)
        if bool((given < longest).any()):
            i = int((given < longest).nonzero()[0])
            raise PlanError(
                f"max_item_len_ptr[{i}]={int(given[i])} but an item of the request has {int(longest[i])} tokens: "
                "pass the length of the longest item."
            )
