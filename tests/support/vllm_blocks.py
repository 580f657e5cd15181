"""Sequences in vLLM's cache of blocks, with NaN in every slot without a token, and the expected attention."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from caches import poison
from cases.case import Case
from comparison import Outputs, compare
from reference import Options, State, attention

FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
K_SCALE, V_SCALE = 0.5, 0.25


@dataclasses.dataclass(frozen=True)
class BlockCase:
    """Lengths, heads and options of one call."""

    name: str
    seq_lens: tuple[int, ...] = (70, 0, 1, 16, 33)
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 64
    block_size: int = 16
    dtype: str = "bfloat16"
    kv_cache_dtype: str = "auto"
    alibi: bool = False
    sparse: tuple[int, int, int, int, int] | None = None  # tp_rank, local_blocks, vert_stride, block size, step
    strided: bool = False  # query is a slice of wider rows

    def __str__(self) -> str:
        return self.name


class Blocks:
    """A case's tensors on the CPU."""

    def __init__(self, case: BlockCase) -> None:
        self.case = case
        generator = torch.Generator().manual_seed(len(case.name) + case.head_size)
        self.dtype = getattr(torch, case.dtype)
        self.kv_type = FP8.get(case.kv_cache_dtype, self.dtype)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        self.query = random(len(case.seq_lens), case.num_heads, case.head_size).to(self.dtype)
        shape = (case.num_kv_heads, case.head_size)
        self.k, self.v = ([random(n, *shape).to(self.kv_type) for n in case.seq_lens] for _ in range(2))
        self.slopes = random(case.num_heads).abs() * 0.1 if case.alibi else None
        counts = [-(-n // case.block_size) for n in case.seq_lens]
        self.num_blocks = sum(counts) + 3
        order = torch.randperm(self.num_blocks, generator=generator).int()
        self.tables = torch.full((len(counts), max(counts, default=0) + 1), 2**30, dtype=torch.int32)
        begin = 0
        for i, count in enumerate(counts):
            self.tables[i, :count] = order[begin : begin + count]
            begin += count
        self.key_cache, self.value_cache = self._caches()

    def _caches(self) -> tuple[torch.Tensor, torch.Tensor]:
        case, x = self.case, 16 // self.kv_type.itemsize
        heads, size = case.num_kv_heads, case.head_size
        key_cache = poison(torch.empty(self.num_blocks, heads, size // x, case.block_size, x, dtype=self.kv_type))
        value_cache = poison(torch.empty(self.num_blocks, heads, size, case.block_size, dtype=self.kv_type))
        for i, (k, v) in enumerate(zip(self.k, self.v, strict=True)):
            token = torch.arange(len(k))
            block, offset = self.tables[i, token // case.block_size].long(), token % case.block_size
            key_cache[block, :, :, offset] = k.view(-1, heads, size // x, x)
            value_cache[block, :, :, offset] = v
        return key_cache, value_cache

    def arguments(self, device: str) -> list[Any]:
        """The arguments after out (v2: after its three tensors too)."""
        case, query = self.case, self.query.to(device)
        if case.strided:
            wide = torch.full(
                (len(query), case.num_heads + 3, case.head_size), math.nan, dtype=self.dtype, device=device
            )
            wide[:, : case.num_heads] = query
            query = wide[:, : case.num_heads]
        caches = [t.to(device) for t in (self.key_cache, self.value_cache)]
        if case.kv_cache_dtype != "auto":
            caches = [t.view(torch.uint8) for t in caches]
        lens = torch.tensor(case.seq_lens, dtype=torch.int32, device=device)
        scales = [torch.tensor(s, device=device) for s in (K_SCALE, V_SCALE)]
        slopes = None if self.slopes is None else self.slopes.to(device)
        numbers = (case.num_kv_heads, case.head_size**-0.5, self.tables.to(device), lens)
        rest = (case.block_size, max(case.seq_lens, default=0), slopes, case.kv_cache_dtype)
        return [query, *caches, *numbers, *rest, *scales, *(case.sparse or ())]

    def out(self, device: str) -> torch.Tensor:
        return torch.full_like(self.query, math.nan, device=device)

    def expected(self) -> list[State]:
        """The expected attention, sequence by sequence."""
        case = self.case
        scales = {"k_scale": K_SCALE, "v_scale": V_SCALE} if case.kv_cache_dtype != "auto" else {}
        found = []
        for i, (k, v) in enumerate(zip(self.k, self.v, strict=True)):
            options = Options(
                sm_scale=case.head_size**-0.5,
                alibi_slopes=self.slopes,
                mask_mod=self._pattern(len(k)) if case.sparse and case.sparse[2] > 1 else None,
                **scales,
            )
            found.append(attention(self.query[i : i + 1], k, v, options))
        return found

    def _pattern(self, seq_len: int) -> Any:
        """Whether a block of the pattern is near the last token's, or one of the vertical stripes."""
        tp_rank, local, stride, size, step = self.case.sparse  # type: ignore[misc]
        group, own = self.case.num_heads // self.case.num_kv_heads, (seq_len - 1) // size

        def is_visible(b: int, head: int, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
            if step >= 0:
                offset = (tp_rank * self.case.num_heads + head) * step + 1
            else:
                offset = (tp_rank * self.case.num_kv_heads + head // group) * -step + 1
            block = kv_idx // size
            return (own - block < local) | ((block + offset) % stride == 0)

        return is_visible

    def check(self, out: torch.Tensor, slack: float = 1.0) -> None:
        """Compares with the reference; `slack` > 1: parts were rounded before they were merged."""
        case = self.case
        if not case.seq_lens:
            assert out.shape == self.query.shape
            return
        as_case = Case(
            case.name,
            "a call of vLLM's operators",
            kv_lens=case.seq_lens,
            q_lens=(1,) * len(case.seq_lens),
            num_q_heads=case.num_heads,
            num_kv_heads=case.num_kv_heads,
            head_dim=case.head_size,
            q_dtype=case.dtype,
            kv_dtype=str(self.kv_type).removeprefix("torch."),
            position="ALIBI" if case.alibi else "NONE",
            scales="float" if case.kv_cache_dtype != "auto" else "",
        )
        states = [
            dataclasses.replace(s, magnitude=s.magnitude * slack, spread=s.spread * slack) for s in self.expected()
        ]
        compare(as_case, Outputs(out, None), states)
