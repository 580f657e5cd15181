"""cuDNN's attention over e4m3 tensors, which it offers by its graph API only (the package nvidia-cudnn-frontend)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

SCALES = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")


def fp8_attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Callable[[], Tensor]:
    """A call for q [batch, tokens, q_heads, head_dim] and k, v [batch, tokens, kv_heads, head_dim] in e4m3.

    All scales are 1. The output has q's shape; it is bf16 if cuDNN can write that, and else e4m3, as on Hopper.
    """
    try:
        return Fp8Graph(q, k, v, is_causal, torch.bfloat16)
    except Exception:  # whatever is wrong with both output types is raised by the second
        return Fp8Graph(q, k, v, is_causal, torch.float8_e4m3fn)


class Fp8Graph:
    """A graph of one operation, with its tensors and workspace."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, out_dtype: torch.dtype) -> None:
        import cudnn

        types, self.handle = cudnn.data_type, handle_of(q.device)
        single = {"intermediate_data_type": types.FLOAT, "compute_data_type": types.FLOAT}
        self.graph = cudnn.pygraph(io_data_type=types.FP8_E4M3, handle=self.handle, **single)
        self.buffers: dict[Any, Tensor] = {}  # by the graph's names of them
        self.out = torch.empty_like(q, dtype=out_dtype)
        inputs = {
            name: self.input(x, types.FP8_E4M3) for name, x in zip("qkv", map(heads_first, (q, k, v)), strict=True)
        }
        for name in SCALES:
            inputs[name] = self.input(torch.ones(1, 1, 1, 1, device=q.device), types.FLOAT)
        out, _, *largest = self.graph.sdpa_fp8(
            **inputs,
            is_inference=True,
            attn_scale=q.shape[-1] ** -0.5,
            diagonal_alignment=cudnn.diagonal_alignment.TOP_LEFT,
            right_bound=0 if is_causal else None,
        )
        is_e4m3 = out_dtype == torch.float8_e4m3fn
        self.output(out, heads_first(self.out), types.FP8_E4M3 if is_e4m3 else types.BFLOAT16)
        for name in largest:  # magnitudes of the probabilities and of the output, which cuDNN always writes
            self.output(name, torch.zeros(1, 1, 1, 1, device=q.device), types.FLOAT)
        self.graph.validate()
        self.graph.build_operation_graph()
        self.graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        self.graph.check_support()
        self.graph.build_plans()
        num_bytes = max(1, self.graph.get_workspace_size())
        self.workspace = torch.empty(num_bytes, dtype=torch.uint8, device=q.device)

    def input(self, tensor: Tensor, data_type: Any) -> Any:
        name = self.graph.tensor(dim=list(tensor.shape), stride=list(tensor.stride()), data_type=data_type)
        self.buffers[name] = as_bytes(tensor)
        return name

    def output(self, name: Any, tensor: Tensor, data_type: Any) -> None:
        name.set_output(True).set_dim(list(tensor.shape)).set_stride(list(tensor.stride())).set_data_type(data_type)
        self.buffers[name] = as_bytes(tensor)

    def __call__(self) -> Tensor:
        import cudnn

        cudnn.set_stream(handle=self.handle, stream=torch.cuda.current_stream().cuda_stream)
        self.graph.execute(self.buffers, self.workspace, handle=self.handle)
        return self.out


@functools.cache
def handle_of(device: torch.device) -> Any:
    """cuDNN's handle for a device."""
    import cudnn

    with torch.cuda.device(device):
        return cudnn.create_handle()


def heads_first(tensor: Tensor) -> Tensor:
    """A view [batch, heads, tokens, head_dim]."""
    return tensor.transpose(1, 2)


def as_bytes(tensor: Tensor) -> Tensor:
    """e4m3 as uint8, as not every version of DLPack has a name for e4m3."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
