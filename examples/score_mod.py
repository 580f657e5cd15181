"""A variant: a score function and a mask function in Python, compiled into the kernel; FlexAttention agrees."""

import torch

import flashpage

torch.manual_seed(0)
q, k, v = torch.randn(48, 4, 128), torch.randn(48, 4, 128), torch.randn(48, 4, 128)
document = torch.tensor([[0] * 20 + [1] * 28])  # of each token of each request
slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])


def with_slope(score, b, h, q_idx, kv_idx):
    return 20 * torch.tanh((score + slopes[h] * (kv_idx - q_idx)) / 20)


def same_document(b, h, q_idx, kv_idx):
    return (document[b, q_idx] == document[b, kv_idx]) & (q_idx >= kv_idx)


variant = flashpage.Variant(score_mod=with_slope, mask_mod=same_document)
ours = flashpage.single_prefill_with_kv_cache(q, k, v, variant=variant)

rows = torch.arange(48)
scores = torch.einsum("qhd,khd->hqk", q, k) * 128**-0.5
scores = with_slope(scores, 0, torch.arange(4)[:, None, None], rows[:, None], rows)
scores = scores.masked_fill(~same_document(0, 0, rows[:, None], rows), -torch.inf)
theirs = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
print("the mask, as it is compiled: ", variant.traced().spec.mask)
print("equal to whole matrices in torch:", torch.allclose(ours, theirs, atol=1e-5))

slopes *= 2  # captured values may change: the next plan reads them, and nothing is compiled
doubled = flashpage.single_prefill_with_kv_cache(q, k, v, variant=variant)
print("other slopes, another result:", not torch.allclose(ours, doubled))
