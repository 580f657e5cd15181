"""The demo's run: requests in, tokens out, checked, timed and shown."""

from __future__ import annotations

import random
import time

import torch

from .. import native
from ..base.errors import FlashpageError
from ..base.version import VERSION
from ..jit.progress import Bar
from ..plan.report.plan import Plan
from ..serving.engine import Engine, EngineConfig
from ..serving.kv_parts import KvPart
from ..serving.paged_attention import DecodeMetadata
from ..serving.request import Request
from .latent_model import LatentConfig, LatentModel
from .model import Config, Llama
from .reference import check_tokens

BLOCK_SIZE = 16  # tokens


def choose_device(name: str) -> torch.device:
    """The torch device of `auto`, `cpu` or `cuda`."""
    if name == "cuda" and not torch.cuda.is_available():
        raise FlashpageError("device cuda: torch finds no GPU here; pass 'cpu', or no device")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def make_requests(num_requests: int, new_tokens: int, vocabulary: int, seed: int = 0) -> list[Request]:
    """Prompts of 1 to about 500 tokens, most of them short; every third one begins with the same 80 tokens. The number
    of new tokens differs from request to request."""
    rng = random.Random(seed)
    shared = [rng.randrange(vocabulary) for _ in range(80)]
    requests = []
    for index in range(num_requests):
        prompt_len = min(512, max(1, int(rng.lognormvariate(4.0, 1.2))))
        prompt = [rng.randrange(vocabulary) for _ in range(prompt_len)]
        prompt = prompt if index % 3 else shared + prompt
        requests.append(Request(prompt, rng.randint((new_tokens + 3) // 4, new_tokens)))
    return requests


def engine_config(requests: list[Request]) -> EngineConfig:
    """An engine where two thirds of the requests run at once, in a pool that holds two fifths of all tokens."""
    blocks = [-(-request.max_len // BLOCK_SIZE) for request in requests]
    return EngineConfig(
        num_blocks=1 + max(max(blocks), sum(blocks) * 2 // 5),
        block_size=BLOCK_SIZE,
        max_requests=-(-len(requests) * 2 // 3),
        max_context=max(request.max_len for request in requests),
        max_step_tokens=256,
    )


def run_demo(num_requests: int, new_tokens: int, device_name: str = "auto", config: Config | None = None) -> int:
    """Decodes, checks and reports; returns 0 if every token agrees with the reference."""
    device = choose_device(device_name)
    torch.set_num_threads(1)  # the model is small: torch's threads would only compete with attention for the cores
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    config = config or Config()
    model = (LatentModel if isinstance(config, LatentConfig) else Llama)(config, device, dtype)
    requests = make_requests(num_requests, new_tokens, model.config.vocabulary)
    describe(model, requests)

    # Compile or load the kernels before the clock starts: the same prompts, just long enough to reach a decode step.
    warm = [Request(request.prompt, min(2, request.max_new_tokens)) for request in requests]
    Engine(model, engine_config(warm)).run(warm)

    engine = Engine(model, engine_config(requests))
    bar = Bar(sum(request.max_new_tokens for request in requests), "decoding")
    watcher = Watcher(engine, requests, bar)
    start = time.perf_counter()
    engine.run(requests, watcher.after_step)
    seconds = time.perf_counter() - start
    bar.close()
    total, done = sum(len(request.generated) for request in requests), engine.statistics

    print(f"\n{total} tokens in {seconds:.2f} s: {total / seconds:,.0f} tokens/s; ", end="")
    print(f"{done.steps} steps" + (f", {done.captured_steps} of them captured graphs" if done.captured_steps else ""))
    print(f"{done.reused_tokens} prompt tokens were reused from the pool, ", end="")
    print(f"{done.preemptions} times a request was preempted")
    for index in range(min(2, len(requests))):
        print(f"request {index}: {' '.join(map(str, requests[index].generated[:12]))} ...")

    verdict = check_tokens(model, requests)
    print(f"checked against torch's attention: {verdict.agree} of {verdict.total} tokens agree", end="")
    print(f", {verdict.ties} within rounding" if verdict.ties else "", end="")
    print(f", {verdict.wrong} WRONG" if verdict.wrong else "")
    if watcher.plan is not None:
        on_cpu = "" if device.type == "cuda" else " (on a CPU, CTAs are shares of the work; each thread runs several)"
        print(f"\nthe plan of the first decode step{on_cpu}:")
        print(watcher.plan.picture())
    return 1 if verdict.wrong else 0


class Watcher:
    """Updates the progress bar, and keeps the plan of the first decode step."""

    def __init__(self, engine: Engine, requests: list[Request], bar: Bar) -> None:
        self._engine, self._requests, self._bar, self._shown = engine, requests, bar, 0
        self.plan: Plan | None = None

    def after_step(self, running: int) -> None:
        generated = sum(len(request.tokens) - request.prompt_len for request in self._requests)
        while self._shown < generated:
            self._bar.advance(f"{running} requests")
            self._shown += 1
        metadata = getattr(self._engine.backend, "metadata", None)
        if self.plan is None and isinstance(metadata, DecodeMetadata):
            self.plan = metadata.planned[KvPart.ALL].last_plan


def describe(model: Llama, requests: list[Request]) -> None:
    """Prints the device, the model and the batch."""
    c = model.config
    if model.device.type == "cuda":
        where = torch.cuda.get_device_name(model.device)
    else:
        where = f"the CPU ({native.load().fp_cpu_threads()} threads)"
    prompts = [request.prompt_len for request in requests]
    print(f"flashpage {VERSION} on {where}, torch {torch.__version__}")
    print(
        f"model: {c.num_layers} layers, {c.num_q_heads} query / {c.num_kv_heads} KV heads of {c.head_dim}, "
        f"{str(model.dtype).removeprefix('torch.')}"
    )
    print(
        f"batch: {len(requests)} requests, prompts of {min(prompts)} to {max(prompts)} tokens, "
        f"up to {max(request.max_new_tokens for request in requests)} new tokens each, {BLOCK_SIZE} tokens a page",
        flush=True,  # before compilers write to stderr
    )
