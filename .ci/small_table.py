"""Compares the CPU kernels of a wheel with torch, by element type, head dim and rows. release.py runs it."""

import itertools

import torch

import flashpage

PAGE, HEADS, KV_HEADS = 16, 8, 2
LENGTHS = (1, 17, 300)
TOLERANCES = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


def expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of one request's last rows in fp64: q [rows, heads, dim], k and v [tokens, KV heads, dim]."""
    k, v = (x.double().repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    scores = torch.einsum("rhd,thd->hrt", q.double(), k) / q.shape[-1] ** 0.5
    hidden = torch.arange(k.shape[0])[None, :] > torch.arange(k.shape[0] - q.shape[0], k.shape[0])[:, None]
    return torch.einsum("hrt,thd->rhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def check(dtype: torch.dtype, dim: int, rows: int) -> None:
    pages = [-(-n // PAGE) for n in LENGTHS]
    cache = torch.randn(sum(pages), 2, PAGE, KV_HEADS, dim).to(dtype)
    indices = torch.randperm(sum(pages)).int()
    indptr = torch.tensor([0, *itertools.accumulate(pages)]).int()
    last = torch.tensor([(n - 1) % PAGE + 1 for n in LENGTHS]).int()
    counts = [min(rows, n) for n in LENGTHS]
    q = torch.randn(sum(counts), HEADS, dim).to(dtype)
    workspace = torch.empty(32 << 20, dtype=torch.uint8)
    shape = (HEADS, KV_HEADS, dim, PAGE)
    if rows == 1:
        decode = flashpage.BatchDecodeWithPagedKVCacheWrapper(workspace)
        decode.plan(indptr, indices, last, *shape, q_data_type=dtype, kv_data_type=dtype)
        out = decode.run(q, cache)
    else:
        prefill = flashpage.BatchPrefillWithPagedKVCacheWrapper(workspace)
        q_indptr = torch.tensor([0, *itertools.accumulate(counts)]).int()
        prefill.plan(q_indptr, indptr, indices, last, *shape, causal=True, q_data_type=dtype, kv_data_type=dtype)
        out = prefill.run(q, cache)
    for i, (length, found) in enumerate(zip(LENGTHS, out.split(counts), strict=True)):
        own = cache[indices[indptr[i] : indptr[i + 1]].long()]
        k, v = (own[:, j].reshape(-1, KV_HEADS, dim)[:length] for j in (0, 1))
        error = (found.double() - expected(q.split(counts)[i], k, v)).abs().max().item()
        assert error < TOLERANCES[dtype], f"{dtype} head_dim {dim} rows {rows} length {length}: error {error}"


torch.manual_seed(0)
for case in itertools.product(TOLERANCES, (64, 128), (1, 40)):
    check(*case)
print("all agree")
