"""A program written for flash-attn decodes from pages: its import is unchanged, the kernels are flashpage's."""

import torch

import flashpage.compat

flashpage.compat.install_flash_attn()
from flash_attn import flash_attn_with_kvcache  # noqa: E402

torch.manual_seed(0)
k_cache, v_cache = torch.randn(2, 8, 16, 2, 64)  # 8 pages of 16 tokens, 2 KV heads
table = torch.tensor([[6, 0, 2], [5, 1, 0]], dtype=torch.int32)
lengths = torch.tensor([40, 17], dtype=torch.int32)
q, k, v = torch.randn(2, 1, 8, 64), torch.randn(2, 1, 2, 64), torch.randn(2, 1, 2, 64)

out = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, block_table=table, causal=True)
print("output:", tuple(out.shape))
print("the new key is in page 2, place 8:", torch.equal(k_cache[2, 8], k[0, 0]))
pages = torch.cat([k_cache[6], k_cache[0], k_cache[2]])[:41], torch.cat([v_cache[6], v_cache[0], v_cache[2]])[:41]
keys, values = (t.transpose(0, 1)[None] for t in pages)
expected = torch.nn.functional.scaled_dot_product_attention(q[:1].transpose(1, 2), keys, values, enable_gqa=True)
print("equal to torch's attention:", torch.allclose(out[:1].transpose(1, 2), expected, atol=1e-5))
