"""One captured launch for every batch: captured once, replayed after plans of other sizes and lengths.

Without a card the plans are made in the same way, and the run is called in place of the replay.
"""

import torch

import flashpage

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.float16 if device == "cuda" else torch.float32
torch.manual_seed(0)
cache = torch.randn(64, 2, 16, 2, 128).to(device, dtype)
q = torch.randn(8, 8, 128).to(device, dtype)
out = torch.empty_like(q)
workspace = torch.empty(64 << 20, dtype=torch.uint8, device=device)
wrapper = flashpage.BatchDecodeWithPagedKVCacheWrapper(workspace, use_cuda_graph=True, max_batch=8, max_pages=64)


def plan(attention, lengths):
    pages = torch.tensor([0, *(-(-n // 16) for n in lengths)]).cumsum(0)
    last = torch.tensor([(n - 1) % 16 + 1 for n in lengths])
    attention.plan(pages, torch.arange(int(pages[-1])), last, 8, 2, 128, 16, q_data_type=dtype)


replay = None
plain = flashpage.BatchDecodeWithPagedKVCacheWrapper(torch.empty(64 << 20, dtype=torch.uint8, device=device))
for lengths in ([30], [5, 300, 17], [1] * 8, [64] * 8):
    n = len(lengths)
    plan(wrapper, lengths)
    if device == "cuda" and replay is None:
        wrapper.run(q, cache, out=out)  # compiles and binds, before the capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            wrapper.run(q, cache, out=out)
        replay = graph.replay
    replay() if replay else wrapper.run(q[:n], cache, out=out[:n])
    plan(plain, lengths)
    print(f"{n} requests: equal to a plain run:", torch.allclose(out[:n], plain.run(q[:n], cache), atol=2e-3))
