"""Cascade: 16 requests share a prefix of 320 tokens; its pages are read once for all of them."""

import torch

import flashpage

torch.manual_seed(0)
cache, q = torch.randn(64, 2, 16, 2, 128), torch.randn(16, 8, 128)
shared, own, last = torch.arange(20), torch.arange(20, 36), torch.arange(1, 17)  # 20 pages for all, one page each
workspace = torch.empty(16 << 20, dtype=torch.uint8)

cascade = flashpage.MultiLevelCascadeAttentionWrapper(2, workspace)
cascade.plan(
    [torch.tensor([0, 16]), torch.arange(17)],  # level 0: one list for all rows; level 1: a list for each row
    [torch.tensor([0, 20]), torch.arange(17)],
    [shared, own],
    [torch.tensor([16]), last],
    *(8, 2, 128, 16),
    q_data_type=torch.float32,
)
flat = flashpage.BatchDecodeWithPagedKVCacheWrapper(workspace)
lists = torch.cat([torch.cat([shared, own[i : i + 1]]) for i in range(16)])
flat.plan(torch.arange(17) * 21, lists, last, 8, 2, 128, 16, q_data_type=torch.float32)

print("equal to each request by itself:", torch.allclose(cascade.run(q, cache), flat.run(q, cache), atol=1e-5))
print(f"pages in the lists: {len(lists)} without sharing, {len(shared) + len(own)} in the cascade")
