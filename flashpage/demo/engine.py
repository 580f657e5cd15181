"""A minimal serving loop: a pool of KV pages, one `plan` a step, one `append` and one `run` a layer."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

import flashpage

from .model import Attend, Llama

PAGE_SIZE = 16  # tokens
Wrapper = flashpage.BatchDecodeWithPagedKVCacheWrapper | flashpage.BatchPrefillWithPagedKVCacheWrapper


@dataclasses.dataclass
class Request:
    """One request: its tokens so far (prompt, then generated ones) and the pages that hold their keys and values."""

    tokens: list[int]
    max_new_tokens: int
    prompt_len: int = dataclasses.field(init=False)
    pages: list[int] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.prompt_len = len(self.tokens)

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    @property
    def done(self) -> bool:
        return len(self.generated) >= self.max_new_tokens


@dataclasses.dataclass(frozen=True)
class PageTable:
    """Where the keys and values of a batch are."""

    indptr: Tensor  # into indices, [batch + 1], on the host
    indices: Tensor  # pages, on the device
    last_page_len: Tensor  # tokens, [batch], on the host


class Engine:
    """Runs requests through paged KV: all are prefilled in one batch, then decoded together until each is done."""

    def __init__(self, model: Llama, num_pages: int, seed: int = 0) -> None:
        config, self.model = model.config, model
        shape = (num_pages, 2, PAGE_SIZE, config.num_kv_heads, config.head_dim)
        # NaN: a page that is read before it is written shows at once.
        self.caches = [
            torch.full(shape, float("nan"), device=model.device, dtype=model.dtype) for _ in range(config.num_layers)
        ]
        self.free_pages = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed)).tolist()
        workspace = torch.empty(32 << 20, device=model.device, dtype=torch.uint8)
        self.prefill_wrapper = flashpage.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        self.decode_wrapper = flashpage.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")
        self.decode_plans: list[float] = []  # seconds of each decode plan
        self.first_decode_plan: flashpage.Plan | None = None

    def generate(self, requests: list[Request], progress: Callable[[int], None] = lambda active: None) -> None:
        """Extends every request to its `max_new_tokens`, greedily; `progress` hears of each step and its requests."""
        active = [request for request in requests if not request.done]
        self._step(active, [request.prompt_len for request in active])
        progress(len(active))
        while active := self._retire(active):
            self._step(active, [1] * len(active))
            progress(len(active))

    def _retire(self, active: list[Request]) -> list[Request]:
        """Gives the pages of finished requests back to the pool; returns the others."""
        for request in active:
            if request.done:
                self.free_pages.extend(request.pages)
                request.pages = []
        return [request for request in active if not request.done]

    def _step(self, active: list[Request], new_lens: list[int]) -> None:
        """Runs the model over the last `new_lens` tokens of each request and adds one token to each."""
        device = self.model.device
        kv_lens = [len(request.tokens) for request in active]
        for request, kv_len in zip(active, kv_lens, strict=True):
            while len(request.pages) * PAGE_SIZE < kv_len:
                request.pages.append(self.free_pages.pop())
        q_indptr = indptr(new_lens)
        table = PageTable(
            indptr([len(request.pages) for request in active]),
            torch.tensor([page for request in active for page in request.pages], dtype=torch.int32).to(device),
            torch.tensor([(n - 1) % PAGE_SIZE + 1 for n in kv_lens], dtype=torch.int32),
        )
        tokens = [t for request, n in zip(active, new_lens, strict=True) for t in request.tokens[-n:]]
        rows, positions = flashpage.get_batch_indices_positions(
            q_indptr.to(device), torch.tensor(kv_lens, dtype=torch.int32).to(device), len(tokens)
        )
        attend = self._attention(self._plan(q_indptr, table), table, rows, positions)
        hidden = self.model.forward(torch.tensor(tokens).to(device), positions, attend)
        last_rows = (q_indptr[1:] - 1).to(device)
        for request, token in zip(active, self.model.logits(hidden[last_rows]).argmax(-1).tolist(), strict=True):
            request.tokens.append(token)

    def _plan(self, q_indptr: Tensor, table: PageTable) -> Wrapper:
        """One plan for all layers of this step; the wrapper to run. Lengths are on the host: nothing waits."""
        config, dtype = self.model.config, self.model.dtype
        heads = (config.num_q_heads, config.num_kv_heads, config.head_dim, PAGE_SIZE)
        pages = (table.indptr, table.indices, table.last_page_len)
        if int(q_indptr[-1]) > len(table.last_page_len):  # more rows than requests
            self.prefill_wrapper.plan(q_indptr, *pages, *heads, causal=True, q_data_type=dtype)
            return self.prefill_wrapper
        start = time.perf_counter()
        self.decode_wrapper.plan(*pages, *heads, q_data_type=dtype)
        self.decode_plans.append(time.perf_counter() - start)
        if self.first_decode_plan is None:
            self.first_decode_plan = self.decode_wrapper.last_plan
        return self.decode_wrapper

    def _attention(self, wrapper: Wrapper, table: PageTable, rows: Tensor, positions: Tensor) -> Attend:
        """What the model calls once a layer: new keys and values go to their pages, then attention over all of them."""
        kv_indptr, last_page_len = table.indptr.to(self.model.device), table.last_page_len.to(self.model.device)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache = self.caches[layer]
            flashpage.append_paged_kv_cache(k, v, rows, positions, cache, table.indices, kv_indptr, last_page_len)
            return wrapper.run(q, cache)

        return attend

    def median_plan_us(self) -> float:
        """Host time of a decode plan, microseconds."""
        return statistics.median(self.decode_plans) * 1e6


def indptr(lens: list[int]) -> Tensor:
    """[0, lens[0], lens[0] + lens[1], ...], int32, on the host."""
    return torch.tensor([0, *lens]).cumsum(0).to(torch.int32)
