"""Runs the benchmarks of this folder: `flashpage bench [NAME ...]`, or `flashpage bench NAME OPTION ...`, as each is a
program with its own options (`flashpage bench NAME --help`). Exit codes: 0 if all ran or were skipped, 1 if one failed,
2 for a wrong argument."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """One program of this folder."""

    program: tuple[str, ...]  # file and arguments
    summary: str
    needs_gpu: bool = False


BENCHMARKS = {
    "host": Benchmark(("host.py",), "host time of plan and run, against their targets"),
    "cold": Benchmark(("cold.py",), "first calls of a process, from an empty cache and once built", needs_gpu=True),
    "plan": Benchmark(("plan_arithmetic.py",), "balance and host time of the partition, up to a million requests"),
    "cpu": Benchmark(("cpu_vs_torch.py",), "the CPU backend against torch's attention"),
    "decode": Benchmark(("gpu.py", "decode"), "decode on the GPU, against the installed peers", needs_gpu=True),
    "more-decode": Benchmark(("gpu.py", "more-decode"), "other batches, groups, pages and head dims", needs_gpu=True),
    "trace": Benchmark(("trace.py",), "when the CTAs of a decode launch start, load, compute and end", needs_gpu=True),
    "load": Benchmark(("load_bench.py",), "how fast the decode kernel's loaders read alone (Hopper)", needs_gpu=True),
    "mla": Benchmark(("gpu.py", "mla"), "decode over latent rows on the GPU, against the peers", needs_gpu=True),
    "mla-fp8": Benchmark(("gpu.py", "mla-fp8"), "the same in fp8, in three formats of rows", needs_gpu=True),
    "sparse": Benchmark(("sparse.py",), "lists of latent rows, in bf16 and in 656 bytes", needs_gpu=True),
    "sparse-calls": Benchmark(("sparse_calls.py",), "sparse prefill, and DeepSeek V4's decode", needs_gpu=True),
    "e4m3-forms": Benchmark(("e4m3_forms.py",), "prefill over e4m3 caches in four forms", needs_gpu=True),
    "prefill": Benchmark(("gpu.py", "prefill"), "prefill and append on the GPU, against the peers", needs_gpu=True),
    "more-prefill": Benchmark(("gpu.py", "more-prefill"), "other lengths, groups, windows and dims", needs_gpu=True),
    "small-prefill": Benchmark(("gpu.py", "small-prefill"), "short prompts, against the peers", needs_gpu=True),
    "fp8-kv": Benchmark(("gpu.py", "fp8-kv"), "decode over fp8 caches with bf16 queries", needs_gpu=True),
    "formats": Benchmark(("formats.py",), "caches of 4 and 8 bits, next to bf16 and fp8", needs_gpu=True),
    "energy": Benchmark(("energy.py",), "time and joules of long prompts, against FA3", needs_gpu=True),
    "counters": Benchmark(("counters.py",), "what ncu counts in one call of a library, by kernel", needs_gpu=True),
    "sweep": Benchmark(("sweep.py", "--seconds", "60"), "drawn cases against the best peer, a part", needs_gpu=True),
    "mixed": Benchmark(("mixed.py",), "prompts and decodes in one call, against two peers", needs_gpu=True),
    "cascade": Benchmark(("cascade.py",), "requests that share tokens, against flat decode", needs_gpu=True),
    "engine": Benchmark(("engine.py",), "tokens per second of the engine, by attention", needs_gpu=True),
    "parallel": Benchmark(("parallel.py",), "a context spread over two cards, against one card", needs_gpu=True),
    "sglang": Benchmark(("sglang_turns.py",), "SGLang engines in turns, by attention backend", needs_gpu=True),
    "vllm": Benchmark(("vllm_turns.py",), "vLLM engines in turns, by attention backend", needs_gpu=True),
    "transformers": Benchmark(
        ("transformers_turns.py",), "transformers' batches in turns, by attention", needs_gpu=True
    ),
    "vllm-operators": Benchmark(("vllm_bench.py",), "vLLM's operators, next to its own by --peer", needs_gpu=True),
    "torch": Benchmark(("torch_attention_bench.py",), "PyTorch's attention functions, by kernels", needs_gpu=True),
    "variants": Benchmark(("variants_bench.py",), "variants against built-ins, options against none", needs_gpu=True),
}


def machine() -> str:
    """The CPU, and the GPU if there is one: a figure means nothing without them."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    gpu = f"; {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    return f"{cpu}, {len(os.sched_getaffinity(0))} cores{gpu}; {versions}"


def commit() -> str:
    """The commit that is measured, with a plus if the tree differs from it."""
    git = ["git", "-C", str(HERE)]
    name = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    changed = subprocess.run([*git, "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True)
    return (name.stdout.strip() or "unknown") + ("+" if changed.stdout.strip() else "")


def main() -> int:
    parser = argparse.ArgumentParser(prog="flashpage bench", description=__doc__)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("names", nargs=argparse.REMAINDER, metavar="NAME")
    arguments = parser.parse_args()
    names = list(itertools.takewhile(lambda word: not word.startswith("-"), arguments.names))
    options = arguments.names[len(names) :]
    if options and len(names) != 1:
        print(f"flashpage bench: {options[0]} follows {len(names)} names: pass one benchmark", file=sys.stderr)
        return 2
    if unknown := [name for name in names if name not in BENCHMARKS]:
        print(f"flashpage bench: no benchmark {unknown[0]!r}: there are {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    if arguments.list:
        for name, benchmark in BENCHMARKS.items():
            print(f"{name:<14} {benchmark.summary}{' (needs a GPU)' if benchmark.needs_gpu else ''}")
        return 0
    print(f"{machine()}\n{time.strftime('%Y-%m-%d')}, commit {commit()}")
    code = 0
    for name in names or BENCHMARKS:
        benchmark = BENCHMARKS[name]
        if benchmark.needs_gpu and not options and not torch.cuda.is_available():
            print(f"\n== {name}: skipped, torch finds no GPU here", flush=True)
            continue
        print(f"\n== {name}: {benchmark.summary}", flush=True)
        file, *given = benchmark.program  # in the caller's folder, where --json FILE is meant
        command = [sys.executable, os.path.relpath(HERE / file), *given, *options]
        ended = subprocess.run(command).returncode
        code = max(code, ended if ended in (0, 2) else 1)
    return code


if __name__ == "__main__":
    sys.exit(main())
