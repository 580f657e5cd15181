"""Tokens per second of real vLLM engines by attention backend, in turns: all engines are up at the same time, each in a
process of its own, and get the same prompts one after the other.

Models have the shapes below and random weights, under which a token depends on what attention found; prompts share
nothing and are answered greedily. `--check` compares tokens and log-probabilities with those of the first backend,
`--profile` writes each engine's kernels, and the host's time of a step. Needs an installed vLLM.
`--small --device cpu` runs tiny models with vLLM for the CPU: it only shows that the program works.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import tempfile
from pathlib import Path
from typing import Any

import engine_turns
from command_line import Parser
from drawn_weights import draw_weights
from engine_turns import LLAMA, Running, Server, differences, in_words
from record import Recorder
from step_profile import of_a_step, profiled, show_profile

_DEEPSEEK: dict[str, Any] = LLAMA | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "head_dim": 64,
    "n_routed_experts": 8,  # of no layer
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,  # the 8B's shape with 16 layers
    "windows": LLAMA | {"sliding_window": 1024},  # in every second layer
    # Latent rows: attention and dense layers of DeepSeek-V2-Lite, and of V3. With few layers the host decides.
    "mla16": _DEEPSEEK
    | {
        "hidden_size": 2048,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "intermediate_size": 10944,
    },
    "mla128": _DEEPSEEK
    | {
        "hidden_size": 7168,
        "num_hidden_layers": 16,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "intermediate_size": 18432,
    },
}
_SMALL_LATENT = {"hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 256}
BACKENDS = {"llama": "CUSTOM,FLASH_ATTN", "mla": "CUSTOM,FLASH_ATTN_MLA,FLASHMLA"}


def model_of(name: str, is_small: bool, layers: int | None) -> dict[str, Any]:
    found = dict(MODELS[name])
    if is_small:
        found |= engine_turns.SMALL_LLAMA
        if is_latent(name):
            found |= _SMALL_LATENT | {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 64}
        elif name == "windows":
            found["sliding_window"] = 32
    layers = found["num_hidden_layers"] = layers or found["num_hidden_layers"]
    if is_latent(name):
        found["first_k_dense_replace"] = layers
    if name == "windows":
        found["layer_types"] = (["full_attention", "sliding_attention"] * layers)[:layers]
    return found


def is_latent(name: str) -> bool:
    return name.startswith("mla")


def options_of(backend: str, folder: Path, chosen: argparse.Namespace) -> dict[str, Any]:
    """vLLM's arguments: its usual graphs and torch.compile, no cache of prefixes."""
    latent = is_latent(chosen.model)
    found = {
        "model": str(folder),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "float32" if chosen.small else "bfloat16",
        "tensor_parallel_size": chosen.ranks,
        "max_model_len": 1024 if chosen.small else 40960,
        "max_num_seqs": 8 if chosen.small else 64,
        "max_num_batched_tokens": 128 if chosen.small else 8192,
        "block_size": chosen.block_size or (64 if latent or chosen.small else 16),
        "kv_cache_dtype": chosen.kv_dtype,
        "enable_prefix_caching": False,
        "disable_custom_all_reduce": True,
        "kv_cache_memory_bytes": (32 << 20) if chosen.small else int(chosen.kv_gib * 2**30),
        "gpu_memory_utilization": 0.2,  # of a card's memory, which must be free; the cache has its size above
        "enforce_eager": chosen.small or chosen.eager,
    }
    if chosen.graphs:
        found["compilation_config"] = {"cudagraph_mode": chosen.graphs}
    if chosen.device != "cpu":  # there vLLM has one backend, whose place flashpage takes by FLASHPAGE_VLLM=on
        found["attention_config"] = {"backend": backend}
        if latent:
            prefill = "CUSTOM" if backend == "CUSTOM" else "FLASH_ATTN"
            found["attention_config"]["mla_prefill_backend"] = prefill
    return found


# ---------------------------------------------------------------------------------------------------- in a process


def engine_of(options: dict[str, Any]) -> Running:
    from vllm import LLM, SamplingParams

    llm = LLM(**options)
    llm.apply_model(draw_weights)

    def ask(prompts: list[list[int]], new_tokens: int, **more: Any) -> Any:
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False, **more)
        given: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [answer.outputs[0] for answer in llm.generate(given, params, use_tqdm=False)]

    def generate(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        return [list(answer.token_ids) for answer in ask(prompts, new_tokens)]

    def check(trace: str) -> list[dict[str, Any]]:
        """Tokens of some prompts, and the log-probabilities of the best five at each step."""
        answers = ask([prompt[:1500] for prompt in engine_turns.prompts_of(trace)[:16]], 16, logprobs=5)
        return [
            {
                "tokens": list(answer.token_ids),
                "logprobs": [{str(token): one.logprob for token, one in step.items()} for step in answer.logprobs],
            }
            for answer in answers
        ]

    def profile(trace: str) -> dict[str, Any]:
        params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, detokenize=False)
        return profiled(llm, engine_turns.prompts_of(trace), params)

    return Running(generate, lambda: None, {"check": check, "profile": profile})


