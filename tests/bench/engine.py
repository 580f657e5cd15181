"""Tokens per second of flashpage's engine with its own attention, FlashInfer's and torch's, on one model and trace.

All requests arrive at once; prompts are computed in chunks next to the decodes of earlier requests. A row is the
median of some runs of the whole trace after one to warm up; the libraries take turns. `wrong` counts tokens of the
first requests that are neither torch's own nor within rounding of them. `--profile` records the parts of a step in
place of the rates: kernels of attention and of matrix products, other kernels, and the host's time to plan. `--small
--device cpu` only shows that the program works.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from command_line import Parser
from record import Recorder
from sdpa_attention import SdpaAttention
from step_profile import is_product, kernels_of, note_time, of_a_step, started_profiler

from flashpage.demo.model import Config, Llama
from flashpage.demo.reference import check_tokens
from flashpage.engine import Engine, EngineConfig, Request
from flashpage.integrations import PagedAttention
from flashpage.kernels.options import Options, RunOptions
from flashpage.plan.lengths import Lengths, Names
from flashpage.plan.page_indices import Mask, Pages
from flashpage.wrappers.base import DECODE

MODEL = Config(
    vocabulary=8192, hidden=1024, num_layers=8, num_q_heads=32, num_kv_heads=8, head_dim=128, intermediate=2816
)
SMALL = Config(vocabulary=512, hidden=128, num_layers=2, num_q_heads=4, num_kv_heads=2, head_dim=64, intermediate=256)
COLUMNS = ("attention", "decode steps", "seconds", "tokens/s", "decode step, us", "of flashpage captured", "wrong")


class FlashInferPlan:
    """A FlashInfer wrapper with the interface of Attention."""

    def __init__(self, backend: str, workspace: torch.Tensor, names: Names, buffers: dict[str, Any] | None) -> None:
        module = importlib.import_module("flashinfer")
        self._copied: torch.cuda.Event | None = None  # the last plan, from pinned memory that the next one overwrites
        given = {} if buffers is None else {"use_cuda_graph": True, **buffers}
        self._is_decode = names is DECODE
        if self._is_decode:
            renamed = {name.replace("_buf", "_buffer"): value for name, value in given.items() if name.endswith("_buf")}
            given = {"use_tensor_cores": True, **({"use_cuda_graph": True, **renamed} if given else {})}
            self._wrapper = module.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", **given)
        elif names.indices:
            self._wrapper = module.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend, **given)
        else:
            self._wrapper = module.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", **given)

    def reset_workspace_buffer(self, *workspaces: torch.Tensor) -> None:
        self._wrapper.reset_workspace_buffer(*workspaces)

    def plan(
        self, lengths: Lengths, pages: Pages, options: Options, values: RunOptions, mask: Mask | None = None
    ) -> None:
        arrays: list[Any] = [lengths.kv_indptr, pages.indices, lengths.last_page_len]
        sizes = [options.num_q_heads, options.num_kv_heads, options.head_dim_qk, options.page_size]
        given = {
            "window_left": values.window_left,
            "logits_soft_cap": values.logits_soft_cap,
            "sm_scale": values.sm_scale,
            "q_data_type": options.q_dtype.torch,
            "kv_data_type": options.kv_dtype.torch,
        }
        if not self._is_decode:
            given["causal"], arrays = values.causal, [lengths.q_indptr, *arrays]
            if options.kv_source == "ragged":
                arrays, sizes = arrays[:2], sizes[:3]
            if mask is not None:
                given["custom_mask"] = mask.values
        if self._copied is not None:
            self._copied.synchronize()  # ended, or next in line: the step before that plan's own was read
        self._wrapper.plan(*arrays, *sizes, **given)
        self._copied = torch.cuda.current_stream().record_event()

    def run(self, q: torch.Tensor, cache: Any, *, return_lse: bool = False, scales: Any = (), **_: Any) -> Any:
        tensors = cache if isinstance(cache, tuple) and not self._is_paged else (cache,)
        _, k_scale, v_scale = scales or (None, None, None)
        named = {"k_scale": k_scale, "v_scale": v_scale} if self._is_paged else {}
        return self._wrapper.run(q, *tensors, return_lse=return_lse, **named)

    @property
    def _is_paged(self) -> bool:
        return "Ragged" not in type(self._wrapper).__name__


class FlashInferAttention(PagedAttention):
    """Our attention backend over FlashInfer's wrappers."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """FlashInfer does not support requests without tokens, so padding requests have one."""
        return 1


