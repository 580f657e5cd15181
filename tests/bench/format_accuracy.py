"""Accuracy of caches in each format: the error of decode's output against fp64 over unquantised rows, and the drift of
a model.

Data: `normal`; `heavy tails`, Student's t with three degrees of freedom; `outlier channels`, normal but for four
channels of K that are ten times larger, as those of real models are. A row's error is |output - exact| / |exact|.
If FlashInfer is installed, it reads the same nvfp4 cache.

Drift: the demo's model writes 512 tokens over an fp32 cache, drawn from its own distribution, and then reads them over
a cache of each format. Its distributions are compared, and what the tokens cost: their mean negative log-probability,
by which perplexity grows.

    python tests/bench/format_accuracy.py --json accuracy.jsonl
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
from command_line import Parser

sys.path.append(str(Path(__file__).parents[1] / "support"))
from format_names import kv_types
from record import Recorder

import flashpage
from flashpage.demo.model import Config, Llama
from flashpage.demo.reference import causal_attention
from flashpage.kernels.kv_formats import FORMATS

BATCH, TOKENS, HEADS, KV_HEADS, DIM, PAGE = 4, 1024, 8, 2, 128, 16
DATA = ("normal", "heavy tails", "outlier channels")
DRIFT_TOKENS = 512
SHARPNESS = 2.0  # logits are multiplied by it, as those of random weights are close to each other


def rows(kind: str, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, K and V of bf16 values, [rows, heads, dim]."""

    def draw(count: int, heads: int) -> torch.Tensor:
        found = torch.randn(count, heads, DIM, generator=generator)
        if kind == "heavy tails":  # a normal number over the root of a mean of three squares
            found /= torch.randn(count, heads, DIM, 3, generator=generator).square().mean(-1).sqrt()
        return found

    q, k, v = draw(BATCH, HEADS), draw(BATCH * TOKENS, KV_HEADS), draw(BATCH * TOKENS, KV_HEADS)
    if kind == "outlier channels":
        k[..., torch.randperm(DIM, generator=generator)[:4]] *= 10
    return q.bfloat16(), k.bfloat16(), v.bfloat16()


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    group = HEADS // KV_HEADS
    k, v = (part.view(BATCH, TOKENS, KV_HEADS, DIM).double().repeat_interleave(group, 2) for part in (k, v))
    scores = torch.einsum("bhd,bthd->bht", q.double(), k) * DIM**-0.5
    return torch.einsum("bht,bthd->bhd", scores.softmax(-1), v)


