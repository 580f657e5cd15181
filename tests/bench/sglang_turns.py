"""Tokens per second of real SGLang engines by attention backend, in turns: all engines are up at the same time, each in
a process of its own, and get the same prompts one after the other.

The model is a Llama of the 8B's shape with 16 layers and SGLang's dummy weights; prompts are drawn, share nothing, and
are answered greedily with a fixed number of tokens. Needs an installed SGLang. `--small --device cpu` runs a tiny
model: it only shows that the program works.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from record import Recorder

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
SMALL = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 512,
    "torch_dtype": "float32",
}
# Requests, mean and most prompt tokens, new tokens.
TRACES = {"1k": (64, 1024, 16000, 128), "6k": (28, 6000, 30000, 256), "tiny": (4, 40, 200, 4)}


def options_of(backend: str, folder: Path, chosen: argparse.Namespace) -> dict[str, Any]:
    """SGLang's arguments: captured decodes, no cache of prefixes."""
    graphs = "disabled" if chosen.device == "cpu" else "full"
    found = {
        "model_path": str(folder),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "attention_backend": backend,
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "device": chosen.device,
        "tp_size": chosen.ranks,
        "disable_radix_cache": True,
        "context_length": 1024 if chosen.small else 40960,
        "chunked_prefill_size": 128 if chosen.small else 8192,
        "max_running_requests": 8 if chosen.small else 64,
        "max_total_tokens": 4096 if chosen.small else chosen.tokens,
        "cuda_graph_backend_decode": graphs,
        "cuda_graph_backend_prefill": "disabled",
        "disable_custom_all_reduce": True,
        "log_level": "error",
    }
    return found | ({} if chosen.device == "cpu" else {"cuda_graph_max_bs_decode": 64, "mem_fraction_static": 0.85})


def prompts_of(trace: str) -> list[list[int]]:
    """Prompts of lognormal lengths."""
    count, mean, most, _ = TRACES[trace]
    drawn = random.Random(5)
    lengths = [min(most, max(16, int(drawn.lognormvariate(math.log(mean) - 0.32, 0.8)))) for _ in range(count)]
    return [[drawn.randrange(3, LLAMA["vocab_size"]) for _ in range(length)] for length in lengths]


# ---------------------------------------------------------------------------------------------------- in a process


def serve(options: str) -> None:
    """An engine that answers lines of its standard input: a trace and a number of new tokens. A line of output has the
    seconds."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # SGLang and its processes print where they log
    from sglang import Engine

    engine = Engine(**json.loads(options))
    print("up", file=answers, flush=True)
    for line in sys.stdin:
        trace, new_tokens = line.split()
        params = {"temperature": 0.0, "max_new_tokens": int(new_tokens), "ignore_eos": True}
        prompts = prompts_of(trace)
        began = time.perf_counter()
        found = engine.generate(input_ids=prompts, sampling_params=params)
        seconds = time.perf_counter() - began
        assert all(len(answer["output_ids"]) == int(new_tokens) for answer in found)
        print(seconds, file=answers, flush=True)
    engine.shutdown()


class Server:
    """An engine in a process of its own."""

    def __init__(self, options: dict[str, Any], log: Path) -> None:
        self.log = log
        command = [sys.executable, __file__, "--serve", json.dumps(options)]
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )

    def answer(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"an engine ended; the end of its log:\n{self.log.read_text()[-3000:]}")
        return line.strip()

    def seconds(self, trace: str, new_tokens: int) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{trace} {new_tokens}\n")
        self.process.stdin.flush()
        return float(self.answer())

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
            found = server.seconds(trace, new_tokens), server.seconds(trace, 1)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--backends", default="flashpage,fa3,triton", help="SGLang's names (default: %(default)s)")
    parser.add_argument("--traces", default="1k,6k", help=f"of {', '.join(TRACES)} (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=4, help="turns that are counted (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=1, help="cards of each engine (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=200_000, help="room of each cache (default: %(default)s)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="a tiny model")
    parser.add_argument("--json", metavar="FILE", help="append the figures to this file")
    chosen = parser.parse_args()
    if chosen.serve is not None:
        serve(chosen.serve)
        return
    if importlib.util.find_spec("sglang") is None:
        print("skipped: SGLang is not installed")
        return
    recorder = Recorder(chosen.json)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "config.json").write_text(json.dumps(LLAMA | (SMALL if chosen.small else {})))
        names = chosen.backends.split(",")
        servers = {name: Server(options_of(name, folder, chosen), folder / f"{name}.log") for name in names}
        for server in servers.values():
            server.answer()
        for trace in ["tiny"] if chosen.small else chosen.traces.split(","):
            count, mean, _, new_tokens = TRACES[trace]
            figures = measure(servers, trace, chosen.repeats)
            case = f"{count} prompts of {mean:,} tokens in the mean, {new_tokens} new each"
            recorder.add("sglang", case, figures=figures, ranks=chosen.ranks)
            for name, rates in figures.items():
                shown = ", ".join(f"{rates[key]:,.0f} {key}" for key in ("new_per_s", "decode_per_s", "prefill_per_s"))
                print(f"{case}: {name}: {shown}", flush=True)
        for server in servers.values():
            server.end()


if __name__ == "__main__":
    main()