def flashinfer(backend: str) -> Callable[..., PagedAttention]:
    """Makes a backend of FlashInfer's wrappers."""
    return functools.partial(FlashInferAttention, make=functools.partial(FlashInferPlan, backend))


ATTENTION: dict[str, tuple[str, Callable[[], Any], bool]] = {  # label: module, backend, whether decodes are captured
    "flashpage": ("flashpage", lambda: PagedAttention, True),
    "flashpage, eager": ("flashpage", lambda: PagedAttention, False),
    "torch sdpa, eager": ("torch", lambda: SdpaAttention, False),
    "flashinfer fa2": ("flashinfer", lambda: flashinfer("fa2"), True),
    "flashinfer fa3": ("flashinfer", lambda: flashinfer("fa3"), True),
}


def trace(num_requests: int, mean_prompt: int, new_tokens: int, vocabulary: int) -> list[tuple[list[int], int]]:
    """Prompts, and the number of new tokens of each request, at least one."""
    rng, least = random.Random(0), max(1, new_tokens // 2)
    found = []
    for _ in range(num_requests):
        count = min(4 * mean_prompt, max(1, int(mean_prompt * rng.lognormvariate(-0.18, 0.6))))
        found.append(([rng.randrange(vocabulary) for _ in range(count)], rng.randint(least, new_tokens)))
    return found


Run = tuple[float, list[float], list[Request]]


def run_once(engine: Engine, work: list[tuple[list[int], int]]) -> Run:
    """Seconds of the whole trace and of each step that decoded all requests, and the requests."""
    requests, decodes = [Request(list(prompt), new) for prompt, new in work], []
    for request in requests:
        engine.add(request)
    begin = last = time.perf_counter()
    while engine.has_work:
        is_decode = will_decode(engine, requests)
        engine.step()
        now = time.perf_counter()
        if is_decode:
            decodes.append(now - last)
        last = now
    return last - begin, decodes, requests


def will_decode(engine: Engine, requests: list[Request]) -> bool:
    """Whether the next step decodes all requests."""
    are_running = len(engine.scheduler.running) == len(requests)
    return are_running and all(request.num_pending == 1 and not request.is_ending for request in requests)


def engine_of(label: str, model: Llama, work: list[tuple[list[int], int]], step_tokens: int) -> Engine:
    """An engine that has run the trace once."""
    _, make, is_captured = ATTENTION[label]
    config = EngineConfig(
        num_blocks=1 + sum(-(-(len(prompt) + new) // 16) for prompt, new in work),
        max_requests=len(work),
        max_context=max(len(prompt) + new for prompt, new in work),
        max_step_tokens=step_tokens,
        reuse_prefixes=False,  # so that every run computes the same
        use_graphs=is_captured,
    )
    engine = Engine(model, config, make())
    for layer in range(model.config.num_layers):
        engine.pool.kv(layer).zero_()  # not every library tolerates NaN after a request's end
    run_once(engine, work)
    return engine


def row(label: str, model: Llama, runs: list[Run]) -> list[Any]:
    """One row, without the column of ratios."""
    seconds = statistics.median(run[0] for run in runs)
    steps = [step for run in runs for step in run[1]]
    if not steps:
        sys.exit("no step decoded all requests: pass more --new-tokens, or fewer --requests")
    step = statistics.median(steps)
    wrong = check_tokens(model, runs[0][2][:3]).wrong
    how = "captured" if ATTENTION[label][2] else "eager"
    return [label, how, seconds, sum(len(r.generated) for r in runs[0][2]) / seconds, step, wrong]


def profiled(engine: Engine, work: list[tuple[list[int], int]]) -> dict[str, dict[str, float]]:
    """The parts of a step, in microseconds: of steps with prompts, and of those that decode all requests. A phase
    without steps is left out: no step decodes all requests if one of them ends with its prompt."""
    times: dict[str, list[float]] = {}
    plans = ("init_forward_metadata", "init_forward_metadata_replay_cuda_graph")
    calls = [(engine, "step"), *((engine.backend, name) for name in plans)]
    for owner, name in calls:
        note_time(owner, name, times)
    requests = [Request(list(prompt), new) for prompt, new in work]
    for request in requests:
        engine.add(request)
    phases: dict[str, dict[str, Any]] = {}
    follows = {  # whether the next step is of the phase
        "prompts": lambda: any(request.num_pending > 1 for request in requests),
        "decodes": lambda: will_decode(engine, requests),
    }
    for phase, is_next in follows.items():
        profiler, steps = started_profiler(), 0
        while is_next():
            engine.step()
            steps += 1
        found = kernels_of(profiler, times)
        if steps:
            phases[phase] = found | {"steps": steps}
    while engine.has_work:
        engine.step()
    for owner, name in calls:
        delattr(owner, name)
    return {phase: parts_of(kernels) for phase, kernels in phases.items()}


def parts_of(phase: dict[str, Any]) -> dict[str, float]:
    products = sum(us for name, _, us in phase["kernels"] if is_product(name))
    others = phase["busy_us"] - phase["attention_us"] - products
    shares = {"products_us": products / phase["steps"], "other_us": others / phase["steps"]}
    return of_a_step(phase) | {name: round(us, 1) for name, us in shares.items()}


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=2048, help="mean tokens of a prompt")
    parser.add_argument("--new-tokens", type=int, default=128, help="most new tokens of a request")
    parser.add_argument("--step-tokens", type=int, default=4096, help="most tokens of a step")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="a tiny model")
    parser.add_argument("--profile", action="store_true", help="record the parts of a step; needs a card")
    parser.add_argument("--json", help="append a line with all rows to this file (docs/figures.py reads it)")
    arguments = parser.parse_args()
    if arguments.profile and arguments.device == "cpu":
        parser.error("--profile reads the times of a card's kernels: leave out --device cpu")
    device = torch.device(arguments.device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    model = Llama(SMALL if arguments.small else MODEL, device, dtype)
    work = trace(arguments.requests, arguments.prompt, arguments.new_tokens, model.config.vocabulary)
    case = f"{len(work)} requests, mean prompt {arguments.prompt}, at most {arguments.new_tokens} new tokens"
    recorder = Recorder(arguments.json)
    wanted = [
        label
        for label, (module, *_) in ATTENTION.items()
        if arguments.only in label and importlib.util.find_spec(module) is not None
    ]
    if arguments.profile:
        parts = {label: profiled(engine_of(label, model, work, arguments.step_tokens), work) for label in wanted}
        for phase in ("prompts", "decodes"):
            figures = {label: found[phase] for label, found in parts.items() if phase in found}
            if not figures:
                print(f"{phase}: there was no such step")
                continue
            print(phase, *(f"{label}: {found}" for label, found in figures.items()), sep="\n  ")
            recorder.add("engine-steps", f"{case}: steps with {phase}", figures=figures)
        return 0
    prompts = sum(len(prompt) for prompt, _ in work)
    print(f"{len(work)} requests, {prompts} prompt tokens, {sum(new for _, new in work)} new tokens; {model.config}")
    print(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}", flush=True)
    engines = {label: engine_of(label, model, work, arguments.step_tokens) for label in wanted}
    turns = [{label: run_once(engine, work) for label, engine in engines.items()} for _ in range(arguments.repeats)]
    best, figures = None, {}
    for label in wanted:
        name, how, seconds, rate, step, wrong = row(label, model, [turn[label] for turn in turns])
        best = best or rate
        print(f"| {name} | {how} | {seconds:.3f} | {rate:,.0f} | {step * 1e6:,.0f} | {rate / best:.2f} | {wrong} |")
        sys.stdout.flush()
        figures[label] = {"how": how, "tokens_per_s": round(rate), "decode_step_us": round(step * 1e6), "wrong": wrong}
    recorder.add("engine", case, figures=figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
