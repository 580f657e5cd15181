"""What a plan over latent rows declares about its runs, as FlashInfer's plan does: runs that differ are refused."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.compiler import is_dynamo_compiling

from ..base.errors import RunError
from .latent_run import CACHES, QUERIES, lie_side_by_side


class RunContract(NamedTuple):
    """Declarations of plan that runs must keep to."""

    use_sinks: bool
    lse_mode: str | None  # "none" or "base2"; None: runs say themselves what they return
    packed_query: bool  # queries lie side by side
    packed_cache: bool

    @staticmethod
    def of(
        use_sinks: bool, lse_mode: str | None, layouts: tuple[str | None, str | None], *, is_flat_csr: bool
    ) -> RunContract | None:
        """The declarations that a run may break, or None. Arrays of `csr` as arguments of plan, FlashInfer's former
        form, have lse_mode="none" for runs with an LSE, too."""
        if lse_mode == "basee" or (lse_mode == "none" and is_flat_csr):
            lse_mode = None
        found = RunContract(use_sinks, lse_mode, *(layout == "packed" for layout in layouts))
        return found if any(found) else None

    def check(self, q: Any, cache: Any, lse: Any, return_lse: Any, is_natural: bool, sinks: Any) -> None:
        """Refuses a run with other arguments; a tuple of q or of the cache holds its two tensors."""
        if self.use_sinks and sinks is None:
            raise RunError("sinks=None but plan got use_sinks=True: pass sinks, or plan with use_sinks=False.")
        if self.lse_mode == "none":
            asked = {"return_lse": return_lse, "lse": lse is not None, "return_lse_base_on_e": is_natural}
            for name, value in asked.items():
                if value:
                    given = f"{name} is given" if name == "lse" else f"{name}=True"
                    raise RunError(f"{given} but plan got lse_mode='none': plan with 'base2' or 'basee'.")
        elif self.lse_mode is not None and is_natural:
            raise RunError(
                "return_lse_base_on_e=True but plan got lse_mode='base2': leave it False, or plan with 'basee'."
            )
        if self.packed_query:
            _check_packed(QUERIES, "query_layout", q)
        if self.packed_cache:
            _check_packed(CACHES, "kv_cache_layout", cache)


def _check_packed(names: tuple[str, str], layout: str, given: Any) -> None:
    """Refuses two tensors that are no views of one, side by side."""
    if given.__class__ is not tuple or is_dynamo_compiling():
        return
    first, second = given
    if not (isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)):
        return  # refused where tensors are checked
    if first.dim() == second.dim() == 3 and (second.shape[2] == 0 or lie_side_by_side(first, second)):
        return
    raise RunError(
        f"{names[0]} and {names[1]} do not lie side by side but plan got {layout}='packed': pass one tensor, or plan "
        "with 'split'."
    )
