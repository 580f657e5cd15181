"""The benchmarks' workloads: batches with page tables, and the named cases of decode and prefill."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from latent_stores import token_bytes
from torch import Tensor

from flashpage.cli.values import distribution


def indptr(lens: list[int]) -> Tensor:
    """Start of each request and the total, int32 [batch + 1], on the host."""
    return torch.tensor([0, *lens]).cumsum(0).to(torch.int32)


class Paged:
    """The page table of a batch, its pages shuffled; lengths on the host, indices on the device."""

    def __init__(self, kv_lens: list[int], page_size: int, device: torch.device) -> None:
        self.kv_lens, self.page_size, self.device = kv_lens, page_size, device
        self.batch = len(kv_lens)
        pages = [-(-n // page_size) for n in kv_lens]
        self.indptr = indptr(pages)
        self.num_pages = sum(pages)
        self.shuffled = torch.randperm(self.num_pages, generator=torch.Generator().manual_seed(1)).to(torch.int32)
        self.indices = self.shuffled.to(device)
        self.last_page_len = torch.tensor([(n - 1) % page_size + 1 for n in kv_lens], dtype=torch.int32)

    def cache(self, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
        """Random keys and values [pages, 2, page_size, num_kv_heads, head_dim]."""
        shape = (self.num_pages, 2, self.page_size, num_kv_heads, head_dim)
        values = torch.empty(shape, device=self.device, dtype=torch.bfloat16).normal_()
        return values if dtype == torch.bfloat16 else (values * 0.5).to(dtype)

    def rectangular(self) -> Tensor:
        """The table as [batch, most pages], zero-padded, on the device, for peers that need it."""
        table = torch.zeros(self.batch, int(self.indptr.diff().max()), dtype=torch.int32)
        for i in range(self.batch):
            own = self.shuffled[int(self.indptr[i]) : int(self.indptr[i + 1])]
            table[i, : len(own)] = own
        return table.to(self.device)

    def request(self, cache: Tensor, i: int) -> tuple[Tensor, Tensor]:
        """Keys and values [kv_len, num_kv_heads, head_dim] of one request."""
        pages = cache[self.indices[int(self.indptr[i]) : int(self.indptr[i + 1])].long()].to(torch.bfloat16)
        k, v = (pages[:, j].reshape(-1, *cache.shape[3:])[: self.kv_lens[i]] for j in (0, 1))
        return k, v


def chat(batch: int, mean: int, sigma: float = 1.1) -> list[int]:
    """Lengths like those of chat traffic, drawn from a lognormal distribution; equal in every call."""
    draws = torch.randn(batch, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    weights = (sigma * draws).exp()
    return [max(1, round(n)) for n in (weights * (mean * batch / weights.sum())).tolist()]


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of a table. `page_size` 0: ragged."""

    name: str
    batch: int
    q_len: int  # mean rows a request
    kv_len: int  # mean tokens a request
    kind: str = "uniform"  # of flashpage.cli.values.KINDS, or chat
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    head_dim_vo: int = 0  # 0: as head_dim
    page_size: int = 16
    causal: bool = True
    window_left: int = -1  # tokens that a row sees before its own; -1: all
    kv_dtype: torch.dtype = torch.bfloat16
    q_dtype: torch.dtype = torch.bfloat16
    soft_cap: float = 0.0  # 0: none
    has_sinks: bool = False  # a logit of each query head that has no value
    has_one_sign: bool = False  # V has no negative element, so that the output's sums do not cancel

    def lens(self, mean: int) -> list[int]:
        return chat(self.batch, mean) if self.kind == "chat" else distribution(self.kind, self.batch, mean)

    @property
    def q_lens(self) -> list[int]:
        return [1] * self.batch if self.q_len == 1 else self.lens(self.q_len)

    @property
    def kv_lens(self) -> list[int]:
        return self.q_lens if self.kv_len == self.q_len else self.lens(self.kv_len)

    @property
    def is_decode(self) -> bool:
        """Whether it is timed as a graph's replay, as engines run decode."""
        return self.q_len == 1

    @property
    def unit(self) -> str:
        """The rate that limits it."""
        return "gb_per_s" if self.is_decode else "tflop_per_s"

    @property
    def value_dim(self) -> int:
        return self.head_dim_vo or self.head_dim

    @property
    def columns(self) -> int:
        """Elements of a row of q and its output together; also of a token's K and V."""
        return self.head_dim + self.value_dim

    @property
    def token_elements(self) -> int:
        """Elements of the cache for one token."""
        return self.num_kv_heads * self.columns

    @property
    def token_bytes(self) -> int:
        """Bytes of the cache for one token."""
        return self.token_elements * self.kv_dtype.itemsize

    def shrunk(self) -> Case:
        """This case in a size that a CPU runs at once, to check the benchmark itself."""
        batch = min(self.batch, 2)
        q_len, kv_len = min(self.q_len, 16), min(self.kv_len, 16 if self.kv_len == self.q_len else 48)
        return dataclasses.replace(self, batch=batch, q_len=q_len, kv_len=kv_len, window_left=min(self.window_left, 8))

    def visible(self, q_len: int, kv_len: int) -> int:
        """Number of (row, visible token) pairs of one request."""
        last = torch.arange(kv_len - q_len, kv_len) if self.causal else torch.full((q_len,), kv_len - 1)
        first = torch.arange(kv_len - q_len, kv_len) - self.window_left if self.window_left >= 0 else torch.zeros(q_len)
        return int((last - first.clamp(min=0) + 1).sum())


