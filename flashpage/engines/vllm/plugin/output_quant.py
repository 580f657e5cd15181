"""Outputs of e4m3: vLLM's pass AttnQuantFusionPass lets attention do the quantization before an output projection in
fp8, so that rows leave in half the bytes and no kernel reads them in between. It runs on request:

    -cc '{"pass_config": {"fuse_attn_quant": true}}'

A pass may change one layer and not the next. A layer learns that it is changed in the run by which vLLM measures
memory, before builders make plans for it, also where vLLM finds the changed graph in its cache and runs no pass. One
that learns it later (workers of elastic expert parallelism measure nothing) keeps its plans, and quantizes after them.
"""

from __future__ import annotations

from typing import Any

import torch


def is_served(config: Any, context_ranks: int) -> bool:
    """Whether kernels write outputs of e4m3 in vLLM's configuration: ranks merge states of 16 bits, and models with an
    encoder run some steps without the compiled graph."""
    model = getattr(config, "model_config", None)
    return context_ranks == 1 and not getattr(model, "is_encoder_decoder", False)


def is_static_e4m3(quant_key: Any) -> bool:
    """Whether vLLM's key stands for e4m3 and one scale that is known before the run."""
    from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8StaticTensorSym

    return bool(quant_key == kFp8StaticTensorSym) and quant_key.dtype is torch.float8_e4m3fn


def quantize(rows: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Writes rows to `out` in e4m3, divided by the scale: for layers that a pass changed and kernels do not serve so.
    vLLM's pattern has no layer's name, so it changes all layers if one is served."""
    most = torch.finfo(out.dtype).max  # numbers beyond it become NaN in older versions of torch
    return out.copy_((rows.float() / scale).clamp_(-most, most))
