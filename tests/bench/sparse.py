"""Decode over latent rows (MLA) in bf16 and in DeepSeek's rows of 656 bytes, by lists of tokens (sparse attention) and
by pages, in turns with FlashMLA where it is installed.

FlashMLA takes 64 and 128 heads; fewer are padded to 64, as engines do. `--small --device cpu` runs tiny shapes: it only
shows that the program works.

    python tests/bench/sparse.py --json sparse.jsonl
"""

from __future__ import annotations

import dataclasses
import importlib.util
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from command_line import Parser
from gpu import GpuClock, HostClock, rounds_of
from peers import Call
from record import Recorder

import flashpage
from flashpage.kernels.latent_formats import PACKED

SM_SCALE, PAGE, CKV, KPE = 192**-0.5, 64, 512, 64
ROW_BYTES = PACKED["deepseek_v32"].row_bytes


@dataclasses.dataclass(frozen=True)
class SparseCase:
    heads: int
    batch: int
    top_k: int = 2048  # 0: all tokens, by pages
    context: int = 8192

    @property
    def name(self) -> str:
        tokens = f"top-k {self.top_k:,}" if self.top_k else f"all of {self.context / 1024:g}k"
        return f"{self.heads} heads, batch {self.batch}, {tokens}"

    def shrunk(self) -> SparseCase:
        return dataclasses.replace(self, heads=min(self.heads, 16), batch=2, top_k=min(self.top_k, 100), context=256)


CASES = (
    *(SparseCase(heads, 128) for heads in (16, 32, 64)),
    SparseCase(128, 64),
    *(SparseCase(heads, 64, 0) for heads in (16, 64, 128)),
)