@dataclasses.dataclass(frozen=True)
class LatentCase(Case):
    """Attention over latent rows (MLA), whose first `head_dim_vo` columns are V as well; every request has `q_len`
    rows."""

    num_q_heads: int = 128
    num_kv_heads: int = 1
    head_dim: int = 576
    head_dim_vo: int = 512
    page_size: int = 64
    # "": bf16; e4m3 with one scale (tensor) or a scale for 128 columns of a token (tokens); deepseek_v32: 656 bytes
    row_format: str = ""

    def __post_init__(self) -> None:
        """latent_peers.py makes bf16 tensors and calls all libraries without these options."""
        ignored = ("causal", "window_left", "kv_dtype", "q_dtype", "soft_cap", "has_sinks", "has_one_sign")
        for field in dataclasses.fields(Case):
            if field.name in ignored and (given := getattr(self, field.name)) != field.default:
                raise ValueError(f"{field.name}={given} is not timed over latent rows: leave it out.")

    @property
    def q_lens(self) -> list[int]:
        return [self.q_len] * self.batch

    @property
    def kv_lens(self) -> list[int]:
        return [max(n, self.q_len) for n in self.lens(self.kv_len)]

    @property
    def is_decode(self) -> bool:
        return True

    @property
    def unit(self) -> str:
        return "gb_per_s" if self.q_len * self.num_q_heads <= (32 if self.row_format else 64) else "tflop_per_s"

    @property
    def token_elements(self) -> int:
        return self.head_dim

    @property
    def token_bytes(self) -> int:
        return token_bytes(self.row_format, self.head_dim, self.head_dim_vo)


DECODE = [
    Case("batch 1, context 1k", 1, 1, 1024),
    Case("batch 1, context 32k", 1, 1, 32768),
    Case("batch 1, context 128k", 1, 1, 131072),
    Case("batch 16, context 4k", 16, 1, 4096),
    Case("batch 64, context 4k", 64, 1, 4096),
    Case("batch 64, context 4k, page 1", 64, 1, 4096, page_size=1),
    Case("batch 64, context 4k, page 64", 64, 1, 4096, page_size=64),
    Case("batch 64, context 4k, lognormal", 64, 1, 4096, "lognormal"),
    Case("batch 64, context 4k, Zipf", 64, 1, 4096, "zipf"),
    Case("batch 64, context 4k, one long", 64, 1, 4096, "one-long"),
    Case("batch 256, context 1k", 256, 1, 1024),
    Case("70B at TP8, batch 64, context 8k", 64, 1, 8192, num_q_heads=8, num_kv_heads=1),
    Case("MHA 32/32, batch 32, context 4k", 32, 1, 4096, num_kv_heads=32),
    Case("d 64, batch 64, context 4k", 64, 1, 4096, head_dim=64),
    Case("d 256, batch 32, context 4k", 32, 1, 4096, num_q_heads=16, head_dim=256),
    Case("e4m3 KV, batch 64, context 4k", 64, 1, 4096, kv_dtype=torch.float8_e4m3fn),
]

