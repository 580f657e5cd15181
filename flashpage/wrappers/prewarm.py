"""FlashInfer's method that loads a kernel for K and V of different strides before a graph is captured."""

from __future__ import annotations

from ..base import checks


class Prewarmed:
    """The wrappers that have the method."""

    def prewarm_paged_kv_stride_variant(self, variant: str = "independent") -> None:
        """Does nothing: the planned kernel reads K and V of equal strides, and of different ones."""
        checks.choice("variant", variant, ("independent",))
