"""Prefill in chunks: a prompt of 200 tokens is appended in three steps, and equals the prompt in one step."""

import torch

import flashpage

torch.manual_seed(0)
q, k, v = torch.randn(200, 8, 128), torch.randn(200, 2, 128), torch.randn(200, 2, 128)
whole = flashpage.single_prefill_with_kv_cache(q, k, v, causal=True)

cache, indices = torch.full((16, 2, 16, 2, 128), float("nan")), torch.randperm(16).int()  # unused slots hold NaN
wrapper = flashpage.BatchPrefillWithPagedKVCacheWrapper(torch.empty(16 << 20, dtype=torch.uint8))
for begin, end in ((0, 96), (96, 160), (160, 200)):
    rows, length = torch.tensor([0, end - begin]), torch.tensor([end])
    pages, last = torch.tensor([0, -(-end // 16)]), (length - 1) % 16 + 1
    requests, positions = flashpage.get_batch_indices_positions(rows, length, end - begin)
    flashpage.append_paged_kv_cache(k[begin:end], v[begin:end], requests, positions, cache, indices, pages, last)
    wrapper.plan(rows, pages, indices, last, 8, 2, 128, 16, causal=True, q_data_type=torch.float32)
    out = wrapper.run(q[begin:end], cache)
    print(f"rows {begin} to {end - 1}: equal to the whole prompt's: {torch.allclose(out, whole[begin:end], atol=1e-5)}")