class SparseBatch:
    """A pool of each format with the same values, and each request's list of slots."""

    def __init__(self, case: SparseCase, device: torch.device) -> None:
        self.case, self.device = case, device
        tokens = case.batch * case.context
        kinds: dict[str, Any] = {"device": device, "dtype": torch.int32}
        self.rows = torch.randn(tokens, CKV + KPE, device=device).bfloat16()
        self.pages = torch.arange(tokens // PAGE, **kinds)
        self.page_indptr = torch.arange(case.batch + 1, **kinds) * (case.context // PAGE)
        self.lens = torch.full((case.batch,), case.context, **kinds)
        self.q = torch.randn(case.batch, case.heads, CKV + KPE, device=device).bfloat16()
        self.bf16 = self.rows.view(-1, PAGE, CKV + KPE)
        self.bytes = torch.zeros(tokens // PAGE, PAGE, ROW_BYTES, dtype=torch.uint8, device=device)
        token = torch.arange(tokens, **kinds)
        places = token // case.context, token % case.context
        last = torch.full((case.batch,), PAGE, **kinds)
        lists = (*places, self.bytes, None, self.pages, self.page_indptr, last)
        ckv, kpe = self.rows[:, :CKV].contiguous(), self.rows[:, CKV:].contiguous()
        flashpage.append_paged_mla_kv_cache(ckv, kpe, *lists, kv_row_format="deepseek_v32")
        listed = [torch.randperm(case.context)[: case.top_k] + i * case.context for i in range(case.batch)]
        self.lists = torch.stack(listed).int().to(device)

    def own_call(self, in_bytes: bool) -> Call:
        """flashpage over rows of 656 bytes, or over those of bf16."""
        size, case = 512 << 20 if self.device.type == "cuda" else 16 << 20, self.case
        workspace = torch.empty(size, dtype=torch.uint8, device=self.device)
        stored = {"kv_row_format": "deepseek_v32"} if in_bytes else {}
        cache = self.bytes if in_bytes else self.bf16
        sizes = {"num_heads": case.heads, "head_dim_ckv": CKV, "head_dim_kpe": KPE, "page_size": PAGE}
        kinds: dict[str, Any] = {"sm_scale": SM_SCALE, "q_data_type": torch.bfloat16} | stored
        if case.top_k:
            sparse = flashpage.BatchMLASparseAttentionWrapper(workspace)
            sparse.plan(self.lists, **sizes, **kinds)
            return lambda: sparse.run(query=self.q, kv_cache=cache)
        if not in_bytes:
            kinds["kv_data_type"] = torch.bfloat16
        wrapper = flashpage.BatchMLAPagedAttentionWrapper(workspace)
        q_indptr = torch.arange(case.batch + 1, dtype=torch.int32, device=self.device)
        metadata = flashpage.MLAPlanMetadata.csr(q_indptr, self.page_indptr, self.pages, self.lens)
        wrapper.plan(metadata=metadata, causal=False, **sizes, **kinds)
        return lambda: wrapper.run(query=self.q, kv_cache=cache)

    def flashmla_call(self) -> Call:
        import flash_mla

        case, heads = self.case, max(64, self.case.heads)
        q = torch.zeros(case.batch, 1, heads, CKV + KPE, dtype=torch.bfloat16, device=self.device)
        q[:, 0, : case.heads] = self.q
        schedule, cache = flash_mla.get_mla_metadata()[0], self.bytes.unsqueeze(2)
        options = {"indices": self.lists.unsqueeze(1), "is_fp8_kvcache": True, "softmax_scale": SM_SCALE}
        given = (q, cache, None, None, CKV, schedule)
        return lambda: flash_mla.flash_mla_with_kvcache(*given, **options, use_legacy=True)[0][:, 0, : case.heads]

    def error(self, out: torch.Tensor, in_bytes: bool) -> float:
        """Relative error of the first request against fp64 over the rows as they are stored."""
        places = self.lists[0].long() if self.case.top_k else slice(0, self.case.context)
        tokens = self._stored(places) if in_bytes else self.rows[places].double()
        scores = self.q[0].double() @ tokens.T * SM_SCALE
        expected = scores.softmax(-1) @ tokens[:, :CKV]
        return float((out[0].double() - expected).norm() / expected.norm())

    def _stored(self, places: torch.Tensor | slice) -> torch.Tensor:
        """Rows of 656 bytes: e4m3, four scales, and bf16."""
        numbers, scales, rest = self.bytes.flatten(0, 1)[places].split([CKV, 16, 2 * KPE], 1)
        factors = scales.contiguous().view(torch.float32).double().repeat_interleave(128, 1)
        left = numbers.contiguous().view(torch.float8_e4m3fn).double() * factors
        return torch.cat([left, rest.contiguous().view(torch.bfloat16).double()], 1)


def measure(case: SparseCase, device: torch.device, rounds: int, clock: GpuClock | HostClock) -> dict[str, Any]:
    torch.manual_seed(0)
    batch = SparseBatch(case, device)
    calls: dict[str, Call] = {"bf16": batch.own_call(False), "656 bytes": batch.own_call(True)}
    if case.top_k and device.type == "cuda" and importlib.util.find_spec("flash_mla"):
        calls["656 bytes by FlashMLA"] = batch.flashmla_call()
    found = {name: batch.error(call(), name != "bf16") for name, call in calls.items()}
    errors = {name: float(f"{error:.3g}") for name, error in found.items()}
    spent = rounds_of({name: clock.capture(call) for name, call in calls.items()}, rounds, clock)
    us = {name: round(statistics.median(times), 1) for name, times in spent.items()}
    print(f"| {case.name} | " + " | ".join(f"{name} {time} ({errors[name]})" for name, time in us.items()), flush=True)
    return {"us": us, "errors": errors}


def main_of(
    section: str, description: str | None, cases: Sequence[Any], measure: Callable[..., dict[str, Any]]
) -> None:
    """The program of a section: its options, and a line for each of its cases."""
    parser = Parser(description)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny shapes")
    parser.add_argument("--json", metavar="FILE", help="append the figures to this file")
    chosen = parser.parse_args()
    device, recorder = torch.device(chosen.device), Recorder(chosen.json)
    clock = GpuClock(chosen.repeats) if device.type == "cuda" else HostClock(chosen.repeats)
    for case in cases:
        if chosen.only in case.name:
            found = measure(case.shrunk() if chosen.small else case, device, chosen.rounds, clock)
            recorder.add(section, case.name, **found)


if __name__ == "__main__":
    main_of("sparse", __doc__, CASES, measure)
