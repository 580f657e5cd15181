"""Real engines in turns: all are up at the same time, each in a process of its own, and get the same prompts one after
the other, so that a ratio of their rates has the same card and the same clocks.

The programs of the engines (vllm_turns.py, sglang_turns.py) share models, prompts, the talk with such a process, and
the rates.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "vocab_size": 32000,
    "hidden_size": 4096,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 14336,
    "torch_dtype": "bfloat16",
}
SMALL_LLAMA = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 512,
    "torch_dtype": "float32",
}
# Requests, mean and most prompt tokens, new tokens.
TRACES = {
    "1k": (64, 1024, 16000, 128),
    "2k": (64, 2048, 16000, 128),
    "6k": (28, 6000, 30000, 256),
    "64x6k": (64, 6000, 30000, 128),  # needs a cache of 26 GiB (--kv-gib)
    "16k": (8, 16000, 16000, 32),
    "tiny": (4, 40, 200, 4),
}


def prompts_of(trace: str) -> list[list[int]]:
    """Prompts of lognormal lengths; of one length if the mean is the most."""
    count, mean, most, _ = TRACES[trace]
    drawn = random.Random(5)
    lengths = [min(most, max(16, int(drawn.lognormvariate(math.log(mean) - 0.32, 0.8)))) for _ in range(count)]
    lengths = [most] * count if mean == most else lengths
    return [[drawn.randrange(3, LLAMA["vocab_size"]) for _ in range(length)] for length in lengths]


def one_or_more(text: str) -> int:
    """For argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: pass 1 or more")
    return int(text)


def _traces(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in TRACES]:
        raise argparse.ArgumentTypeError(f"no trace {unknown[0]!r}: there are {', '.join(TRACES)}")
    return names


def add_arguments(parser: argparse.ArgumentParser, traces: str, repeats: int) -> None:
    """The arguments of each engine's program, with its defaults. `--serve` is the program's own, for Server."""
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--traces", type=_traces, default=traces, help=f"of {', '.join(TRACES)} (default: %(default)s)")
    parser.add_argument(
        "--repeats", type=one_or_more, default=repeats, help="turns that are counted (default: %(default)s)"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="a tiny model")
    parser.add_argument("--json", metavar="FILE", help="append the figures to this file")


def case_of(trace: str) -> str:
    count, mean, _, new_tokens = TRACES[trace]
    return f"{count} prompts of {mean:,} tokens in the mean, {new_tokens} new each"


# ---------------------------------------------------------------------------------------------------- in a process


@dataclasses.dataclass(frozen=True)
class Running:
    """An engine that is up.

    Attributes:
        generate: of prompts and a number of new tokens, which all of them get.
        answers: to other words about a trace.
    """

    generate: Callable[[list[list[int]], int], Sequence[Sequence[int]]]
    end: Callable[[], object]
    answers: dict[str, Callable[[str], object]] = dataclasses.field(default_factory=dict)


def serve(make: Callable[[], Running]) -> None:
    """Answers lines of the standard input, each by a line of JSON. "run TRACE TOKENS": the seconds."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # engines and their processes print where they log
    engine = make()
    print("up", file=answers, flush=True)
    try:
        for line in sys.stdin:
            word, trace, *rest = line.split()
            if word == "run":
                prompts, new_tokens = prompts_of(trace), int(rest[0])
                began = time.perf_counter()
                found = engine.generate(prompts, new_tokens)
                answer: object = time.perf_counter() - began
                assert all(len(tokens) == new_tokens for tokens in found)
            else:
                answer = engine.answers[word](trace)
            print(json.dumps(answer), file=answers, flush=True)
    finally:  # threads of an engine would keep the process
        engine.end()


class Server:
    """An engine in a process of its own: the program itself with `--serve` and the engine's options.

    Args:
        variables: of its environment, besides this one's.
    """

    def __init__(self, options: object, log: Path, variables: dict[str, str] | None = None) -> None:
        self.log = log
        command = [sys.executable, sys.argv[0], "--serve", json.dumps(options)]
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | (variables or {}),
            )

    def answer(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"an engine ended; the end of its log:\n{self.log.read_text()[-3000:]}")
        return line.strip()

    def ask(self, *words: object) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        return json.loads(self.answer())

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()


# ---------------------------------------------------------------------------------------------------- all of them


def measure(servers: dict[str, Server], trace: str, repeats: int) -> dict[str, dict[str, Any]]:
    """Rates of each engine: medians of its turns, after one that is not counted."""
    count, *_, new_tokens = TRACES[trace]
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in servers}
    for turn in range(repeats + 1):
        for name, server in servers.items():
            found = server.ask("run", trace, new_tokens), server.ask("run", trace, 1)
            if turn:
                runs[name].append(found)
    tokens = sum(map(len, prompts_of(trace)))
    figures = {}
    for name, found in runs.items():
        whole, first = (statistics.median(times) for times in zip(*found, strict=True))
        figures[name] = {
            "new_per_s": round(count * new_tokens / whole, 1),
            "decode_per_s": round(count * (new_tokens - 1) / (whole - first), 1),
            "prefill_per_s": round(tokens / first, 1),
            "seconds": [round(one, 4) for one, _ in found],
        }
    return figures


def show(case: str, figures: dict[str, dict[str, Any]]) -> None:
    for name, rates in figures.items():
        shown = ", ".join(f"{rates[key]:,.0f} {key}" for key in ("new_per_s", "decode_per_s", "prefill_per_s"))
        print(f"{case}: {name}: {shown}", flush=True)


def differences(own: list[dict[str, Any]], other: list[dict[str, Any]]) -> dict[str, float]:
    """How two engines' answers differ, as long as their tokens are the same. `gap`: how far apart the best two tokens
    are at most where the engines take different ones. With drafts SGLang leaves out the log-probabilities of some
    requests' first tokens."""
    found, gaps, equal = [], [0.0], 0
    for one, two in zip(own, other, strict=True):
        equal += one["tokens"] == two["tokens"]
        steps = zip(one["tokens"], two["tokens"], _logprobs_of(one), _logprobs_of(two), strict=True)
        for token, other_token, ours, theirs in steps:
            found += [abs(ours[key] - theirs[key]) for key in ours if key in theirs]
            if token != other_token:
                best = sorted(theirs.values(), reverse=True)
                gaps.append(best[0] - best[1] if best else 0.0)  # a token without log-probabilities has no gap
                break
    return {
        "prompts": len(own),
        "equal": equal,
        "median": statistics.median(found),
        "most": max(found),
        "gap": max(gaps),
    }


def _logprobs_of(answer: dict[str, Any]) -> list[dict[str, float]]:
    """One mapping for each token, empty for first tokens that have none."""
    return [{}] * (len(answer["tokens"]) - len(answer["logprobs"])) + answer["logprobs"]


def in_words(found: dict[str, float]) -> str:
    """The findings of differences()."""
    text = (
        f"{found['equal']} of {found['prompts']} prompts have equal tokens; log-probabilities differ by "
        f"{found['median']:.4f} in the median and {found['most']:.3f} at most"
    )
    return text + (f"; where tokens differ the best two are {found['gap']:.3f} apart at most" if found["gap"] else "")
