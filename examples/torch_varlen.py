"""PyTorch's varlen_attn over pages, on the CPU, where torch itself has no kernel for it."""

import inspect
import sys

import torch
from torch.nn.attention.varlen import varlen_attn

import flashpage.torch_attention

if "seqused_k" not in inspect.signature(varlen_attn).parameters:
    sys.exit(f"torch {torch.__version__} has no varlen_attn over pages; torch 2.13 has one")

torch.manual_seed(0)
registration = flashpage.torch_attention.register("CPU")  # on a card: activate_flash_attention_impl("flashpage")
k_pages, v_pages = torch.randn(2, 8, 16, 2, 64)  # 8 pages of 16 tokens, 2 KV heads
table = torch.tensor([[6, 0, 2], [5, 1, 0]], dtype=torch.int32)
used = torch.tensor([40, 17], dtype=torch.int32)  # tokens of two requests
rows = torch.tensor([0, 1, 4], dtype=torch.int32)  # one row of the first, three of the second

given = {"seqused_k": used, "block_table": table, "enable_gqa": True, "window_size": (-1, 0)}
out = varlen_attn(torch.randn(4, 8, 64), k_pages, v_pages, rows, None, 3, 40, **given)
print("output:", tuple(out.shape))
registration.remove()
try:
    varlen_attn(torch.randn(4, 8, 64), k_pages, v_pages, rows, None, 3, 40, **given)
except NotImplementedError:
    print("restored: torch has no such kernel for the CPU")