_E4M3 = {"q_dtype": torch.float8_e4m3fn, "kv_dtype": torch.float8_e4m3fn}

FP8_PREFILL = [  # queries are fp8 too, as FlashAttention-3 takes them
    Case("e4m3, ragged 1 x 16k", 1, 16384, 16384, page_size=0, **_E4M3),
    Case("e4m3, ragged 1 x 16k, not causal", 1, 16384, 16384, page_size=0, causal=False, **_E4M3),
    Case("e4m3, ragged 16 x 1k", 16, 1024, 1024, page_size=0, **_E4M3),
    Case("e4m3, ragged 4 x 4k", 4, 4096, 4096, page_size=0, **_E4M3),
    *(
        Case(f"e4m3, ragged 64/8 heads, 1 x {n}k", 1, n << 10, n << 10, num_q_heads=64, page_size=0, **_E4M3)
        for n in (4, 8, 16, 32)
    ),
    Case("e4m3, ragged d 64, 1 x 16k", 1, 16384, 16384, head_dim=64, page_size=0, **_E4M3),
    Case("e4m3, ragged d 256, 1 x 16k", 1, 16384, 16384, num_q_heads=16, head_dim=256, page_size=0, **_E4M3),
    Case("e4m3, ragged 1 x 16k, V of one sign", 1, 16384, 16384, page_size=0, has_one_sign=True, **_E4M3),
    Case("e4m3, page 16, 1 x 16k", 1, 16384, 16384, **_E4M3),
    Case("e4m3, page 16, 4 x 4k", 4, 4096, 4096, **_E4M3),
    Case("e4m3, chunk 2048 on 128k, page 16", 1, 2048, 131072, **_E4M3),
]

_E4M3_KV: dict[str, Any] = {"kv_dtype": torch.float8_e4m3fn}

FP8_KV = [  # queries are bf16
    *(Case(f"e4m3 KV, d {dim}, 64 x 4k", 64, 1, 4096, head_dim=dim, **_E4M3_KV) for dim in (128, 112, 96, 80, 64)),
    Case("e5m2 KV, d 128, 64 x 4k", 64, 1, 4096, kv_dtype=torch.float8_e5m2),
    Case("e4m3 KV, 1 x 32k", 1, 1, 32768, **_E4M3_KV),
    Case("bf16 KV, 3 x 9k", 3, 1, 9216),
    Case("e4m3 KV, 3 x 9k", 3, 1, 9216, **_E4M3_KV),
    Case("e4m3 KV, 8/1 heads, 64 x 8k", 64, 1, 8192, num_q_heads=8, num_kv_heads=1, **_E4M3_KV),
]

_GROUP = {f"group size {group}, batch 64, context 4k": group for group in (1, 2, 5, 7, 8, 16)}
_MQA = {"num_q_heads": 128, "num_kv_heads": 1}
_SIXTEEN: dict[str, Any] = {"num_q_heads": 16, "num_kv_heads": 1}  # a rank's share of many models

MORE_DECODE = [  # other shapes, so that nothing is tuned to the table above alone
    Case("batch 128, context 8k", 128, 1, 8192),
    Case("batch 32, context 32k", 32, 1, 32768),
    Case("batch 256, chat", 256, 1, 1500, "chat"),
    *(Case(name, 64, 1, 4096, num_q_heads=8 * group, num_kv_heads=8) for name, group in _GROUP.items()),
    Case("group size 128, batch 64, context 4k", 64, 1, 4096, **_MQA),
    *(Case(f"batch 64, context 4k, page {page}", 64, 1, 4096, page_size=page) for page in (8, 32, 128, 256)),
    *(Case(f"d {dim}, batch 64, context 4k", 64, 1, 4096, head_dim=dim) for dim in (80, 96)),
    Case("16/1 heads, batch 1, context 32k", 1, 1, 32768, **_SIXTEEN),
    Case("16/1 heads, batch 8, context 4k, lognormal", 8, 1, 4096, "lognormal", **_SIXTEEN),
    Case("16/1 heads, batch 64, context 4k, one long", 64, 1, 4096, "one-long", **_SIXTEEN),
    Case("batch 256, context 1k, lognormal", 256, 1, 1024, "lognormal"),
    Case("e4m3 KV, batch 64, context 4k, lognormal", 64, 1, 4096, "lognormal", kv_dtype=torch.float8_e4m3fn),
    Case("e4m3 KV, batch 256, context 1k, lognormal", 256, 1, 1024, "lognormal", kv_dtype=torch.float8_e4m3fn),
]

