"""fp8: keys and values as e4m3 with scales, half the bytes of bf16."""

import torch

import flashpage

torch.manual_seed(0)
k, v = torch.randn(20, 16, 2, 128), 3 * torch.randn(20, 16, 2, 128)
q = torch.randn(1, 8, 128)
exact = flashpage.single_decode_with_kv_cache(q[0], k.flatten(0, 1), v.flatten(0, 1))
arrays = torch.tensor([0, 20]), torch.arange(20), torch.tensor([16])
wrapper = flashpage.BatchDecodeWithPagedKVCacheWrapper(torch.empty(16 << 20, dtype=torch.uint8))

for dtype in (torch.bfloat16, torch.float8_e4m3fn):
    is_fp8 = dtype.itemsize == 1
    scales = [t.abs().max().item() / 448 if is_fp8 else 1.0 for t in (k, v)]  # 448: the largest e4m3
    cache = torch.stack([k / scales[0], v / scales[1]], 1).to(dtype)
    wrapper.plan(*arrays, 8, 2, 128, 16, q_data_type=torch.bfloat16, kv_data_type=dtype)
    out = wrapper.run(q.bfloat16(), cache, k_scale=scales[0], v_scale=scales[1])
    error = (out[0] - exact).norm() / exact.norm()
    print(f"{dtype!s:20} {cache.nbytes // 1024:4} KiB of cache, within {'5%' if is_fp8 else '1%'}:", end=" ")
    print(bool(error < (0.05 if is_fp8 else 0.01)))
