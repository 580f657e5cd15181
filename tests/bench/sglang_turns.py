"""Tokens per second of real SGLang engines by attention backend, in turns: all engines are up at the same time, each in
a process of its own, and get the same prompts one after the other.

The model is a Llama of the 8B's shape with 16 layers and SGLang's dummy weights; prompts are drawn, share nothing, and
are answered greedily with a fixed number of tokens. `--profile` writes each engine's kernels, and the host's time of a
step, by SGLang's own profiler. Needs an installed SGLang. `--small --device cpu` runs a tiny model: it only shows that
the program works.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import engine_turns
from chrome_steps import phase_of
from command_line import Parser
from engine_turns import Running, Server
from record import Recorder
from step_profile import of_a_step, show_profile

_STEPS = 24  # that are profiled of each stage
_STAGES = {"prompts": "EXTEND", "decodes": "DECODE"}  # as SGLang names them
_FUNCTIONS = "run_batch", "init_forward_metadata"  # a step, and the plans of a backend


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


def engine_of(options: dict[str, Any]) -> Running:
    from sglang import Engine

    engine = Engine(**options)

    def generate(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        params = {"temperature": 0.0, "max_new_tokens": new_tokens, "ignore_eos": True}
        found = engine.generate(input_ids=prompts, sampling_params=params)
        return [answer["output_ids"] for answer in found]

    def profile(trace: str) -> dict[str, Any]:
        on_card = options["device"] != "cpu"
        with tempfile.TemporaryDirectory() as place:
            given = {"with_stack": True, "record_shapes": False, "profile_by_stage": True}
            activities = ["CPU", "GPU"] if on_card else ["CPU"]
            engine.start_profile(output_dir=place, num_steps=_STEPS, activities=activities, **given)
            generate(engine_turns.prompts_of(trace), _STEPS + 40)
            return {phase: phase_of(_written(Path(place), stage), *_FUNCTIONS) for phase, stage in _STAGES.items()}

    return Running(generate, engine.shutdown, {"profile": profile})


def _written(folder: Path, stage: str) -> Path:
    """The trace of a stage, once it is whole: SGLang writes it while it answers."""
    last = -1
    for _ in range(600):
        found = list(folder.glob(f"*-{stage}.trace.json.gz"))
        if found and found[0].stat().st_size == last:
            return found[0]
        last = found[0].stat().st_size if found else -1
        time.sleep(0.5)
    raise SystemExit(f"SGLang wrote no trace of {stage}; {folder} has {[path.name for path in folder.iterdir()]}.")


def _profile(servers: dict[str, Server], case: str, trace: str, chosen: argparse.Namespace, recorder: Recorder) -> None:
    for server in servers.values():
        server.ask("run", trace, 2)  # compiles
    profiles = {name: server.ask("profile", trace) for name, server in servers.items()}
    for name, phases in profiles.items():
        show_profile(f"{case}: {name}", phases, Path(chosen.profile))
    for phase in _STAGES:
        parts = {name: of_a_step(phases[phase]) for name, phases in profiles.items()}
        recorder.add("sglang-steps", f"{case}: steps with {phase}", figures=parts, ranks=chosen.ranks)


def main() -> None:
    parser = Parser(__doc__)
    engine_turns.add_arguments(parser, traces="1k,6k", repeats=4)
    parser.add_argument("--backends", default="flashpage,fa3,triton", help="SGLang's names (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=1, help="cards of each engine (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=200_000, help="room of each cache (default: %(default)s)")
    parser.add_argument("--profile", metavar="FILE", help="append kernels and host times of some steps; no rates")
    chosen = parser.parse_args()
    if chosen.serve is not None:
        engine_turns.serve(lambda: engine_of(json.loads(chosen.serve)))
        return
    if importlib.util.find_spec("sglang") is None:
        print("skipped: SGLang is not installed")
        return
    recorder = Recorder(chosen.json)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "config.json").write_text(
            json.dumps(engine_turns.LLAMA | (engine_turns.SMALL_LLAMA if chosen.small else {}))
        )
        names = chosen.backends.split(",")
        servers = {name: Server(options_of(name, folder, chosen), folder / f"{name}.log") for name in names}
        for server in servers.values():
            server.answer()
        for trace in ["tiny"] if chosen.small else chosen.traces:
            case = engine_turns.case_of(trace)
            if chosen.profile:
                _profile(servers, case, trace, chosen, recorder)
                continue
            figures = engine_turns.measure(servers, trace, chosen.repeats)
            recorder.add("sglang", case, figures=figures, ranks=chosen.ranks)
            engine_turns.show(case, figures)
        for server in servers.values():
            server.end()


if __name__ == "__main__":
    main()
