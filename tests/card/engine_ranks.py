"""Real engines on two cards next to the same engines on one, and with other options: tokens and log-probabilities of
the same requests.

    python tests/card/engine_ranks.py vllm      # needs an installed vLLM, and flashpage as its plugin
    python tests/card/engine_ranks.py vllm-options  # one card: graphs, fp8 caches, preemption, drafts, cascades,
                                                    # growth, windows, blocks, rotation, outputs of e4m3, images,
                                                    # windows of generated tokens
    python tests/card/engine_ranks.py sglang
    python tests/card/engine_ranks.py sglang-options  # one card: trees over pages of 64, gpt-oss, Gemma 4

Each engine of a table below is a process of its own; `--only` names some. They start at once, or each after the one
before (`--in-turn`), and those of several ranks answer one after the other. Two engines are compared as soon as both
have answered; `--json` appends what differs to a file, for docs/figures.py. Models have random weights: a Llama, one
with a single KV head, and a BLOOM, whose ALiBi slopes depend on the head; sinks are added to the Llama, each by its
head's number in the whole model, so that a rank that takes another's is found. `--small --device cpu` runs tiny models
by gloo; `--wide` runs a Llama with the shape of its 8B and 16 layers, and no other model.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("support", "bench")]
import engine_features
import engine_log
import image_models
import tiny_model
from engine_setups import (
    KINDS,
    NEW_TOKENS,
    SGLANG,
    SGLANG_OPTIONS,
    VLLM,
    VLLM_OPTIONS,
    Setup,
    sglang_options,
    vllm_options,
)
from engine_turns import differences, in_words
from entry_points import ROOT, write_entry_points
from plain_numba import write_numba
from rank_models import GENERATED_WINDOW, requests, write_models
from record import Recorder

# Ranks meet on this machine, whose CPUs need not be of several NUMA nodes.
ON_CPU = {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


# ---------------------------------------------------------------------------------------------------- in a process


def register_sinks() -> None:
    """vLLM calls this in each of its processes: Llama's layers get sinks, those of the rank's heads."""
    import torch
    import vllm.model_executor.models.llama as llama
    from vllm.distributed import get_tensor_model_parallel_rank
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.models.utils import extract_layer_index

    if not os.environ.get("ENGINE_RANKS_SINKS") or llama.Attention is not Attention:
        return

    class WithSinks(Attention):
        def __init__(self, num_heads: int, *args: Any, prefix: str = "", **given: Any) -> None:
            first = get_tensor_model_parallel_rank() * num_heads
            heads = torch.arange(first, first + num_heads, device="cpu")
            sinks = 3 * torch.sin(1.7 * heads + extract_layer_index(prefix)) + 2
            given["sinks"] = sinks.to(torch.get_default_device(), torch.get_default_dtype())
            super().__init__(num_heads, *args, prefix=prefix, **given)

    llama.Attention = WithSinks


def answer_vllm(setup: Setup, folder: Path, chosen: argparse.Namespace) -> dict[str, Any]:
    ranks = setup.get("ranks", 1)
    os.environ["ENGINE_RANKS_SINKS"] = "1" if setup.get("sinks") else ""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if ranks == 1 else "1"
    if setup.get("backend") == "transformers" and setup["model"] == "generated":
        asked = requests("short"), NEW_TOKENS["short"], GENERATED_WINDOW
        return {"short": tiny_model.answers_in_windows(folder / "llama", *asked, chosen.device)}
    if setup.get("backend") == "transformers":
        scale = image_models.scale_of(importlib.metadata.version("vllm"))
        given = folder / setup["model"], NEW_TOKENS["images"], chosen.device
        return {"images": image_models.answers(*given, scale=scale)}
    counts = engine_features.prepare(setup)
    from vllm import LLM, SamplingParams

    llm = LLM(**vllm_options(setup, folder, chosen.small, chosen.wide))

    def ask(kind: str) -> list[dict[str, Any]]:
        given: Any = {"max_tokens": NEW_TOKENS[kind], "ignore_eos": True, "logprobs": 5, "detokenize": False}
        params = SamplingParams(temperature=0.0, **given)
        prompts: Any = [{"prompt_token_ids": prompt} for prompt in requests(kind)]
        if kind == "images":
            prompts = engine_features.with_images(requests(kind))
        answers = [answer.outputs[0] for answer in llm.generate(prompts, params, use_tqdm=False)]
        return [
            {
                "tokens": list(answer.token_ids),
                "logprobs": [{str(token): one.logprob for token, one in step.items()} for step in answer.logprobs],
            }
            for answer in answers
        ]

    if setup.get("kinds") == ("many",):
        return {"growth": growth_of(llm.llm_engine, SamplingParams)}
    found: dict[str, Any] = ask_all(setup, ask)
    counted = "vllm:num_preemptions", "vllm:prefix_cache_hits", "vllm:spec_decode_num_accepted_tokens"
    found["counts"] = {one.name: one.value for one in llm.get_metrics() if one.name in counted} | counts
    found["counts"] |= engine_features.counts_of_layers(llm)
    return found


def growth_of(engine: Any, sampling: Any) -> dict[str, float]:
    """MiB that the card's and the host's memory grow by while 1,000 requests are answered, half of which are aborted
    after some steps; the first 200 do not count."""

    def memory() -> tuple[float, float]:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return torch.cuda.memory_allocated() / 2**20, pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    params = sampling(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False)
    prompts, answered, start = requests("mixed"), 0, memory()
    for wave in range(40):
        if wave == 8:
            start = memory()
        names = [f"{wave}-{i}" for i in range(25)]
        for i, name in enumerate(names):
            engine.add_request(name, {"prompt_token_ids": prompts[(wave + i) % len(prompts)]}, params)
        for _ in range(10):
            answered += sum(output.finished for output in engine.step())
        engine.abort_request(names[::2])
        while engine.has_unfinished_requests():
            answered += sum(output.finished for output in engine.step())
    card, host = (after - before for after, before in zip(memory(), start, strict=True))
    return {"answered": answered, "card_mib": round(card, 2), "host_mib": round(host, 2)}


def answer_exactly(setup: Setup, folder: Path, chosen: argparse.Namespace) -> dict[str, Any]:
    """By transformers' plain attention in fp32, over the weights that the engines read."""
    from transformers import AutoModelForCausalLM

    plain = {"dtype": torch.float32, "attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(folder / setup["model"], **plain).eval().to(chosen.device)
    model.generation_config.eos_token_id = None

    def answer(prompt: list[int], count: int) -> dict[str, Any]:
        given = torch.tensor([prompt], device=chosen.device)
        how = {"max_new_tokens": count, "do_sample": False, "pad_token_id": 0}
        out = model.generate(given, **how, return_dict_in_generate=True, output_logits=True)
        best = torch.cat(out.logits).float().log_softmax(-1).topk(5)
        steps = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return {
            "tokens": out.sequences[0, len(prompt) :].tolist(),
            "logprobs": [dict(zip(map(str, tokens), values, strict=True)) for tokens, values in steps],
        }

    return ask_all(setup, lambda kind: [answer(prompt, NEW_TOKENS[kind]) for prompt in requests(kind)])


def answer_sglang(setup: Setup, folder: Path, chosen: argparse.Namespace) -> dict[str, Any]:
    if setup.get("backend") == "transformers":
        return answer_exactly(setup, folder, chosen)
    from sglang import Engine

    engine = Engine(**sglang_options(setup, folder, chosen.small, chosen.device))

    accepted: list[float] = []

    def ask(kind: str) -> list[dict[str, Any]]:
        params = {"temperature": 0.0, "max_new_tokens": NEW_TOKENS[kind], "ignore_eos": True}
        asked = {"return_logprob": True, "top_logprobs_num": 5}
        answers = engine.generate(input_ids=requests(kind), sampling_params=params, **asked)
        accepted.extend(answer["meta_info"].get("spec_accept_length", 1.0) for answer in answers)
        return [
            {
                "tokens": answer["output_ids"],
                "logprobs": [{str(token): p for p, token, *_ in step} for step in best],
            }
            for answer in answers
            for best in [answer["meta_info"]["output_top_logprobs"]]
        ]

    found: dict[str, Any] = ask_all(setup, ask)
    engine.shutdown()
    found["counts"] = {"most tokens a step": max(accepted)} if "guesses" in setup else ""
    return found


def ask_all(setup: Setup, ask: Callable[[str], list[dict[str, Any]]]) -> dict[str, Any]:
    """One engine of several ranks at a time: their collectives wait for each other while cards run other programs."""
    with open(Path(tempfile.gettempdir(), "engine-ranks.lock"), "w") as file, contextlib.ExitStack() as stack:
        if setup.get("ranks", 1) > 1:
            fcntl.flock(file, fcntl.LOCK_EX)
            stack.callback(fcntl.flock, file, fcntl.LOCK_UN)
        return {kind: ask(kind) for kind in setup.get("kinds", KINDS)}


@dataclasses.dataclass(frozen=True)
class Engine:
    """A project whose engines are compared."""

    name: str
    table: dict[str, Setup]
    answer: Callable[[Setup, Path, argparse.Namespace], dict[str, Any]]
    plugin_group: str  # the entry points by which it finds flashpage
    module: str  # that it is imported by
    entry_points: tuple[str, ...] = ()  # of this program


ENGINES = {
    "vllm": Engine(
        name="vLLM",
        table=VLLM,
        answer=answer_vllm,
        plugin_group="vllm.general_plugins",
        module="vllm",
        entry_points=("sinks_of_ranks = engine_ranks:register_sinks",),
    ),
    "vllm-options": Engine("vLLM", VLLM_OPTIONS, answer_vllm, "vllm.general_plugins", "vllm"),
    "sglang": Engine("SGLang", SGLANG, answer_sglang, "sglang.srt.plugins", "sglang"),
    "sglang-options": Engine("SGLang", SGLANG_OPTIONS, answer_sglang, "sglang.srt.plugins", "sglang"),
}


# ---------------------------------------------------------------------------------------------------- all of them


class Comparison:
    """Answers by engine, and what is said of them."""

    def __init__(self, engine: str, label: str, recorder: Recorder) -> None:
        self.engine, self.label, self.recorder = engine, label, recorder  # `label`: the engine's name in records
        self.answers: dict[str, dict[str, Any]] = {}

    def add(self, name: str, found: dict[str, Any]) -> None:
        """Compares an engine with itself, and with those that have answered before."""
        self.answers[name] = found
        print(name, found.get("counts", found.get("growth", "")), flush=True)
        if "growth" in found:
            self.recorder.add("growth", f"{self.label} {name}", **found["growth"])
        if "again" in found:
            self._say(name, "again", "its first answers", found["mixed"], found["again"])
        for other in self.answers:
            self._compare(name, other)
            self._compare(other, name)

    def _compare(self, name: str, base: str) -> None:
        model = name.partition("-")[0]
        if name == base or base not in (f"{model}-1", f"{model}-1-other", f"{model}-1-exact"):
            return
        if name.endswith("exact"):  # the other way
            return
        if base.endswith("other") and (name.endswith("other") or name == f"{model}-1"):  # the latter the other way
            return
        own, other = self.answers[name], self.answers[base]
        for kind in ("mixed", "short", "shared", "images"):
            if kind in own and kind in other:
                self._say(name, kind, base, other[kind], own[kind])

    def _say(self, name: str, kind: str, base: str, own: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
        found = differences(own, other)
        print(f"   {name}, {kind}, next to {base}: {in_words(found)}", flush=True)
        ranks = ENGINES[self.engine].table[name].get("ranks", 1)
        self.recorder.add("ranks", f"{self.label} {name}, {kind}, next to {base}", ranks=ranks, **found)


def started(name: str, number: int, place: Path, chosen: argparse.Namespace) -> subprocess.Popen[bytes]:
    """An engine's process. Those of one rank take the cards by turns."""
    engine = ENGINES[chosen.engine]
    entries = write_entry_points(place / "entries", engine.plugin_group, *engine.entry_points)
    write_numba(entries)
    paths = entries, ROOT, Path(__file__).parent
    variables = {"PYTHONPATH": os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")])}
    setup = engine.table[name]
    if setup.get("ranks", 1) == 1 and chosen.device == "cuda":
        given = os.environ.get("CUDA_VISIBLE_DEVICES")
        cards = given.split(",") if given else [str(i) for i in range(max(1, torch.cuda.device_count()))]
        variables["CUDA_VISIBLE_DEVICES"] = cards[number % len(cards)]
    if chosen.device == "cpu":
        variables |= ON_CPU | {"FLASHPAGE_VLLM": "off" if "backend" in setup else "on"}
    command = [sys.executable, __file__, *sys.argv[1:], "--answer", name, "--place", str(place)]
    streams: dict[str, Any] = {"stderr": subprocess.STDOUT, "start_new_session": True}
    with (place / f"{name}.log").open("wb") as log:
        return subprocess.Popen(command, env=os.environ | variables, stdout=log, **streams)


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends an engine with its workers, which may outlive it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_all(names: list[str], place: Path, chosen: argparse.Namespace, comparison: Comparison) -> None:
    waiting, running = list(enumerate(names)), dict[str, tuple[subprocess.Popen[bytes], float]]()
    try:
        while waiting or running:
            while waiting and not (chosen.in_turn and running):
                number, name = waiting.pop(0)
                running[name] = started(name, number, place, chosen), time.monotonic() + chosen.seconds
            for name, (process, last) in list(running.items()):
                if process.poll() is None and time.monotonic() < last:
                    continue
                is_late = process.poll() is None
                end(running.pop(name)[0])
                if process.returncode == 0:
                    comparison.add(name, json.loads((place / f"{name}.json").read_text()))
                else:
                    log = (place / f"{name}.log").read_text()
                    within = f" within {chosen.seconds:.0f} s" if is_late else ""
                    print(f"{name} gave no answer{within}; {engine_log.in_short(log)}", flush=True)
            time.sleep(0.1)
    finally:
        for process, _ in running.values():
            end(process)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("--only", help="names of the table, with commas between (default: all)")
    parser.add_argument(
        "--seconds", type=float, default=600, help="seconds that an engine may take (default: %(default)s)"
    )
    parser.add_argument("--in-turn", action="store_true", help="start each engine after the one before")
    parser.add_argument("--json", help="append a line for each comparison to this file")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="tiny models in fp32")
    parser.add_argument("--wide", action="store_true", help="vLLM: Llama's 8B at 16 layers; `--only` its engines")
    parser.add_argument("--answer", help=argparse.SUPPRESS)
    parser.add_argument("--place", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    engine = ENGINES[chosen.engine]
    table = engine.table
    if chosen.answer:
        found = engine.answer(table[chosen.answer], chosen.place, chosen)
        (chosen.place / f"{chosen.answer}.json").write_text(json.dumps(found))
        sys.stdout.flush()
        os._exit(0)  # threads of engines do not hold it
    names = chosen.only.split(",") if chosen.only else list(table)
    if unknown := [name for name in names if name not in table]:
        parser.error(f"--only {unknown[0]} is no engine of {chosen.engine}: name some of {', '.join(table)}")
    for name in names:
        if (base := f"{name.partition('-')[0]}-1") not in names:
            parser.error(f"--only {name} is compared with {base}: name it too")
    if chosen.wide and (chosen.small or engine.module != "vllm"):
        parser.error(
            f"--wide has vLLM's engines at their own size: leave out {'--small' if chosen.small else '--wide'}"
        )
    if chosen.wide and (others := [name for name in names if table[name]["model"] != "llama"]):
        parser.error(f"--wide runs a Llama alone, and {others[0]} is another model: name other engines with --only")
    if importlib.util.find_spec(engine.module) is None:
        print(f"skipped: {engine.name} is not installed")
        return 0
    label = f"{chosen.engine.removesuffix('-options')}-16-layers" if chosen.wide else chosen.engine
    comparison = Comparison(chosen.engine, label, Recorder(chosen.json))
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        write_models(place, chosen.small, chosen.wide)
        run_all(names, place, chosen, comparison)
    return 0 if len(comparison.answers) == len(names) else 1


if __name__ == "__main__":
    sys.exit(main())
