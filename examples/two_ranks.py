"""Two ranks: each has half of the pages of every request, and both get the attention over all of them."""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing

import flashpage
from flashpage.parallel import ContextParallelAttention

PAGES, LENGTHS = 24, [5, 300, 17]  # pages of 16 tokens


def work(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(0)
    whole = torch.randn(PAGES, 2, 16, 2, 128)  # for the comparison; a rank needs its own pages alone
    q = torch.randn(3, 8, 128)
    counts = [-(-n // 16) for n in LENGTHS]
    indptr, indices = torch.tensor([0, *counts]).cumsum(0), torch.arange(sum(counts))

    wrapper = ContextParallelAttention(torch.empty(16 << 20, dtype=torch.uint8))
    wrapper.plan(indptr, indices, torch.tensor(LENGTHS), 8, 2, 128, 16, q_data_type=torch.float32)
    own = whole.clone()
    for begin, count in zip(indptr.tolist(), counts, strict=False):
        own[begin : begin + count][1 - rank :: 2] = float("nan")  # page i lies on rank i % 2; the others are not here
    out = wrapper.run(q, own)

    if rank == 0:
        alone = flashpage.BatchDecodeWithPagedKVCacheWrapper(torch.empty(16 << 20, dtype=torch.uint8))
        last = torch.tensor([(n - 1) % 16 + 1 for n in LENGTHS])
        alone.plan(indptr, indices, last, 8, 2, 128, 16, q_data_type=torch.float32)
        print("tokens on rank 0:", wrapper.layout(16).tokens(torch.tensor(LENGTHS)).tolist(), "of", LENGTHS)
        print("equal to one rank that has all pages:", torch.allclose(out, alone.run(q, whole), atol=1e-5))
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (f"{folder}/store",), nprocs=2)