CONTEXTS = [Case(f"batch 16, context {n:,}", 16, 1, n) for n in (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)]

PREFILL = [
    Case("ragged 16 x 1k", 16, 1024, 1024, page_size=0),
    Case("ragged 4 x 4k", 4, 4096, 4096, page_size=0),
    Case("ragged 1 x 16k", 1, 16384, 16384, page_size=0),
    Case("ragged 1 x 16k, not causal", 1, 16384, 16384, page_size=0, causal=False),
    Case("ragged d 64, 1 x 16k", 1, 16384, 16384, head_dim=64, page_size=0),
    Case("ragged d 256, 1 x 16k", 1, 16384, 16384, num_q_heads=16, head_dim=256, page_size=0),
    Case("ragged, 16 lognormal, mean 2k", 16, 2048, 2048, "lognormal", page_size=0),
    Case("page 16, 4 x 4k", 4, 4096, 4096),
    Case("page 1, 4 x 4k", 4, 4096, 4096, page_size=1),
    Case("page 16, 1 x 16k", 1, 16384, 16384),
    Case("append 512 rows on 16k, 4 requests", 4, 512, 16384),
    Case("append 8 rows on 8k, 32 requests", 32, 8, 8192),
]

_RAGGED_8K = {"batch": 1, "q_len": 8192, "kv_len": 8192, "page_size": 0}
_HEADS = {1: (16, 16), 4: (32, 8), 5: (40, 8), 8: (32, 4), 64: (64, 1)}  # by group size
_DIMS = (16, 40, 64, 80, 96, 112, 128, 160, 192, 256, 320, 512)

MORE_PREFILL = [  # other shapes, so that nothing is tuned to the table above alone
    Case("ragged 1 x 512", 1, 512, 512, page_size=0),
    Case("ragged 32 x 512", 32, 512, 512, page_size=0),
    Case("ragged, 64 lognormal, mean 1k", 64, 1024, 1024, "lognormal", page_size=0),
    Case("ragged 1 x 64k", 1, 65536, 65536, page_size=0),
    Case("ragged 1 x 128k", 1, 131072, 131072, page_size=0),
    *(
        Case(f"group size {group}, ragged 1 x 8k", num_q_heads=q_heads, num_kv_heads=kv_heads, **_RAGGED_8K)
        for group, (q_heads, kv_heads) in _HEADS.items()
    ),
    Case("window 512, page 16, 4 x 4k", 4, 4096, 4096, window_left=511),
    Case("window 4096, page 16, 1 x 32k", 1, 32768, 32768, window_left=4095),
    Case("chunk 2048 on 32k, page 16", 1, 2048, 32768),
    Case("chunk 2048 on 128k, page 16", 1, 2048, 131072),
    Case("1k rows on 3k shared before, page 16, 16 requests", 16, 1024, 4096),
    *(Case(f"d {dim}, ragged 1 x 8k", head_dim=dim, num_q_heads=16, num_kv_heads=4, **_RAGGED_8K) for dim in _DIMS),
]

_SMALL = ((1, 128), (4, 128), (8, 128), (32, 128), (2, 256), (1, 512), (8, 512))  # prompts, and rows of each

SMALL_PREFILL = [  # so few rows that a call's fixed costs count
    *(Case(f"ragged {batch} x {rows}", batch, rows, rows, page_size=0) for batch, rows in _SMALL),
    *(Case(f"page 16, {batch} x {rows}", batch, rows, rows) for batch, rows in ((1, 128), (4, 128), (8, 512))),
]

_FOUR_4K: dict[str, Any] = {"batch": 4, "q_len": 4096, "kv_len": 4096, "page_size": 0}
_WIDE: dict[str, Any] = {"num_q_heads": 16, "num_kv_heads": 8, "head_dim": 256}  # Gemma's heads