def cache_of(name: str, k: torch.Tensor, v: torch.Tensor, places: tuple[torch.Tensor, ...]) -> tuple[Any, Any, Any]:
    """The cache, kv_cache_sf, and the other arguments of run; the appends quantise."""
    row, (tokens, heads, dim) = FORMATS[name], k.shape
    stored = getattr(torch, row.stored[0])
    shape = (tokens // PAGE, PAGE, heads)
    cache = tuple(torch.zeros(*shape, row.stored_columns(dim), dtype=stored, device=k.device) for _ in "kv")
    last = (row.row_scales(dim),) if row.row_scales(dim) > 1 else ()
    kind = getattr(torch, row.scales[0])
    scales = tuple(torch.zeros(*shape, *last, dtype=kind, device=k.device) for _ in "kv")
    numbers = {}
    if name == "nvfp4":  # so that the largest group's scale is e4m3's largest number
        numbers = {"k_scale": float(k.abs().max()) / (6 * 448), "v_scale": float(v.abs().max()) / (6 * 448)}
    flashpage.append_paged_kv_cache(
        k, v, *places[:2], cache, *places[2:], kv_format=name, kv_cache_sf=scales, **numbers
    )
    return cache, scales, numbers


def element_cache(name: str, k: torch.Tensor, v: torch.Tensor) -> tuple[Any, dict[str, float]]:
    """The cache of an element type, and the other arguments of run: fp8 has a scale for each tensor."""
    dtype = getattr(torch, name)
    most = [float(part.abs().max()) / 448 if dtype.itemsize == 1 else 1.0 for part in (k, v)]
    cache = tuple(
        (part.float() / scale).to(dtype).view(-1, PAGE, *part.shape[1:])
        for part, scale in zip((k, v), most, strict=True)
    )
    return cache, {"k_scale": most[0], "v_scale": most[1]}


def error_of(name: str, kind: str, device: str, reader: str = "flashpage") -> float:
    """The mean error over heads and requests; `name`: a format, or an element type; `reader`: whose decode it is."""
    q, k, v = (part.to(device) for part in rows(kind, torch.Generator().manual_seed(0)))
    expected = exact(q, k, v)
    numbers = {"dtype": torch.int32, "device": device}
    indptr, last = torch.arange(BATCH + 1, **numbers) * (TOKENS // PAGE), torch.full((BATCH,), PAGE, **numbers)
    indices = torch.arange(BATCH * TOKENS // PAGE, **numbers)
    token = torch.arange(BATCH * TOKENS, **numbers)
    places = (token // TOKENS, token % TOKENS, indices, indptr, last)
    workspace = torch.empty(64 << 20, dtype=torch.uint8, device=device)  # FlashInfer reads nvfp4 by tensor cores alone
    wrapper = importlib.import_module(reader).BatchDecodeWithPagedKVCacheWrapper(workspace, use_tensor_cores=True)
    types: dict[str, Any] = {"q_data_type": torch.bfloat16}
    if name in FORMATS:
        cache, scales, run = cache_of(name, k, v, places)
        types |= kv_types(name)
        wrapper.plan(indptr, indices, last, HEADS, KV_HEADS, DIM, PAGE, **types)
        found = wrapper.run(q, cache, kv_cache_sf=scales, **run)
    else:
        cache, run = element_cache(name, k, v)
        wrapper.plan(indptr, indices, last, HEADS, KV_HEADS, DIM, PAGE, **types, kv_data_type=cache[0].dtype)
        found = wrapper.run(q, cache, **run)
    return float(((found.double() - expected).norm(dim=-1) / expected.norm(dim=-1)).mean())


# --------------------------------------------------------------------------------------------------------------- drift


class CachedAttention:
    """Attention of a whole request's rows, in bf16, over a cache of a format to which their keys and values are
    appended first."""

    def __init__(self, name: str, config: Config, device: str) -> None:
        self.name, self.config = name, config
        self.numbers: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self.wrapper = flashpage.BatchPrefillWithPagedKVCacheWrapper(
            torch.empty(64 << 20, dtype=torch.uint8, device=device)
        )

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        c, tokens, (q, k, v) = self.config, len(q), (part.bfloat16() for part in (q, k, v))
        indptr = torch.tensor([0, tokens // PAGE], **self.numbers)
        indices = torch.arange(tokens // PAGE, **self.numbers)
        last = torch.full((1,), PAGE, **self.numbers)
        rows = torch.tensor([0, tokens], **self.numbers)
        heads = (c.num_q_heads, c.num_kv_heads, c.head_dim, PAGE)
        options: dict[str, Any] = {"causal": True, "q_data_type": q.dtype, "sm_scale": c.sm_scale}
        places = (torch.zeros(tokens, **self.numbers), torch.arange(tokens, **self.numbers), indices, indptr, last)
        if self.name in FORMATS:
            cache, scales, run = cache_of(self.name, k, v, places)
            options["kv_format"], run["kv_cache_sf"] = self.name, scales
        else:
            cache, run = element_cache(self.name, k, v)
            options["kv_data_type"] = cache[0].dtype
        self.wrapper.plan(rows, indptr, indices, last, *heads, **options)
        found: torch.Tensor = self.wrapper.run(q, cache, **run)
        return found.float()


def written(model: Llama) -> torch.Tensor:
    """Tokens that the model draws from its own distribution, each step over all rows before."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(model.config.vocabulary, (1,), generator=generator)
    keys: dict[int, torch.Tensor] = {}
    values: dict[int, torch.Tensor] = {}

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys[layer] = torch.cat([keys[layer], k]) if layer in keys else k
        values[layer] = torch.cat([values[layer], v]) if layer in values else v
        return flashpage.single_decode_with_kv_cache(q[0], keys[layer], values[layer])[None]

    for i in range(DRIFT_TOKENS):
        hidden = model.forward(tokens[-1:].to(model.device), torch.tensor([i], device=model.device), attend)
        chances = (SHARPNESS * model.logits(hidden)[0]).softmax(-1).cpu()
        tokens = torch.cat([tokens, torch.multinomial(chances, 1, generator=generator)])
    return tokens


def drift(device: str, recorder: Recorder) -> None:
    model = Llama(Config(), torch.device(device), torch.float32)
    tokens = written(model).to(device)
    positions = torch.arange(DRIFT_TOKENS, device=device)

    def distributions(attend: Any) -> torch.Tensor:
        return (SHARPNESS * model.logits(model.forward(tokens[:-1], positions, attend))).log_softmax(-1)

    exact = distributions(lambda *given: causal_attention(*given, model.config.sm_scale))
    cost = -exact.gather(1, tokens[1:, None]).mean()
    print(f"\ndrift over {DRIFT_TOKENS} tokens, which cost {cost:.3f} each over an fp32 cache")
    print(f"{'format':20}{'cost':>12}{'divergence':>14}{'same best token':>18}")
    for name in ("bfloat16", "float8_e4m3fn", *FORMATS):
        found = distributions(CachedAttention(name, model.config, device))
        more = float(-found.gather(1, tokens[1:, None]).mean() - cost)
        divergence = float((exact.exp() * (exact - found)).sum(-1).mean())
        same = float((exact.argmax(-1) == found.argmax(-1)).double().mean())
        print(f"{name:20}{more:+12.4f}{divergence:14.4f}{same:18.1%}", flush=True)
        recorder.add("format-drift", name, cost=more, divergence=divergence, same=same)


def main() -> None:
    parser = Parser(__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", metavar="FILE", help="appends the figures as lines of data")
    arguments = parser.parse_args()
    recorder = Recorder(arguments.json)
    print(f"{'format':20}", *(f"{kind:>18}" for kind in DATA))
    readers = [(name, "flashpage") for name in ("bfloat16", "float8_e4m3fn", *FORMATS)]
    if arguments.device != "cpu" and importlib.util.find_spec("flashinfer"):
        readers.append(("nvfp4", "flashinfer"))
    for name, reader in readers:
        errors = {kind: error_of(name, kind, arguments.device, reader) for kind in DATA}
        shown = name if reader == "flashpage" else f"{name} by {reader}"
        print(f"{shown:20}", *(f"{errors[kind]:18.2%}" for kind in DATA))
        recorder.add("format-accuracy", shown, errors={kind: round(error, 5) for kind, error in errors.items()})
    if arguments.device == "cpu":  # its model writes in fp32, which only the CPU's kernels read
        drift(arguments.device, recorder)


if __name__ == "__main__":
    main()
