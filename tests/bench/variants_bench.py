"""The cost of a user's variant against the built-in option of the same content, and of every option against none.

A row's ratio is the time of its first column over that of its second: 1 means that the variant (the option) is free.
The two are timed alternately by the clock of gpu.py: decode as a graph's replay after a flush of the L2. Masks use the
prefill wrapper, for decode too. Longer prompts: `options --only RoPE --cases 16k,4x4k,16k-pages,4x4k-pages`; custom
masks: `options --only "causal as" --cases 16k,4x4k,32x512,4x4k-dim-64,4x4k-dim-256`; scales, which may cost 3%, in
groups of 4, 5 and 16: `options --only scales --cases decode,4x4k-pages,16k,16k-group-5,16k-group-16`, with `-e4m3`
after a name for an e4m3 cache and, in prompts, e4m3 queries. `--peer flashinfer` adds the time of options by another
library of this interface (its backend fa2). `--device cpu` shows that the program works, nothing else.
"""

from __future__ import annotations

import dataclasses
import importlib
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from command_line import Parser
from gpu import GpuClock, HostClock
from peers import Batch, Call
from record import Recorder
from torch import Tensor
from workloads import Case

import flashpage

CASES = {
    "decode": Case("decode, batch 64, context 4k", 64, 1, 4096),
    "prefill": Case("prefill, ragged 1 x 8k", 1, 8192, 8192, page_size=0),
}
MORE_CASES = {  # for --cases
    "16k": Case("prefill, ragged 1 x 16k", 1, 16384, 16384, page_size=0),
    "4x4k": Case("prefill, ragged 4 x 4k", 4, 4096, 4096, page_size=0),
    "16k-pages": Case("prefill, 1 x 16k", 1, 16384, 16384),
    "4x4k-pages": Case("prefill, 4 x 4k", 4, 4096, 4096),
    "4x4k-page-1": Case("prefill, 4 x 4k, page 1", 4, 4096, 4096, page_size=1),
    "32x512": Case("prefill, ragged 32 x 512", 32, 512, 512, page_size=0),
    "16x1k": Case("prefill, ragged 16 x 1k", 16, 1024, 1024, page_size=0),
    "32x512-pages": Case("prefill, 32 x 512", 32, 512, 512),
    "16x1k-pages": Case("prefill, 16 x 1k", 16, 1024, 1024),
    "8x512": Case("prefill, ragged 8 x 512", 8, 512, 512, page_size=0),
    "1x1k": Case("prefill, ragged 1 x 1k", 1, 1024, 1024, page_size=0),
    "1x512": Case("prefill, ragged 1 x 512", 1, 512, 512, page_size=0),
    "4x4k-dim-64": Case("prefill, ragged 4 x 4k, dim 64", 4, 4096, 4096, head_dim=64, page_size=0),
    "4x4k-dim-256": Case("prefill, ragged 4 x 4k, dim 256", 4, 4096, 4096, head_dim=256, page_size=0),
}
E4M3 = torch.float8_e4m3fn
_OF_SCALES = ("16k", "4x4k-pages")
MORE_CASES |= {
    f"{name}-group-{q // kv}": dataclasses.replace(
        case, name=f"{case.name}, {q}/{kv} heads", num_q_heads=q, num_kv_heads=kv
    )
    for name, case in MORE_CASES.items()
    if name in _OF_SCALES
    for q, kv in ((40, 8), (64, 4))
}
MORE_CASES |= {
    f"{name}-e4m3": dataclasses.replace(case, name=f"{case.name}, e4m3", q_dtype=E4M3, kv_dtype=E4M3)
    for name, case in MORE_CASES.items()
    if name.startswith(_OF_SCALES)
}
MORE_CASES["decode-e4m3"] = dataclasses.replace(CASES["decode"], name=f"{CASES['decode'].name}, e4m3 KV", kv_dtype=E4M3)
LEAST_RATIO = 0.95  # bound for user's variants
CAP, DOCUMENTS, ROUNDS = 30.0, 8, 3
WINDOWS = (512, 1024, 4096)