_GPT_OSS: dict[str, Any] = {"num_q_heads": 64, "num_kv_heads": 8, "head_dim": 64, "has_sinks": True}

OPTIONS = [  # what models need besides the causal mask
    Case("ragged 4 x 4k, soft cap", soft_cap=50.0, **_FOUR_4K),
    Case("ragged d 256, 4 x 4k, soft cap", soft_cap=50.0, **_WIDE, **_FOUR_4K),
    Case("ragged d 256, 4 x 4k, window 1024", window_left=1023, **_WIDE, **_FOUR_4K),
    Case("ragged d 96, 4 x 4k", head_dim=96, **_FOUR_4K),
    Case("ragged d 64, 64/8 heads, 4 x 4k, sinks", **_GPT_OSS, **_FOUR_4K),
    Case("ragged d 64, 64/8 heads, 4 x 4k, sinks, window 128", window_left=127, **_GPT_OSS, **_FOUR_4K),
    Case("d 64, 64/8 heads, batch 64, context 4k, sinks", 64, 1, 4096, **_GPT_OSS),
    Case("d 64, 64/8 heads, batch 64, context 4k, sinks, window 128", 64, 1, 4096, window_left=127, **_GPT_OSS),
    Case("batch 64, context 4k, soft cap", 64, 1, 4096, soft_cap=50.0),
    Case("d 256, batch 64, context 4k, soft cap", 64, 1, 4096, soft_cap=50.0, **_WIDE),
    Case("d 256, batch 64, context 4k, 16/2 heads", 64, 1, 4096, num_q_heads=16, num_kv_heads=2, head_dim=256),
]

MLA = [  # without tensor parallelism a card has 128 heads, with eight ranks 16
    LatentCase("128 heads, batch 1, context 4k", 1, 1, 4096),
    LatentCase("128 heads, batch 1, context 128k", 1, 1, 131072),
    LatentCase("128 heads, batch 64, context 4k", 64, 1, 4096),
    LatentCase("128 heads, batch 128, context 8k", 128, 1, 8192),
    LatentCase("128 heads, batch 32, context 32k", 32, 1, 32768),
    LatentCase("128 heads, batch 64, context 4k, lognormal", 64, 1, 4096, "lognormal"),
    LatentCase("128 heads, batch 64, context 4k, two rows", 64, 2, 4096),
    LatentCase("128 heads, batch 64, context 4k, page 1", 64, 1, 4096, page_size=1),
    LatentCase("96 heads, batch 64, context 4k", 64, 1, 4096, num_q_heads=96),
    LatentCase("64 heads, batch 64, context 4k", 64, 1, 4096, num_q_heads=64),
    LatentCase("32 heads, batch 128, context 4k", 128, 1, 4096, num_q_heads=32),
    LatentCase("16 heads, batch 128, context 8k", 128, 1, 8192, num_q_heads=16),
    LatentCase("16 heads, batch 16, context 2k", 16, 1, 2048, num_q_heads=16),
    LatentCase("16 heads, batch 1, context 1k", 1, 1, 1024, num_q_heads=16),
    LatentCase("16 heads, batch 1, context 32k", 1, 1, 32768, num_q_heads=16),
    LatentCase("16 heads, batch 8, context 4k, lognormal", 8, 1, 4096, "lognormal", num_q_heads=16),
    LatentCase("16 heads, batch 64, context 4k, lognormal", 64, 1, 4096, "lognormal", num_q_heads=16),
    LatentCase("16 heads, batch 64, context 4k, one long", 64, 1, 4096, "one-long", num_q_heads=16),
    LatentCase("16 heads, batch 128, context 4k, lognormal, page 1", 128, 1, 4096, "lognormal", 16, page_size=1),
]

