"""The attention layers of common models, as batches for the wrappers, and what the results must be."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..decode import BatchDecodeWithPagedKVCacheWrapper
from ..mla import BatchMLAPagedAttentionWrapper, MLAPlanMetadata
from ..prefill import BatchPrefillWithPagedKVCacheWrapper

Run = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # of q and the cache: output and LSEs
WORKSPACE_BYTES = {"cpu": 64 << 20, "cuda": 256 << 20}


@dataclasses.dataclass(frozen=True)
class Layer:
    """The attention of one model; `tail`: columns of its latent rows after the values (MLA)."""

    model: str
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    window_left: int = -1
    soft_cap: float = 0.0
    has_sinks: bool = False
    q_dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype = torch.bfloat16
    tail: int = 0
    page_size: int = 16  # tokens

    @property
    def sm_scale(self) -> float:
        return (self.head_dim + self.tail) ** -0.5

    @property
    def most_error(self) -> float:
        """The largest error of a right output, relative to the reference's norm. Outputs have bf16, and weights of fp8
        products e4m3."""
        return 1e-2 if self.q_dtype is torch.bfloat16 else 6e-2


LAYERS = (
    Layer("Llama 3 8B", 32, 8, 128),
    Layer("Llama 3.2 1B", 32, 8, 64),
    Layer("Llama 3 8B, pages of one token", 32, 8, 128, page_size=1),  # as SGLang has them
    Layer("Llama 3 8B, fp8 cache", 32, 8, 128, kv_dtype=torch.float8_e4m3fn),
    Layer("Llama 3 8B, all fp8", 32, 8, 128, q_dtype=torch.float8_e4m3fn, kv_dtype=torch.float8_e4m3fn),
    Layer("Phi-3 mini, fp8 cache", 32, 32, 96, kv_dtype=torch.float8_e4m3fn),
    Layer("Gemma 2 9B", 16, 8, 256, soft_cap=50.0),
    Layer("Gemma 3 4B, window", 8, 4, 256, window_left=1023),
    Layer("gpt-oss 20B, window", 64, 8, 64, window_left=127, has_sinks=True),
    Layer("DeepSeek-V3, 16 heads", 16, 1, 512, tail=64),
)
QUICK = LAYERS[:2]


@dataclasses.dataclass(frozen=True)
class Batch:
    """Query rows and tokens of each request."""

    kind: str  # decode | prefill
    rows: tuple[int, ...]
    tokens: tuple[int, ...]
    name: str = ""  # instead of the kind


LONG = Batch("decode", (1, 1), (9000, 5), "long decode")  # cut into pieces that are merged
DECODE = Batch("decode", (1, 1, 1, 1), (1300, 17, 300, 1))
PREFILL = Batch("prefill", (200, 33, 1, 129), (200, 300, 65, 900))


class Case:
    """One layer over one batch on a device. Its tensors are made for each use, so that one case at a time has them."""

    def __init__(self, layer: Layer, batch: Batch, device: torch.device) -> None:
        self.layer, self.batch, self.device = layer, batch, device
        pages = [-(-n // layer.page_size) for n in batch.tokens]
        self.q_indptr, self.indptr = _indptr(batch.rows), _indptr(pages)
        self.indices = torch.randperm(sum(pages), generator=_numbers()).int()
        self.sinks = torch.randn(layer.num_q_heads, generator=_numbers()) if layer.has_sinks else None
        columns = layer.head_dim + layer.tail
        heads = (1,) if layer.tail else (2, layer.num_kv_heads)  # latent rows are keys and values
        self._q_shape = (sum(batch.rows), layer.num_q_heads, columns)
        self._cache_shape = (sum(pages), *heads[:1], layer.page_size, *heads[1:], columns)

    @property
    def name(self) -> str:
        return f"{self.layer.model}, {self.batch.name or self.batch.kind}"

    def tensors(self) -> tuple[Tensor, Tensor]:
        """q and the cache, on the CPU."""
        make, count = _numbers(), math.prod(self._cache_shape)
        q = torch.randn(self._q_shape, generator=make).bfloat16().to(self.layer.q_dtype)
        # Random numbers of a large cache would take long: a million of them are repeated. Their count is odd, so that
        # no two pages are equal.
        some = torch.randn(min((1 << 20) - 3, count), generator=make).bfloat16().to(self.layer.kv_dtype)
        return q, some.repeat(-(-count // len(some)))[:count].view(self._cache_shape)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values that a decode reads."""
        of_page = math.prod(self._cache_shape[1:]) * self.layer.kv_dtype.itemsize
        return sum(self.batch.tokens) * of_page // self.layer.page_size

    @property
    def flops(self) -> float:
        """Operations over visible pairs of causal rows and tokens."""
        lengths = zip(self.batch.rows, self.batch.tokens, strict=True)
        pairs = sum(rows * (tokens - (rows - 1) / 2) for rows, tokens in lengths)
        return 4 * pairs * self.layer.num_q_heads * self.layer.head_dim

    def plan(self, workspace: Tensor) -> Run:
        """Compiles or finds the kernels and plans; returns the run."""
        layer, indices = self.layer, self.indices.to(self.device)
        if layer.tail:
            return self._plan_latent(workspace, indices)
        last = torch.tensor([(n - 1) % layer.page_size + 1 for n in self.batch.tokens], dtype=torch.int32)
        heads = (layer.num_q_heads, layer.num_kv_heads, layer.head_dim, layer.page_size)
        values: dict[str, Any] = {
            "q_data_type": layer.q_dtype,
            "kv_data_type": layer.kv_dtype,
            "window_left": layer.window_left,
            "logits_soft_cap": layer.soft_cap or None,
            "sm_scale": layer.sm_scale,
        }
        wrapper: Any
        if self.batch.kind == "decode":
            wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace)
            wrapper.plan(self.indptr, indices, last, *heads, **values)
        else:
            wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace)
            wrapper.plan(self.q_indptr, self.indptr, indices, last, *heads, causal=True, **values)
        sinks = {} if self.sinks is None else {"sinks": self.sinks.to(self.device)}
        return lambda q, cache: wrapper.run(q, cache, return_lse=True, **sinks)

    def _plan_latent(self, workspace: Tensor, indices: Tensor) -> Run:
        layer = self.layer
        wrapper = BatchMLAPagedAttentionWrapper(workspace)
        metadata = MLAPlanMetadata.csr(self.q_indptr, self.indptr, indices, torch.tensor(self.batch.tokens))
        wrapper.plan(
            metadata=metadata,
            num_heads=layer.num_q_heads,
            head_dim_ckv=layer.head_dim,
            head_dim_kpe=layer.tail,
            page_size=layer.page_size,
            causal=True,
            sm_scale=layer.sm_scale,
            q_data_type=torch.bfloat16,
        )

        def run(q: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
            halves = [layer.head_dim, layer.tail]
            (q_nope, q_pe), (ckv, kpe) = q.split(halves, dim=-1), cache[:, 0].split(halves, dim=-1)
            found: tuple[Tensor, Tensor] = wrapper.run(q_nope, q_pe, ckv, kpe, return_lse=True)
            return found

        return run

    def expected(self, q: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        """Output and LSEs (base 2) in fp32, by torch on the CPU."""
        made = [self._expected_of(i, q, cache) for i in range(len(self.batch.rows))]
        return torch.cat([out for out, _ in made]), torch.cat([lse for _, lse in made])

    def _expected_of(self, i: int, q: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        layer, rows, tokens = self.layer, self.batch.rows[i], self.batch.tokens[i]
        q = q[self.q_indptr[i] : self.q_indptr[i + 1]].float()
        pages = cache[self.indices[self.indptr[i] : self.indptr[i + 1]].long()].float()
        k, v = pages[:, 0], pages[:, -1, ..., : layer.head_dim]
        k, v = (x.reshape(-1, layer.num_kv_heads, x.shape[-1])[:tokens] for x in (k, v))
        k, v = (x.repeat_interleave(layer.num_q_heads // layer.num_kv_heads, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * layer.sm_scale
        if layer.soft_cap:
            scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
        distance = torch.arange(tokens - rows, tokens)[:, None] - torch.arange(tokens)
        is_hidden = (distance < 0) | ((distance > layer.window_left) & (layer.window_left >= 0))
        scores = scores.masked_fill(is_hidden, float("-inf"))
        if self.sinks is not None:
            scores = torch.cat([scores, self.sinks[:, None, None].expand(-1, rows, 1)], dim=-1)
        weights = scores.softmax(-1)[..., :tokens]
        lse = scores.logsumexp(-1).T / torch.log(torch.tensor(2.0))
        return torch.einsum("hqk,khd->qhd", weights, v), lse


def _indptr(counts: Any) -> Tensor:
    return torch.tensor([0, *counts]).cumsum(0).int()


def _numbers() -> torch.Generator:
    return torch.Generator().manual_seed(0)
