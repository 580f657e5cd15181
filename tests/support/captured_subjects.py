"""Wrappers with three batches each, to be captured, planned again and replayed (captured_walks.py: with options)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import flashpage

HEADS, KV_HEADS, DIM, PAGE, PAGES = 4, 2, 64, 16, 48
# Rows and tokens of each request; the first batch is the largest.
ROWS = ((5, 9, 4), (1, 3, 2), (5, 2, 9))
LENS = ((40, 70, 33), (17, 5, 64), (9, 80, 20))
MOST_ROWS, MOST_TOKENS = 18, 143


def indptr_of(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Subject:
    """One wrapper. Runs write and return `out`; its rows past the batch are undefined.

    Args:
        device: where it runs.
        is_graph: a wrapper for graphs, if there is one: replays follow later plans.
        options: of plan, made from the device.
    """

    has_graphs = True
    is_copied = False  # torch copies the kernels' results into the runs' outputs
    plans_itself = False  # run plans, too, and in new memory each time
    rows: tuple[tuple[int, ...], ...] = ROWS

    def __init__(self, device: str, is_graph: bool, options: dict[str, Any], run_options: dict[str, Any]) -> None:
        generator = torch.Generator().manual_seed(1)
        self.device, self.is_graph, self.options, self.run_options = device, is_graph, options, run_options
        self.dtype = torch.float32 if device == "cpu" else torch.bfloat16

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(device, self.dtype)

        self.q, self.cache = random(MOST_ROWS, HEADS, DIM), random(PAGES, 2, PAGE, KV_HEADS, DIM)
        self.k, self.v = random(MOST_TOKENS, KV_HEADS, DIM), random(MOST_TOKENS, KV_HEADS, DIM)
        self.order = [torch.randperm(PAGES, generator=generator).int().to(device) for _ in LENS]
        self.out = torch.empty_like(self.q)
        self.wrapper = self.make()

    def fresh(self) -> Subject:
        """Another wrapper over equal tensors, which is not for graphs."""
        return type(self)(self.device, False, self.options, self.run_options)

    def workspace(self) -> torch.Tensor:
        return torch.empty(8 << 20, dtype=torch.uint8, device=self.device)

    def buffer(self, count: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(count, dtype=dtype, device=self.device)

    def capacity(self, **sizes: int) -> dict[str, Any]:
        if not self.is_graph:
            return {}
        found: dict[str, Any] = {"use_cuda_graph": True, "max_batch": 3, **sizes}
        if "custom_mask" in self.options:
            found |= {"custom_mask_buf": self.buffer(4096, torch.uint8), "mask_indptr_buf": self.buffer(4)}
        return found

    def of_batch(self, i: int) -> dict[str, Any]:
        """The options; functions among them are called with the batch."""
        return {name: value(self, i) if callable(value) else value for name, value in self.options.items()}

    def pages(self, i: int, lens: tuple[int, ...] | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        lens = lens or LENS[i]
        indptr = indptr_of(tuple(-(-n // PAGE) for n in lens))
        return indptr, self.order[i][: int(indptr[-1])], ints(*((n - 1) % PAGE + 1 for n in lens))

    def used(self, i: int) -> int:
        """Number of rows in a batch."""
        return sum(self.rows[i])

    def given(self, tensor: torch.Tensor, i: int) -> torch.Tensor:
        """All rows if a wrapper for graphs gets them."""
        return tensor if self.is_graph else tensor[: self.used(i)]

    def make(self) -> Any:
        raise NotImplementedError

    def plan(self, i: int) -> None:
        raise NotImplementedError

    def run(self, i: int = 0) -> Any:
        """Runs batch i; returns one tensor or several."""
        raise NotImplementedError

    def run_others(self, i: int) -> None:
        """Runs that differ from the captured one and do not change its plan."""


class Decode(Subject):
    rows = ((1, 1, 1),) * 3

    def make(self) -> Any:
        return flashpage.BatchDecodeWithPagedKVCacheWrapper(self.workspace(), **self.capacity(max_pages=PAGES))

    def plan(self, i: int) -> None:
        self.wrapper.plan(*self.pages(i), HEADS, KV_HEADS, DIM, PAGE, q_data_type=self.dtype, **self.of_batch(i))

    def run(self, i: int = 0) -> torch.Tensor:
        rows = slice(0, 3)
        return self.wrapper.run(self.q[rows], self.cache, out=self.out[rows], **self.run_options)

    def run_others(self, i: int) -> None:
        self.wrapper.run(self.q[:3], self.cache, window_left=7)


class PagedPrefill(Subject):
    make_wrapper: Callable[..., Any] = flashpage.BatchPrefillWithPagedKVCacheWrapper

    def make(self) -> Any:
        return type(self).make_wrapper(self.workspace(), **self.capacity(max_pages=PAGES, max_rows=MOST_ROWS))

    def plan(self, i: int) -> None:
        heads = (HEADS, KV_HEADS, DIM, PAGE)
        self.wrapper.plan(indptr_of(self.rows[i]), *self.pages(i), *heads, q_data_type=self.dtype, **self.of_batch(i))

    def run(self, i: int = 0) -> torch.Tensor:
        q, out = self.given(self.q, i), self.given(self.out, i)
        return self.wrapper.run(q, self.cache, out=out, **self.run_options)

    def run_others(self, i: int) -> None:
        self.wrapper.run(self.given(self.q, i), self.cache, window_left=7)


class Sinks(PagedPrefill):
    """The wrapper with sinks, whose constructor takes types, dims and buffers for graphs."""

    def make(self) -> Any:
        buffers = [self.buffer(4), self.buffer(4), self.buffer(PAGES), self.buffer(3)] if self.is_graph else []
        types = {"q_data_type": self.dtype, "kv_data_type": self.dtype, "head_dim_qk": DIM, "head_dim_vo": DIM}
        self.run_options = {"sinks": torch.linspace(-1, 1, HEADS, device=self.device)}
        make = flashpage.attention.BatchAttentionWithAttentionSinkWrapper
        return make(self.workspace(), "NHD", self.is_graph, *buffers, **types)

    def run_others(self, i: int) -> None:
        self.wrapper.run(self.given(self.q, i), self.cache, sm_scale=0.3)


class RaggedPrefill(Subject):
    def make(self) -> Any:
        sizes = self.capacity(max_kv_rows=MOST_TOKENS, max_rows=MOST_ROWS)
        return flashpage.BatchPrefillWithRaggedKVCacheWrapper(self.workspace(), **sizes)

    def plan(self, i: int) -> None:
        lengths = indptr_of(self.rows[i]), indptr_of(LENS[i])
        self.wrapper.plan(*lengths, HEADS, KV_HEADS, DIM, q_data_type=self.dtype, **self.of_batch(i))

    def run(self, i: int = 0) -> torch.Tensor:
        q, out = self.given(self.q, i), self.given(self.out, i)
        return self.wrapper.run(q, self.k, self.v, out=out, **self.run_options)

    def run_others(self, i: int) -> None:
        self.wrapper.run(self.given(self.q, i), self.k, self.v, window_left=7)


class Cascade(Subject):
    """One level that all rows share, and one for each request."""

    shared = (30, 20, 40)  # tokens

    def make(self) -> Any:
        buffers: dict[str, Any] = {}
        if self.is_graph:
            for name, sizes in (
                ("qo_indptr_buf_arr", (2, 4)),
                ("paged_kv_indptr_buf_arr", (2, 4)),
                ("paged_kv_indices_buf_arr", (PAGES, PAGES)),
                ("paged_kv_last_page_len_buf_arr", (1, 3)),
            ):
                buffers[name] = [self.buffer(size) for size in sizes]
        make = flashpage.cascade.MultiLevelCascadeAttentionWrapper
        return make(2, self.workspace(), "NHD", self.is_graph, **buffers)

    def plan(self, i: int) -> None:
        levels = (self.pages((i + 1) % 3, (self.shared[i],)), self.pages(i))
        indptr, indices, last = zip(*levels, strict=True)
        rows = [ints(0, self.used(i)), indptr_of(self.rows[i])]
        heads = (HEADS, KV_HEADS, DIM, PAGE)
        self.wrapper.plan(rows, indptr, indices, last, *heads, q_data_type=self.dtype, **self.of_batch(i))

    def run(self, i: int = 0) -> torch.Tensor:
        return self.wrapper.run(self.given(self.q, i), self.cache, out=self.given(self.out, i))


class Pod(Subject):
    """The decodes change from plan to plan. The captured call keeps its prefill; other calls have others."""

    plans_itself = True
    rows = ((1, 1, 1),) * 3

    def make(self) -> Any:
        buffers = [self.buffer(4), self.buffer(PAGES), self.buffer(3)] if self.is_graph else []
        return flashpage.pod.PODWithPagedKVCacheWrapper(self.workspace(), "NHD", self.is_graph, *buffers)

    def plan(self, i: int) -> None:
        self.wrapper.plan(*self.pages(i), HEADS, KV_HEADS, DIM, PAGE, q_data_type=self.dtype, **self.of_batch(i))

    def run(self, i: int = 0, rows: int = 15, **options: Any) -> Any:
        prefill = (self.q[3 : 3 + rows], self.k[: 6 * rows], self.v[: 6 * rows])
        given: dict[str, Any] = {"causal_p": True, **options}
        return self.wrapper.run(*prefill, self.q[:3], self.cache, **given)

    def used(self, i: int) -> int:
        return MOST_ROWS

    def run_others(self, i: int) -> None:
        self.run(custom_mask_p=torch.ones(15, 90, dtype=torch.bool, device=self.device))
        self.run(rows=11, causal_p=False)
        self.run(rows=7)


class BatchPod(Subject):
    """Prefills and decodes; calls with a mask plan the prefills again."""

    has_graphs = False

    def make(self) -> Any:
        return flashpage.pod.BatchPODWithPagedKVCacheWrapper(self.workspace())

    def plan(self, i: int) -> None:
        heads, decodes = (HEADS, KV_HEADS, DIM, PAGE), (ints(0, 1, 2, 3), *self.pages((i + 1) % 3))
        prefills = (indptr_of(self.rows[i]), *self.pages(i))
        self.wrapper.plan(*prefills, *decodes, *heads, q_data_type=self.dtype, **self.of_batch(i))

    def run(self, i: int = 0, **options: Any) -> Any:
        return self.wrapper.run(self.given(self.q, i), self.cache, self.q[:3], self.cache, causal_p=True, **options)

    def given(self, tensor: torch.Tensor, i: int) -> torch.Tensor:
        return tensor[: sum(self.rows[i])]

    def run_others(self, i: int) -> None:
        bits = sum(q * kv for q, kv in zip(self.rows[i], LENS[i], strict=True))
        self.run(i, custom_mask_p=torch.ones(bits, dtype=torch.bool, device=self.device))


class MixedBatch(Subject):
    has_graphs = False

    def make(self) -> Any:
        return flashpage.attention.BatchAttention(device=self.device)

    def plan(self, i: int) -> None:
        indptr, indices, _ = self.pages(i)
        lengths = (indptr_of(self.rows[i]), indptr, indices, ints(*LENS[i]))
        types = {"q_data_type": self.dtype, "kv_data_type": self.dtype}
        self.wrapper.plan(*lengths, HEADS, KV_HEADS, DIM, DIM, PAGE, causal=True, **types, **self.of_batch(i))

    def run(self, i: int = 0, **options: Any) -> torch.Tensor:
        return self.wrapper.run(self.given(self.q, i), self.cache, out=self.given(self.out, i), **options)[0]

    def run_others(self, i: int) -> None:
        self.wrapper.run(self.given(self.q, i), self.cache, logits_soft_cap=3.0)


class BlockSparse(Subject):
    has_graphs = False

    def make(self) -> Any:
        return flashpage.sparse.BlockSparseAttentionWrapper(self.workspace())

    def plan(self, i: int) -> None:
        columns = torch.stack([torch.randperm(9, generator=torch.Generator().manual_seed(i))[:4] for _ in range(3)])
        blocks = (ints(0, 4, 8, 12), columns.flatten().int().to(self.device), MOST_ROWS, 9 * PAGE, 6, PAGE)
        types = {"q_data_type": self.dtype, "o_data_type": self.dtype}
        self.wrapper.plan(*blocks, HEADS, KV_HEADS, DIM, **types, **self.of_batch(i))

    def run(self, i: int = 0) -> torch.Tensor:
        k, v = (self.cache[:9, side].flatten(0, 1) for side in range(2))
        return self.wrapper.run(self.q, k, v, out=self.out)

    def used(self, i: int) -> int:
        return MOST_ROWS


class VariableSparse(Subject):
    has_graphs = False
    is_copied = True

    def make(self) -> Any:
        return flashpage.sparse.VariableBlockSparseAttentionWrapper(self.workspace())

    def plan(self, i: int) -> None:
        mask = torch.rand(KV_HEADS, 3, 5, generator=torch.Generator().manual_seed(i)) < 0.6
        sizes = ints(4, 10, 4).expand(KV_HEADS, 3), ints(16, 48, 8, 40, 31).expand(KV_HEADS, 5)
        self.wrapper.plan(mask, *sizes, HEADS, KV_HEADS, DIM, q_data_type=self.dtype, **self.of_batch(i))

    def run(self, i: int = 0) -> torch.Tensor:
        q, k, v = (t.transpose(0, 1).contiguous() for t in (self.q, self.k, self.v))
        return self.wrapper.run(q, k, v).transpose(0, 1)

    def used(self, i: int) -> int:
        return MOST_ROWS


class SharedPrefix(Subject):
    """`forward` plans the shared prefix itself, in each call."""

    has_graphs = False

    def make(self) -> Any:
        return flashpage.cascade.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(self.workspace())

    def plan(self, i: int) -> None:
        self.wrapper.begin_forward(indptr_of(self.rows[i]), *self.pages(i), HEADS, KV_HEADS, DIM, PAGE)

    def run(self, i: int = 0, prefix: int = 100) -> torch.Tensor:
        q = self.given(self.q, i)
        return self.wrapper.forward(q, self.k[:prefix], self.v[:prefix], self.cache, causal=True)

    def run_others(self, i: int) -> None:
        self.run(i, prefix=30)
        self.run(i, prefix=143)


class Single(Subject):
    """A function for a single request. All calls of a thread use one wrapper, and each plans."""

    has_graphs = False

    def make(self) -> None:
        return None

    def plan(self, i: int) -> None:
        pass

    def run(self, i: int = 0) -> torch.Tensor:
        return flashpage.single_prefill_with_kv_cache(self.q, self.k, self.v, causal=True, **self.of_batch(i))

    def used(self, i: int) -> int:
        return MOST_ROWS
