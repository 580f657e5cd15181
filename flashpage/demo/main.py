"""The demo's run: requests in, tokens out, checked, timed and shown."""

from __future__ import annotations

import random
import time

import torch

import flashpage

from .. import host
from ..errors import FlashpageError
from ..jit.progress import Bar
from .engine import PAGE_SIZE, Engine, Request
from .model import Config, Llama
from .reference import check_tokens


def choose_device(name: str) -> torch.device:
    """The torch device of `auto`, `cpu` or `cuda`."""
    if name == "cuda" and not torch.cuda.is_available():
        raise FlashpageError("device cuda: torch finds no GPU here; leave the option out to run on the CPU")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def make_requests(num_requests: int, new_tokens: int, vocabulary: int, seed: int = 0) -> list[Request]:
    """Prompts of 1 to some 500 tokens, most of them short; each asks for another number of new tokens."""
    rng = random.Random(seed)
    requests = []
    for _ in range(num_requests):
        prompt_len = min(512, max(1, int(rng.lognormvariate(4.0, 1.2))))
        prompt = [rng.randrange(vocabulary) for _ in range(prompt_len)]
        requests.append(Request(prompt, rng.randint((new_tokens + 3) // 4, new_tokens)))
    return requests


def num_pages(requests: list[Request]) -> int:
    """Pages that all requests need at their full lengths."""
    return sum(-(-(request.prompt_len + request.max_new_tokens) // PAGE_SIZE) for request in requests)


def run_demo(num_requests: int, new_tokens: int, device_name: str = "auto", config: Config | None = None) -> int:
    """Decodes, checks and reports; returns 0 where every token is the reference's."""
    device = choose_device(device_name)
    torch.set_num_threads(1)  # the model is small: threads that wait for each other would take the cores from attention
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    model = Llama(config or Config(), device, dtype)
    requests = make_requests(num_requests, new_tokens, model.config.vocabulary)
    describe(model, requests)

    # Kernels are compiled or loaded before the clock starts: same prompts, as few tokens as reach a decode step.
    warm = [Request(list(request.tokens), min(2, request.max_new_tokens)) for request in requests]
    Engine(model, num_pages(warm)).generate(warm)

    engine = Engine(model, num_pages(requests))
    bar = Bar(max(request.max_new_tokens for request in requests), "decoding")
    start = time.perf_counter()
    engine.generate(requests, lambda active: bar.advance(f"{active} requests"))
    seconds = time.perf_counter() - start
    bar.close()
    total = sum(len(request.generated) for request in requests)

    print(f"\n{total} tokens in {seconds:.2f} s: {total / seconds:,.0f} tokens/s", end="")
    if engine.decode_plans:
        print(f"; {len(engine.decode_plans)} decode steps, plan took {engine.median_plan_us():.0f} us a step", end="")
    print()
    for index in range(min(2, len(requests))):
        print(f"request {index}: {' '.join(map(str, requests[index].generated[:12]))} ...")

    verdict = check_tokens(model, requests)
    print(f"checked against torch's attention: {verdict.agree} of {verdict.total} tokens are its own", end="")
    print(f", {verdict.ties} within rounding of it" if verdict.ties else "", end="")
    print(f", {verdict.wrong} WRONG" if verdict.wrong else "")
    if engine.first_decode_plan is not None:
        print("\nthe plan of the first decode step (rows: CTAs, colours: requests)")
        print(engine.first_decode_plan.picture())
    return 1 if verdict.wrong else 0


def describe(model: Llama, requests: list[Request]) -> None:
    """Says what runs where."""
    c = model.config
    if model.device.type == "cuda":
        where = torch.cuda.get_device_name(model.device)
    else:
        where = f"the CPU ({host.load().fp_cpu_threads()} threads)"
    prompts = [request.prompt_len for request in requests]
    print(f"flashpage {flashpage.__version__} on {where}, torch {torch.__version__}")
    print(
        f"model: {c.num_layers} layers, {c.num_q_heads} query / {c.num_kv_heads} KV heads of {c.head_dim}, "
        f"{str(model.dtype).removeprefix('torch.')}"
    )
    print(
        f"batch: {len(requests)} requests, prompts of {min(prompts)} to {max(prompts)} tokens, "
        f"up to {max(request.max_new_tokens for request in requests)} new tokens each, {PAGE_SIZE} tokens a page",
        flush=True,  # before what compilers say on stderr
    )
