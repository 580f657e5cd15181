"""The work of a kernel: the options of a plan, the rows of its batch, and the card."""

from __future__ import annotations

import dataclasses
import enum
import re

from ..variants.spec import VariantSpec, logit_loads_by_token
from .context_classes import ContextClass
from .devices import Device
from .options import Options


class InnerLoop(enum.Enum):
    """Classes of what happens between the two products, by the registers that it takes from accumulators."""

    PLAIN = "scales scores"
    TRANSFORM = "computes on scores (soft cap)"
    HEAVY = "rotates or masks (RoPE, a custom mask, a variant's mask)"
    LOADING = "computes on scores with what it loads for each token (a variant with tensors)"


def inner_loop(mask_source: str, position_encoding: str, variant: VariantSpec) -> InnerLoop:
    """The class of a spec's inner loop, which decides the tile. If tiles are classified before the run, a mask function
    is evaluated in few of them."""
    names = {name for name, _, _ in variant.tensors}
    mask_loads = mask_source != "function" and names & set(re.findall(r"\w+", variant.mask))
    if variant.logit and (mask_loads or logit_loads_by_token(variant)):
        return InnerLoop.LOADING
    masks = mask_source == "packed_bits" or (mask_source == "implicit" and variant.mask != "")
    if masks or position_encoding != "none":
        return InnerLoop.HEAVY
    return InnerLoop.TRANSFORM if variant.logit else InnerLoop.PLAIN


@dataclasses.dataclass(frozen=True)
class Problem:
    """Options and the sizes of one batch that decide a tile; the lengths themselves go to the planner as arrays."""

    options: Options
    packed_rows: int  # query rows x group_size of a request and KV head, on average in the batch
    has_known_lengths: bool = True  # the host plans before each run: no captured launch serves other batches
    contexts: ContextClass = ContextClass.USUAL  # of the batch


@dataclasses.dataclass(frozen=True)
class Work:
    """A problem on a card, for one kernel."""

    problem: Problem
    card: Device
    variant: VariantSpec = VariantSpec()
    mask_source: str = "implicit"  # KernelSpec.mask_source

    @property
    def options(self) -> Options:
        return self.problem.options

    @property
    def packed_rows(self) -> int:
        return self.problem.packed_rows

    @property
    def widest(self) -> int:
        """The larger one of the two head dims."""
        return max(self.options.head_dim_qk, self.options.head_dim_vo)

    @property
    def columns(self) -> int:
        """head_dim_qk + head_dim_vo: elements of one token in K and V together."""
        return self.options.head_dim_qk + self.options.head_dim_vo

    @property
    def rotates(self) -> bool:
        """Whether RoPE is computed in the kernel."""
        return self.options.position_encoding == "ROPE_LLAMA"

    @property
    def position_encoding(self) -> str:
        return "rope" if self.rotates else "none"

    @property
    def loop(self) -> InnerLoop:
        return inner_loop(self.mask_source, self.position_encoding, self.variant)
