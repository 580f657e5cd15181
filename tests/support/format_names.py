"""The formats of K and V that tests and benchmarks go through, and how plan is told one."""

from __future__ import annotations

from typing import Any

import torch

from flashpage.kernels.kv_formats import FORMATS

# Without those that are others over rotated rows.
EACH = tuple(row.name for row in FORMATS.values() if not row.is_hadamard)


def kv_types(kv_format: Any) -> dict[str, Any]:
    """Arguments of plan. nvfp4 is said as FlashInfer says it, so that both libraries take them."""
    return {"kv_data_type": torch.uint8} if kv_format == "nvfp4" else {"kv_format": kv_format}
