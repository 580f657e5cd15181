"""The options of an engine's attention layers: those that decide a plan, and those that a run gives."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ...kernels.options import RunOptions, check_soft_cap, check_window
from ...variants.variant import Variant


class LayerKind(NamedTuple):
    """The options of a layer that need a plan of their own. Layers of one kind share their plans."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    slopes: tuple[float, ...] | None = None  # ALiBi's, of this rank's heads
    window_both: int = -1  # encoders: tokens visible to either side; -1: all
    chunk: int = 0  # causal rows see only tokens of their own chunk of so many; 0: no chunks
    out_dtype: torch.dtype | None = None  # e4m3: outputs have a scale, which a run gives; None: the queries' type


class LayerOptions:
    """A layer's options in flashpage's terms.

    Args:
        slopes: ALiBi's, of this rank's heads.
        window: tokens that a row sees, itself included; None: all.
        chunk: tokens of the chunks, of whose own a row sees no others; None: no chunks.
        is_encoder: rows see both sides, and K and V are in no cache.
    """

    def __init__(
        self,
        heads: tuple[int, int, int],  # query heads, KV heads, head_dim
        scale: float,
        *,
        slopes: Sequence[float] | None = None,
        window: int | None = None,
        chunk: int | None = None,
        soft_cap: float | None = None,
        is_encoder: bool = False,
    ) -> None:
        window_left = check_window(-1 if window is None else window - 1)
        slope_tuple = None if slopes is None else tuple(float(slope) for slope in slopes)
        self.kind = LayerKind(*heads, slope_tuple, window_left if is_encoder else -1, chunk or 0)
        self.is_encoder = is_encoder
        if is_encoder:
            window_left = -1  # the kind's variant masks both sides
        cap = check_soft_cap(soft_cap)
        # Indexed by whether rows are causal.
        self.values = tuple(
            RunOptions(is_causal, window_left, cap, float(scale), None, None, "NONE") for is_causal in (False, True)
        )

    def with_heads(self, num_heads: int) -> LayerOptions:
        """The layer with the query heads of several ranks."""
        return self._with(num_heads=num_heads)

    def with_outputs(self, out_dtype: torch.dtype) -> LayerOptions:
        """The layer with outputs of another type."""
        return self._with(out_dtype=out_dtype)

    def slopes_on(self, device: torch.device) -> torch.Tensor | None:
        """ALiBi's slopes, [num_heads] fp32, as the plans of the layer read them; None: it has none."""
        slopes = self.kind.slopes
        return None if slopes is None or device.type == "meta" else _slopes_on(slopes, device)

    def _with(self, **changes: Any) -> LayerOptions:
        found = copy.copy(self)
        found.kind = self.kind._replace(**changes)
        return found


@functools.lru_cache(maxsize=64)
def chunk_variant(chunk: int) -> Variant:
    """Hides the tokens of other chunks, for plans that the device makes of several rows a request: it does not cut
    their rows into those of each chunk, as the host does. Equal chunks get one object."""
    return Variant(mask="kv_idx >= q_idx - q_idx % chunk", scalars={"chunk": chunk})


@functools.lru_cache(maxsize=64)
def _slopes_on(slopes: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """The first call decides in which memory they are: an engine may release that of other parts while it sleeps."""
    with torch.inference_mode(False):  # a tensor of inference mode could not be written outside of it
        return torch.tensor(slopes, dtype=torch.float32, device="cpu").to(device)


@functools.lru_cache(maxsize=64)
def variant_of(kind: LayerKind, device: torch.device) -> Any:
    """The variant of ALiBi's slopes and of a window to both sides; None: neither. Equal kinds get one object, because
    plans compare variants by identity."""
    given: dict[str, Any] = {"tensors": {}, "scalars": {}}
    if kind.slopes is not None:
        # Rows of an encoder count the distance to both sides; for causal rows it is never positive.
        given["logit"] = "score - slopes[h] * to_float(abs(kv_idx - q_idx))"
        given["tensors"]["slopes"] = _slopes_on(kind.slopes, device)
    if kind.window_both >= 0:
        given["mask"] = "abs(kv_idx - q_idx) <= window"
        given["scalars"]["window"] = kind.window_both
    return Variant(**given) if kind.slopes is not None or kind.window_both >= 0 else None