MORE_MLA = [  # other shapes, so that nothing is tuned to the table above alone
    *(LatentCase(f"{n} heads, batch 64, context 4k", 64, 1, 4096, num_q_heads=n) for n in (20, 24, 40)),
    *(LatentCase(f"128 heads, batch 64, context 4k, page {page}", 64, 1, 4096, page_size=page) for page in (16, 32)),
    LatentCase("64 heads, batch 64, context 4k, page 1", 64, 1, 4096, num_q_heads=64, page_size=1),
    LatentCase("128 heads, batch 256, context 1k", 256, 1, 1024),
    LatentCase("16 heads, batch 256, context 1k, Zipf", 256, 1, 1024, "zipf", num_q_heads=16),
    LatentCase("128 heads, batch 64, context 4k, one long", 64, 1, 4096, "one-long"),
    LatentCase("64 heads, batch 64, context 4k, Zipf", 64, 1, 4096, "zipf", num_q_heads=64),
    LatentCase("16 heads, batch 64, context 4k, four rows", 64, 4, 4096, num_q_heads=16),
    LatentCase("16 heads, batch 64, context 4k, eight rows", 64, 8, 4096, num_q_heads=16),
    LatentCase("128 heads, batch 32, context 4k, four rows", 32, 4, 4096),
]

_FP8_ROWS = {"one scale": "tensor", "token scales": "tokens", "656 bytes": "deepseek_v32"}
_FP8_SHAPES: dict[str, dict[str, Any]] = {
    "context 4k": {"q_len": 1, "kv_len": 4096},
    "context 8k": {"q_len": 1, "kv_len": 8192},
    "context 4k, page 1": {"q_len": 1, "kv_len": 4096, "page_size": 1},
    "context 4k, two rows": {"q_len": 2, "kv_len": 4096},
    "context 4k, four rows": {"q_len": 4, "kv_len": 4096},
}

MLA_FP8 = [  # all tokens of a request, by pages
    *(
        LatentCase(f"{heads} heads, {what}, batch 64, {name}", 64, num_q_heads=heads, row_format=row_format, **shape)
        for what, row_format in _FP8_ROWS.items()
        for heads in (16, 32, 64, 128)
        for name, shape in _FP8_SHAPES.items()
    ),
    LatentCase("V3.2, 128 heads, batch 1, context 128k", 1, 1, 131072, row_format="deepseek_v32"),
    LatentCase("V3.2, 128 heads, batch 128, context 8k", 128, 1, 8192, row_format="deepseek_v32"),
    LatentCase("V3.2 at TP8, batch 128, lognormal", 128, 1, 8192, "lognormal", 16, row_format="deepseek_v32"),
    LatentCase("GLM-5, 64 heads, batch 32, context 32k", 32, 1, 32768, num_q_heads=64, row_format="deepseek_v32"),
    LatentCase("GLM-5, 64 heads, batch 64, lognormal", 64, 1, 4096, "lognormal", 64, row_format="deepseek_v32"),
    LatentCase("GLM-5 at TP8, batch 128, context 8k", 128, 1, 8192, num_q_heads=8, row_format="deepseek_v32"),
    *(
        LatentCase(
            f"64 heads, no rotated columns, {what}, batch 64, context 4k",
            *(64, 1, 4096),
            num_q_heads=64,
            head_dim=512,
            row_format=row_format,
        )
        for what, row_format in list(_FP8_ROWS.items())[:2]
    ),
]

_EXPANDED: dict[str, Any] = {"head_dim": 192, "head_dim_vo": 128, "page_size": 0}

EXPANDED = [  # prompts of such models: latent rows expanded to K and V of each head
    Case("192/128, 128 heads, 1 x 8k", 1, 8192, 8192, num_q_heads=128, num_kv_heads=128, **_EXPANDED),
    Case("192/128, 16 heads, 4 x 4k", 4, 4096, 4096, num_q_heads=16, num_kv_heads=16, **_EXPANDED),
    Case("192/128, 16 heads, 1 x 16k", 1, 16384, 16384, num_q_heads=16, num_kv_heads=16, **_EXPANDED),
    Case("192/128, 16 heads, 32 x 512", 32, 512, 512, num_q_heads=16, num_kv_heads=16, **_EXPANDED),
    Case("192/128, 64/4 heads, window 128, 4 x 4k", 4, 4096, 4096, "uniform", 64, 4, window_left=127, **_EXPANDED),
    Case("256/256, 16 heads, 4 x 4k", 4, 4096, 4096, num_q_heads=16, num_kv_heads=16, head_dim=256, page_size=0),
]