# ---------------------------------------------------------------------------------------------------- all of them


def main() -> None:
    parser = Parser(__doc__)
    engine_turns.add_arguments(parser, traces="1k,6k", repeats=4)
    parser.add_argument("--model", default="llama", choices=MODELS, help="shape (default: %(default)s)")
    parser.add_argument("--layers", type=int, help="instead of the shape's own")
    parser.add_argument("--backends", help="vLLM's names (default: CUSTOM, which is flashpage, and vLLM's for Hopper)")
    parser.add_argument("--ranks", type=int, default=1, help="cards of each engine (default: %(default)s)")
    parser.add_argument("--kv-gib", type=float, default=16, help="memory of each cache (default: %(default)s)")
    parser.add_argument("--kv-dtype", default="auto", help="of the cache: auto, fp8, fp8_e5m2 (default: %(default)s)")
    parser.add_argument("--block-size", type=int, help="tokens of a block (default: 16; 64 for latent rows)")
    parser.add_argument("--eager", action="store_true", help="no graphs and no torch.compile")
    parser.add_argument("--graphs", help="vLLM's cudagraph_mode, such as FULL_DECODE_ONLY (default: vLLM's)")
    parser.add_argument("--xqa", action="store_true", help="FLASHINFER decodes by XQA, as on a server with a network")
    parser.add_argument("--check", action="store_true", help="compare tokens and log-probabilities first")
    parser.add_argument(
        "--profile",
        metavar="FILE",
        help="append kernels and host times of some steps; one rank; an engine is then one process, and slower",
    )
    chosen = parser.parse_args()
    if chosen.graphs and (chosen.eager or chosen.small):
        parser.error(
            f"--graphs {chosen.graphs}: {'--eager' if chosen.eager else '--small'} has no graphs; leave one out"
        )
    if chosen.serve is not None:
        engine_turns.serve(lambda: engine_of(json.loads(chosen.serve)))
        return
    if importlib.util.find_spec("vllm") is None:
        print("skipped: vLLM is not installed")
        return
    backends = (chosen.backends or BACKENDS["mla" if is_latent(chosen.model) else "llama"]).split(",")
    model = model_of(chosen.model, chosen.small, chosen.layers)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "config.json").write_text(json.dumps(model))
        servers = {}
        for backend in backends:
            is_own = backend == "CUSTOM"
            name = "flashpage" if is_own else backend
            variables = {"FLASHPAGE_VLLM": "on" if chosen.device == "cpu" and is_own else "off"}
            if chosen.profile:
                variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # so that this process sees the kernels
            if chosen.xqa:
                variables["VLLM_HAS_FLASHINFER_CUBIN"] = "1"
            variables["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # the weights are drawn by a function that is sent
            variables["VLLM_CACHE_ROOT"] = str(folder / f"{name}-cache")  # they compile at the same time
            servers[name] = Server(options_of(backend, folder, chosen), folder / f"{name}.log", variables)
        for server in servers.values():
            server.answer()
        shape = f"{chosen.model} of {model['num_hidden_layers']} layers"
        shape += "" if chosen.kv_dtype == "auto" else f", {chosen.kv_dtype} cache"
        shape += ", eager" if chosen.eager else ""
        run(servers, shape, ["tiny"] if chosen.small else chosen.traces, chosen)


def run(servers: dict[str, Server], shape: str, traces: list[str], chosen: argparse.Namespace) -> None:
    recorder = Recorder(chosen.json)
    more = (f", {chosen.graphs}" if chosen.graphs else "") + (", FLASHINFER's decodes by XQA" if chosen.xqa else "")
    if chosen.check:
        answers = {name: server.ask("check", traces[0]) for name, server in servers.items()}
        first, *others = answers
        for name in others:
            found = differences(answers[first], answers[name])
            print(f"{first} and {name}: {in_words(found)}", flush=True)
            recorder.add("ranks", f"vllm {shape}, {name} next to {first}", ranks=chosen.ranks, **found)
    for trace in traces:
        figures = engine_turns.measure(servers, trace, chosen.repeats)
        case = f"{shape}, {engine_turns.case_of(trace)}{more}"
        engine_turns.show(case, figures)
        if not chosen.profile:
            recorder.add("vllm", case, figures=figures, ranks=chosen.ranks)
        else:
            profiles = {name: server.ask("profile", trace) for name, server in servers.items()}
            for name, phases in profiles.items():
                show_profile(f"{case}: {name}", phases, Path(chosen.profile))
            for phase in ("prompts", "decodes"):
                parts = {name: of_a_step(phases[phase]) for name, phases in profiles.items()}
                recorder.add("vllm-steps", f"{case}: steps with {phase}", figures=parts, ranks=chosen.ranks)
    for server in servers.values():
        server.end()


if __name__ == "__main__":
    main()
