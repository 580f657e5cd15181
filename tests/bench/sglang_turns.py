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
import tempfile
from pathlib import Path
from typing import Any

import engine_turns
from engine_turns import Running, Server
from record import Recorder


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

    return Running(generate, engine.shutdown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--backends", default="flashpage,fa3,triton", help="SGLang's names (default: %(default)s)")
    parser.add_argument("--traces", default="1k,6k", help=f"of {', '.join(engine_turns.TRACES)} (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=4, help="turns that are counted (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=1, help="cards of each engine (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=200_000, help="room of each cache (default: %(default)s)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="a tiny model")
    parser.add_argument("--json", metavar="FILE", help="append the figures to this file")
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
        for trace in ["tiny"] if chosen.small else chosen.traces.split(","):
            figures, case = engine_turns.measure(servers, trace, chosen.repeats), engine_turns.case_of(trace)
            recorder.add("sglang", case, figures=figures, ranks=chosen.ranks)
            engine_turns.show(case, figures)
        for server in servers.values():
            server.end()


if __name__ == "__main__":
    main()
