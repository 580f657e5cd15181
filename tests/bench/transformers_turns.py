"""Tokens per second of transformers' `generate_batch` (continuous batching) by attention implementation, in turns: all
models are up at the same time, each in a process of its own, and get the same prompts one after the other.

The model is a Llama of the 8B's shape with 16 layers and random weights, under which a token depends on what attention
found; prompts are drawn, share nothing, and are answered greedily. Managers as `generate_batch` makes them stay up from
turn to turn, with their graphs: their start and their end, which take tenths of a second, are not timed.
`--check` compares tokens with those of the first implementation. Needs transformers 5.18 or newer. `--small --device
cpu` runs a tiny model: it only shows that the program works.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import engine_turns
import torch
from command_line import Parser
from drawn_weights import draw_weights
from engine_turns import LLAMA, SMALL_LLAMA, Running, Server, one_or_more
from record import Recorder

# Tokens of a request at most: more than the longest trace has (engine_turns.TRACES).
_CONTEXT = 40960
# Prompts that --check compares, their most tokens, and new tokens of each: enough to show a wrong backend, and quick.
_CHECKED = (16, 1500, 16)
# transformers' name of each, and options of ContinuousBatchingConfig on a card. By default fpage has graphs of decodes,
# and FlashAttention of all steps. "eager" writes all scores to memory, and takes part only if it is named.
BACKENDS: dict[str, tuple[str, dict[str, Any]]] = {
    "fpage": ("fpage", {"use_cuda_graph": False}),
    "fpage+graphs": ("fpage", {}),
    "fpage+all_graphs": ("fpage", {"use_cuda_graph": True}),
    "sdpa": ("sdpa", {}),
    "eager": ("paged|eager", {}),
    "flash_attention_2": ("flash_attention_2", {}),
    "flash_attention_3": ("flash_attention_3", {}),
}


class Options(NamedTuple):
    """The argument of a process that serves one backend, as JSON."""

    backend: str
    device: str
    is_small: bool
    page_size: int
    tokens: int


def batching_of(options: Options) -> Any:
    """Every backend gets the same sizes. Prefixes are not shared: the next turn has the same prompts."""
    from transformers.generation import ContinuousBatchingConfig

    return ContinuousBatchingConfig(
        page_size=options.page_size,
        num_blocks=options.tokens // options.page_size,
        max_batch_tokens=128 if options.is_small else 8192,
        max_requests_per_batch=8 if options.is_small else 64,
        max_blocks_per_request=(1024 if options.is_small else _CONTEXT) // options.page_size,
        allow_block_sharing=False,
        auto_switch_to_flash=False,
        **({} if options.device == "cpu" else BACKENDS[options.backend][1]),
    )


def model_of(options: Options) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = LLAMA | (SMALL_LLAMA if options.is_small else {})
    dtype = getattr(torch, shape["torch_dtype"])
    left_out = ("architectures", "model_type", "torch_dtype")
    config = AutoConfig.for_model("llama", **{key: value for key, value in shape.items() if key not in left_out})
    with torch.device(options.device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    draw_weights(model)
    return model


def engine_of(options: Options) -> Running:
    from transformers import GenerationConfig

    from flashpage import hf

    hf.register()
    model = model_of(options)
    model.set_attn_implementation(BACKENDS[options.backend][0])
    greedy = GenerationConfig(do_sample=False, max_new_tokens=256, eos_token_id=-1, pad_token_id=0)
    stack = contextlib.ExitStack()
    manager = stack.enter_context(
        model.continuous_batching_context_manager(
            generation_config=greedy, continuous_batching_config=batching_of(options), timeout=5
        )
    )

    def generate(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        order = manager.add_requests(inputs=prompts, max_new_tokens=new_tokens)
        found: dict[str, list[int]] = {}
        while len(found) < len(order):
            answer = manager.get_result(timeout=1)
            if answer is None and not manager.is_running():
                raise RuntimeError("the manager's thread ended: see the errors above")
            if answer is not None and answer.error is not None:
                raise RuntimeError(f"a request failed: {answer.error}")
            if answer is not None and answer.is_finished():
                found[answer.request_id] = answer.generated_tokens
        return [found[request] for request in order]

    def check(trace: str) -> list[list[int]]:
        count, length, new_tokens = _CHECKED
        return generate([prompt[:length] for prompt in engine_turns.prompts_of(trace)[:count]], new_tokens)

    return Running(generate, stack.close, {"check": check})


def why_not(backend: str) -> str:
    """Why a backend cannot run here; empty if it can."""
    if not backend.startswith("flash_attention"):
        return ""
    from transformers import utils

    version = backend[-1]
    is_here = getattr(utils, f"is_flash_attn_{version}_available")()
    return "" if is_here else f"transformers finds no package of FlashAttention {version}"


def started(names: list[str], sizes: tuple[Any, ...], logs: Path) -> tuple[dict[str, Server], dict[str, str]]:
    """Servers of the backends that can run here, all of them up, and why others cannot."""
    refused = {name: reason for name in names if (reason := why_not(name))}
    servers = {name: Server([name, *sizes], logs / f"{i}.log") for i, name in enumerate(names) if name not in refused}
    for name, server in list(servers.items()):
        try:
            server.answer()
        except SystemExit as end:
            refused[name] = str(end).splitlines()[-1]
            del servers[name]
    for name, reason in refused.items():
        print(f"{name}: left out: {reason}")
    return servers, refused


def checked(answers: dict[str, list[list[int]]]) -> dict[str, list[int]]:
    """By backend: how many prompts have the tokens of the first backend, of how many, and how many the same first
    token."""
    first = next(iter(answers.values()), [])
    return {
        name: [
            sum(map(list.__eq__, own, first)),
            len(first),
            sum(a[0] == b[0] for a, b in zip(own, first, strict=True)),
        ]
        for name, own in answers.items()
    }


def main() -> None:
    parser = Parser(__doc__)
    engine_turns.add_arguments(parser, traces="1k", repeats=3)
    usual = ",".join(name for name in BACKENDS if name != "eager")
    parser.add_argument("--backends", default=usual, help=f"of {', '.join(BACKENDS)} (default: %(default)s)")
    parser.add_argument("--page-size", type=one_or_more, default=256, help="tokens of a page (default: %(default)s)")
    parser.add_argument("--tokens", type=one_or_more, default=200_000, help="room of each cache (default: %(default)s)")
    parser.add_argument("--check", action="store_true", help="compare tokens with the first backend's; no rates")
    chosen = parser.parse_args()
    if chosen.serve is not None:
        engine_turns.serve(lambda: engine_of(Options(*json.loads(chosen.serve))))
        return
    if unknown := [name for name in chosen.backends.split(",") if name not in BACKENDS]:
        parser.error(f"--backends {unknown[0]}: there are {', '.join(BACKENDS)}")
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        version = "0.0"
    if tuple(map(int, version.split(".")[:2])) < (5, 18):
        print("skipped: transformers 5.18 or newer is not installed")
        return
    page_size, tokens = (16, 4096) if chosen.small else (chosen.page_size, chosen.tokens)
    with tempfile.TemporaryDirectory() as place:
        sizes = (chosen.device, chosen.small, page_size, tokens)
        servers, refused = started(chosen.backends.split(","), sizes, Path(place))
        recorder = Recorder(chosen.json)
        for trace in ["tiny"] if chosen.small else chosen.traces:
            case = engine_turns.case_of(trace)
            if chosen.check:
                answers = {name: server.ask("check", trace) for name, server in servers.items()}
                for name, (equal, count, first) in checked(answers).items():
                    print(f"{case}: {name}: {equal} of {count} prompts have equal tokens, {first} equal first ones")
                continue
            figures = engine_turns.measure(servers, trace, chosen.repeats)
            recorder.add("transformers", case, figures=figures, refused=refused, page_size=page_size, ranks=1)
            engine_turns.show(case, figures)
        for server in servers.values():
            server.end()


if __name__ == "__main__":
    main()
