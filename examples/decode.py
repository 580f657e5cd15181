"""Decode: three requests of different lengths, whose pages lie anywhere in one cache; plan once, run each layer."""

import torch

import flashpage

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.float16 if device == "cuda" else torch.float32
torch.manual_seed(0)
layers = [torch.randn(32, 2, 16, 8, 128).to(device, dtype) for _ in range(4)]  # a paged cache for each layer
lengths = [5, 300, 17]
pages = [-(-n // 16) for n in lengths]
indptr = torch.tensor([0, *pages]).cumsum(0)
indices = torch.randperm(32)[: sum(pages)].int()
last_page_len = torch.tensor([(n - 1) % 16 + 1 for n in lengths])

wrapper = flashpage.BatchDecodeWithPagedKVCacheWrapper(torch.empty(32 << 20, dtype=torch.uint8, device=device))
wrapper.plan(indptr, indices, last_page_len, 32, 8, 128, 16, q_data_type=dtype)  # once a step
for number, cache in enumerate(layers):
    q = torch.randn(3, 32, 128).to(device, dtype)
    out = wrapper.run(q, cache)  # once a layer
    own = cache[indices[1:20].long().to(device)]  # the pages of the second request
    k, v = (own[:, i].reshape(-1, 8, 128)[:300].repeat_interleave(4, 1).transpose(0, 1).float() for i in (0, 1))
    expected = torch.nn.functional.scaled_dot_product_attention(q[1].unsqueeze(1).float(), k, v)
    is_equal = torch.allclose(out[1].float(), expected[:, 0], atol=2e-3)
    print(f"layer {number}: {tuple(out.shape)}, equal to torch's attention over the gathered pages: {is_equal}")