@dataclasses.dataclass(frozen=True)
class Setting:
    """Arguments of one plan and run, in addition to those of plain attention."""

    plan: dict[str, Any] = dataclasses.field(default_factory=dict)
    run: dict[str, Any] = dataclasses.field(default_factory=dict)
    kv_dtype: torch.dtype | None = None  # None: the case's
    causal: bool = True
    as_prefill: bool = False  # decode through the paged prefill wrapper, which prefill rows use in any case


@dataclasses.dataclass(frozen=True)
class Row:
    name: str
    base: Setting
    other: Setting
    visible: float = 1.0  # pairs of a row and a token that the other setting computes, over those of the first


class Workload:
    """One batch, and calls that compute it with any setting."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.device = case, device
        self.batch = Batch(case, device)
        self.q_len, self.kv_len = case.q_lens[0], case.kv_lens[0]
        self.workspace = torch.empty(512 << 20 if device.type == "cuda" else 16 << 20, dtype=torch.uint8, device=device)

    def call(self, setting: Setting, library: str = "flashpage") -> Call:
        case, batch, module = self.case, self.batch, importlib.import_module(library)
        backend = {} if library == "flashpage" else {"backend": "fa2"}
        heads = (case.num_q_heads, case.num_kv_heads, case.head_dim)
        kv_dtype = setting.kv_dtype or case.kv_dtype
        values = {"q_data_type": case.q_dtype, "kv_data_type": kv_dtype, **setting.plan}
        if not case.page_size:
            ragged = module.BatchPrefillWithRaggedKVCacheWrapper(self.workspace, **backend)
            ragged.plan(batch.q_indptr, batch.kv_indptr, *heads, causal=setting.causal, **values)
            k, v = batch.k.to(kv_dtype), batch.v.to(kv_dtype)
            return lambda: output(ragged.run(batch.q, k, v, **setting.run))
        pages = (batch.table.indptr, batch.table.indices, batch.table.last_page_len)
        cache = batch.cache.to(kv_dtype)
        if setting.as_prefill or self.q_len > 1:
            wrapper = module.BatchPrefillWithPagedKVCacheWrapper(self.workspace, **backend)
            wrapper.plan(batch.q_indptr, *pages, *heads, case.page_size, causal=setting.causal, **values)
        else:
            wrapper = module.BatchDecodeWithPagedKVCacheWrapper(self.workspace)
            wrapper.plan(*pages, *heads, case.page_size, **values)
        return lambda: output(wrapper.run(batch.q, cache, **setting.run))

    def random(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=self.device).normal_()

    def documents(self) -> Tensor:
        """Each token's document, [batch, tokens] int32: DOCUMENTS documents of about equal length."""
        ids = torch.arange(self.kv_len, dtype=torch.int32, device=self.device) * DOCUMENTS // self.kv_len
        return ids.repeat(self.case.batch, 1)

    def mask(self, visible: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """`visible(q_idx, kv_idx)` of all requests, in the format of plan's custom_mask."""
        kv_idx = torch.arange(self.kv_len, device=self.device)
        q_idx = kv_idx[self.kv_len - self.q_len :].unsqueeze(1)
        return visible(q_idx, kv_idx).flatten().repeat(self.case.batch)


def output(result: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def variants(work: Workload) -> list[Row]:
    """Rows with a built-in option and a user's variant of the same content."""
    document = work.documents()
    ids = document[0]
    mask = work.mask(lambda q_idx, kv_idx: (ids[q_idx] == ids[kv_idx]) & (kv_idx <= q_idx))
    slopes = flashpage.variants.alibi_slopes(work.case.num_q_heads).to(work.device)
    if work.q_len == 1:
        bias, index = work.random(work.case.batch, work.case.num_q_heads, work.kv_len), "b, h, kv_idx"
        add_bias = lambda score, b, h, q_idx, kv_idx: score + bias[b, h, kv_idx]
    else:
        bias, index = work.random(work.case.num_q_heads, work.kv_len, work.kv_len), "h, q_idx, kv_idx"
        add_bias = lambda score, b, h, q_idx, kv_idx: score + bias[h, q_idx, kv_idx]

    def score_mod(function: Callable[..., Any]) -> Setting:
        return Setting({"variant": flashpage.Variant(function)})

    def mask_mod(function: Callable[..., Any], causal: bool) -> Setting:
        return Setting({"variant": flashpage.Variant(mask_mod=function)}, causal=causal, as_prefill=True)

    custom = Setting({"custom_mask": mask}, causal=False, as_prefill=True)
    same = lambda b, h, q_idx, kv_idx: document[b, q_idx] == document[b, kv_idx]
    by_hand = Setting({"variant": flashpage.Variant(logit=f"score + bias[{index}]", tensors={"bias": bias})})
    return [
        Row(
            "document mask against custom_mask",
            custom,
            mask_mod(lambda b, h, q_idx, kv_idx: same(b, h, q_idx, kv_idx) & (kv_idx <= q_idx), causal=False),
        ),
        Row("document mask and causal=True against custom_mask", custom, mask_mod(same, causal=True)),
        Row(
            "ALiBi against pos_encoding_mode",
            Setting({"pos_encoding_mode": "ALIBI"}),
            score_mod(lambda score, b, h, q_idx, kv_idx: score + slopes[h] * (kv_idx - q_idx)),
        ),
        Row(
            "soft cap against logits_soft_cap",
            Setting({"logits_soft_cap": CAP}),
            score_mod(lambda score, b, h, q_idx, kv_idx: CAP * torch.tanh(score / CAP)),
        ),
        Row("tensor bias against the C++ expression", by_hand, score_mod(add_bias)),
    ]


def options(work: Workload) -> list[Row]:
    """Rows with plain attention and every option."""
    heads = work.case.num_q_heads, work.case.num_kv_heads
    names, batch = ("q_scale", "k_scale", "v_scale"), work.case.batch
    of_heads = {name: torch.ones(n, device=work.device) for name, n in zip(names, (*heads, heads[1]), strict=True)}
    of_requests = {name: torch.ones(batch, heads[1], device=work.device) for name in names[1:]}
    causal = work.mask(lambda q_idx, kv_idx: kv_idx <= q_idx)
    masked = Setting({"custom_mask": causal}, causal=False, as_prefill=True)
    windowed = lambda tokens: dataclasses.replace(work.case, window_left=tokens - 1).visible(work.q_len, work.kv_len)
    plain = Setting()
    rows = {
        "soft cap": Setting({"logits_soft_cap": CAP}),
        "ALiBi": Setting({"pos_encoding_mode": "ALIBI"}),
        "RoPE": Setting({"pos_encoding_mode": "ROPE_LLAMA"}),
        "window of everything": Setting({"window_left": work.kv_len}),
        "sinks": Setting(run={"sinks": torch.zeros(heads[0], device=work.device)}),
        "scales, numbers": Setting(run={"q_scale": 0.9, "k_scale": 1.1, "v_scale": 1.2}),
        "scales, a tensor of one a head": Setting(run={name: of_heads[name] for name in names[:2]}),
        "scales, v by head": Setting(run={"v_scale": of_heads["v_scale"]}),
        "scales, q, k and v by head": Setting(run=of_heads),
        "LSE": Setting(run={"return_lse": True}),
        "e4m3 KV": Setting(kv_dtype=E4M3),
        "e5m2 KV": Setting(kv_dtype=torch.float8_e5m2),
    }
    if batch > 1:  # of one request it would be a tensor of one a head
        rows["scales, k and v by request and head"] = Setting(run=of_requests)
        rows["scales, q by head, k and v by request and head"] = Setting(run=of_heads | of_requests)
    pairs = work.case.visible(work.q_len, work.kv_len)
    windows = [
        Row(f"window of {tokens}", plain, Setting({"window_left": tokens - 1}), windowed(tokens) / pairs)
        for tokens in WINDOWS
        if tokens < work.kv_len
    ]
    return [
        *(Row(name, plain, setting) for name, setting in rows.items()),
        *windows,
        Row("custom mask against causal=False", Setting(causal=False, as_prefill=True), masked),
        Row("causal as a custom mask", Setting(as_prefill=True), masked),
    ]


SECTIONS: dict[str, Callable[[Workload], list[Row]]] = {"variants": variants, "options": options}


def build(work: Workload, rows: list[Row], peer: str) -> None:
    """Plans all rows in threads, so that kernels compile in parallel; `measure` reports failures."""
    with ThreadPoolExecutor(8) as pool:
        for row in rows:
            for setting in (row.base, row.other):
                pool.submit(work.call, setting)
            if peer:
                pool.submit(lambda setting=row.other: work.call(setting, peer)())  # it compiles when it runs


def measure(work: Workload, row: Row, clock: GpuClock | HostClock, peer: str) -> tuple[list[float], float]:
    """Seconds of both settings and, if there is one, of the peer with the second; the distance of their outputs."""
    calls = [work.call(setting) for setting in (row.base, row.other)]
    base, other = (call().float() for call in calls)
    difference = float((other - base).norm() / base.norm())
    calls += [work.call(row.other, peer)] if peer else []
    timed = [clock.capture(call) if work.q_len == 1 else call for call in calls]
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(ROUNDS):
        for call, spent in zip(timed, times, strict=True):
            spent.append(clock.seconds(call))
    return [statistics.median(spent) for spent in times], difference


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)}; default: all")
    parser.add_argument("--cases", default=",".join(CASES), help=f"of {', '.join(CASES | MORE_CASES)}")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--peer", default="", help="a library whose time of the second setting is told, too")
    parser.add_argument("--json", help="append one line for each row to this file (docs/figures.py reads it)")
    parser.add_argument("--small", action="store_true", help="tiny shapes")
    parser.add_argument("--check", action="store_true", help=f"exit with 1 if a variant is below {LEAST_RATIO}")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.sections if name not in SECTIONS]:
        parser.error(f"no section {unknown[0]!r}: there are {', '.join(SECTIONS)}")
    device = torch.device(arguments.device)
    clock = GpuClock(arguments.repeats) if device.type == "cuda" else HostClock(arguments.repeats)
    good, recorder = True, Recorder(arguments.json)
    for name in arguments.cases.split(","):
        case = (CASES | MORE_CASES)[name]
        case = case.shrunk() if arguments.small else case
        torch.manual_seed(0)
        work = Workload(case, device)
        for section in arguments.sections or SECTIONS:
            first, second = ("built-in", "user's") if section == "variants" else ("without", "with")
            columns = [f"{first} us", f"{second} us", *([f"{arguments.peer} us"] if arguments.peer else []), "ratio"]
            print(f"\n| {section}: {case.name} | {' | '.join(columns)} | apart, or per visible key |")
            print("| --- " * (len(columns) + 2) + "|")
            rows = [row for row in SECTIONS[section](work) if arguments.only in row.name]
            build(work, rows, arguments.peer)
            for row in rows:
                try:
                    times, difference = measure(work, row, clock, arguments.peer)
                except flashpage.FlashpageError as error:
                    good = False
                    print(f"| {row.name} | {str(error).splitlines()[0]} |{' |' * len(columns)}", flush=True)
                    continue
                us, ratio = [round(seconds * 1e6, 1) for seconds in times], times[0] / times[1]
                good &= section != "variants" or ratio >= LEAST_RATIO
                per_key = times[1] / times[0] / row.visible
                apart = f"{difference:.0e}" if section == "variants" else f"{per_key:.2f}" if row.visible < 1 else ""
                print(f"| {row.name} | {' | '.join(map(str, us))} | {ratio:.3f} | {apart} |", flush=True)
                figures = {"us": dict(zip((first, second, arguments.peer), us, strict=False)), "visible": row.visible}
                recorder.add(f"{section[:-1]}-costs", f"{case.name}, {row.name}", **figures, per_key=round(per_key, 3))
    return 1 if arguments.check and not good else 0


if __name__ == "__main__":
    sys.exit(main())
