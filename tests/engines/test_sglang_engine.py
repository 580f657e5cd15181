"""Real SGLang engines on the CPU, in a process of their own, that find flashpage by its entry point.

Needs the folders that `python tests/support/get_sglang.py` makes below build/engines; `make test-engines` calls it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import alone_or_together
import encoder_models
import get_sglang
import pytest
import tiny_model
import torch
from entry_points import ROOT, write_entry_points
from sglang_program import NEW_TOKENS

SUPPORT = ROOT / "tests" / "support"

# Fields that checkpoints have and transformers leaves out. On the CPU SGLang wants RoPE scaled by YaRN; a factor of 1
# changes nothing.
CHECKPOINTS_OWN: dict[str, Any] = {
    "moe_layer_freq": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 2048,
    },
}

# On the CPU SGLang divides the experts' size.
GEMMA4_OWN: dict[str, Any] = tiny_model.GEMMA4_NAMES | {"moe_intermediate_size": 256}
BERT_OWN: dict[str, Any] = {"position_embedding_type": "absolute"}

# With a tokenizer, and without chunks of prompts, whose tokens an encoder sees at once.
ENCODERS: dict[str, Any] = {
    "skip_tokenizer_init": False,
    "grammar_backend": "none",
    "enable_mixed_chunk": False,
    "chunked_prefill_size": -1,
    "disable_radix_cache": True,
    "mem_fraction_static": 0.5,
}

# A diffusion model, whose steps are blocks. Pages are blocks as well, unless there is no radix cache; SGLang allocates
# pages of several tokens by Triton.
DIFFUSION: dict[str, Any] = {
    "dllm_algorithm": "LowConfidence",
    "enable_mixed_chunk": False,
    "chunked_prefill_size": -1,
    "disable_radix_cache": True,
    "mem_fraction_static": 0.5,
    "prompts": tiny_model.prompts()[:4],
}

# SGLang replaces what a Whisper's transcript begins with: tokens of a language and a task follow the first one.
TRANSCRIPT = list(range(encoder_models.BEGIN, encoder_models.BEGIN + 4))

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=get_sglang.PINS)
def paths(request: pytest.FixtureRequest) -> tuple[Path, Path]:
    """A version's files, and the packages that it imports; versions that are missing are skipped."""
    found = get_sglang.ENGINES / f"sglang-{request.param}", get_sglang.packages(request.param)
    for needed in found:
        if not needed.is_dir():
            pytest.skip(f"{needed.relative_to(ROOT)} is missing: run `python tests/support/get_sglang.py`")
    return found


def call(arguments: list[str], folder: Path, engine: tuple[Path, Path]) -> str:
    """Runs a program, and returns what it prints."""
    entries = write_entry_points(folder / "entries", "sglang.srt.plugins")
    paths = entries, *engine, ROOT, SUPPORT, SUPPORT / "sglang_tree"
    given = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "FLASHPAGE_PROGRESS": "off",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",  # threads that wait for cores which other tests use would take most of the time
        "TORCHDYNAMO_DISABLE": "1",  # SGLang compiles its experts for the CPU, which takes ten seconds
    }
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=given, cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def answers(folder: Path, engines: list[dict[str, Any]], paths: tuple[Path, Path]) -> list[Any]:
    """The answers of each engine, all in one process."""
    job, out = folder / "job.json", folder / "out.json"
    job.write_text(json.dumps({"prompts": tiny_model.prompts(), "engines": engines}))
    call([str(SUPPORT / "sglang_program.py"), str(job), str(out)], folder, paths)
    found: list[Any] = json.loads(out.read_text())
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    found = {name: tiny_model.write(folder / name.replace(" ", "-"), name) for name in ("llama", "head_dim 80")}
    for module in (tiny_model, encoder_models):
        for name in ("gemma2", "deepseek", "gpt_oss", "exaone4", "gemma4", "llama4", "sdar", "bert", "whisper"):
            if (write := getattr(module, f"write_{name}", None)) is not None:
                found[name] = write(folder / name)
    found["llama4, halves"] = found["llama4"] / "halves"
    file = found["gemma4"] / "config.json"  # SGLang reads the size of heads without a layer
    file.write_text(json.dumps(json.loads(file.read_text()) | {"allow_global_per_layer_attribute_access": True}))
    return found


@pytest.fixture(scope="module")
def found(
    models: dict[str, Path],
    paths: tuple[Path, Path],
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> dict[str, Any]:
    """The answers of all engines, each of which takes a second or less; to import SGLang takes ten. Engines with two
    backends start if their rare tests run."""
    theirs, ours = ({"attention_backend": name} for name in ("torch_native", "flashpage"))
    # SGLang reads another name of the activation; a soft cap of logits runs in Triton, and changes no greedy token.
    changes: dict[str, Any] = {"hidden_act": "gelu_pytorch_tanh", "final_logit_softcapping": None}
    own_pool = changes | {"is_hybrid_swa": True, "hybrid_layer_pattern": [1, 0, 1, 0]}
    chunk_pool = {"is_hybrid_swa": True, "hybrid_layer_pattern": [1, 1, 1, 0]}
    alone = {"answer": "alone", "context_length": alone_or_together.TOKENS}
    deterministic = {"enable_deterministic_inference": True}
    params = [getattr(getattr(item, "callspec", None), "params", {}) for item in request.session.items]
    pairs = {" and ".join(its["pair"]): ("llama", of_two(its["pair"])) for its in params if "pair" in its}
    engines: dict[str, tuple[str, dict[str, Any]]] = {  # model and options
        "llama, theirs": ("llama", theirs),
        "llama": ("llama", ours),
        **pairs,
        "head_dim 80": ("head_dim 80", ours),
        "gemma2": ("gemma2", ours | overriding(changes)),
        "gemma2, own pool": ("gemma2", ours | overriding(own_pool)),
        "gpt_oss": ("gpt_oss", ours),
        "exaone4": ("exaone4", ours),
        "llama4": ("llama4, halves", ours),
        "llama4, own pool": ("llama4, halves", ours | overriding(chunk_pool)),
        "gemma4": ("gemma4", ours | overriding(GEMMA4_OWN)),
        "sdar, theirs": ("sdar", theirs | DIFFUSION),
        "sdar": ("sdar", ours | DIFFUSION),
        "bert": ("bert", ours | ENCODERS | overriding(BERT_OWN) | {"answer": "embed", "is_embedding": True}),
        "whisper": ("whisper", ours | ENCODERS | {"answer": "transcribe", "prompts": [TRANSCRIPT[:1]] * 3}),
        "deterministic": ("llama", ours | alone | deterministic),
        "deterministic deepseek": ("deepseek", ours | overriding(CHECKPOINTS_OWN) | deterministic),
        "deepseek": ("deepseek", ours | overriding(CHECKPOINTS_OWN)),
    }
    asked = [{"model_path": str(models[model]), **options} for model, options in engines.values()]
    return dict(zip(engines, answers(tmp_path_factory.mktemp("sglang"), asked, paths), strict=True))


def of_two(pair: tuple[str, str]) -> dict[str, Any]:
    """The options of an engine with one backend for prompts and another for decodes."""
    return {"prefill_attention_backend": pair[0], "decode_attention_backend": pair[1]}


def overriding(fields: dict[str, Any]) -> dict[str, Any]:
    """The option by which a model's configuration gets other fields."""
    return {"json_model_override_args": json.dumps(fields)}


def test_tokens_equal_those_of_its_own_attention(models: dict[str, Path], found: dict[str, Any]) -> None:
    """Prefixes shared through the radix cache, prompts in chunks next to decodes; a Llama against SGLang's attention in
    torch, and others against transformers. Gemma2 has soft caps, and windows in every second layer, whose tokens have
    the slots of all layers or their own; DeepSeek-V3 has latent rows. Llama 4 has chunks in place of windows. gpt-oss
    (with sinks), EXAONE 4 and Gemma 4 have windows too, and SGLang would not start them without our hooks."""
    pools = {
        "llama, theirs": "",
        "sdar, theirs": "",
        "gemma2, own pool": "SWAKVPool",
        "gpt_oss": "SWAKVPool",
        "gemma4": "SWAKVPool",
    }
    pools |= {"llama4, own pool": "SWAKVPool"}
    pools |= {"deepseek": "MLATokenToKVPool", "deterministic deepseek": "MLATokenToKVPool"}
    for name, each in found.items():
        assert each["pool"] == pools.get(name, "MHATokenToKVPool"), name
    assert found["llama"]["tokens"] == found["llama, theirs"]["tokens"]
    for name in ("head_dim 80", "gemma2", "gpt_oss", "exaone4", "gemma4", "llama4", "deepseek"):
        reference = tiny_model.expected_tokens(models[name], NEW_TOKENS)
        assert found[name]["tokens"] == reference, name
        if name == "gemma2":
            assert found["gemma2, own pool"]["tokens"] == reference
        if name == "llama4":
            assert found["llama4, own pool"]["tokens"] == reference
        if name == "deepseek":
            assert found["deterministic deepseek"]["tokens"] == reference


def test_a_diffusion_model(found: dict[str, Any]) -> None:
    """An SDAR, whose rows see all of their own block."""
    assert found["sdar"]["tokens"] == found["sdar, theirs"]["tokens"]
    assert "DLLM_EXTEND" in found["sdar"]["steps"]
    assert len({tuple(tokens) for tokens in found["sdar"]["tokens"]}) == 4


def test_an_encoder(models: dict[str, Path], found: dict[str, Any]) -> None:
    """The embeddings of a BERT, whose rows see all tokens of their request."""
    expected = encoder_models.expected_embeddings(models["bert"])
    for answer, reference in zip(found["bert"]["tokens"], expected, strict=True):
        torch.testing.assert_close(torch.tensor(answer), reference, rtol=1e-4, atol=1e-5)


def test_cross_attention(models: dict[str, Path], found: dict[str, Any]) -> None:
    """Transcripts of a Whisper, whose decoder reads the keys and values of an encoder from slots of its own."""
    expected = encoder_models.expected_transcripts(models["whisper"], NEW_TOKENS, [TRANSCRIPT] * 3)
    assert found["whisper"]["tokens"] == expected


def test_deterministic_mode(found: dict[str, Any]) -> None:
    """The bits of a request's log-probabilities do not depend on the others. Without the mode that depends on which
    requests share a step."""
    assert all(found["deterministic"]["tokens"])


@pytest.mark.rare
@pytest.mark.parametrize("pair", [("torch_native", "flashpage"), ("flashpage", "torch_native")], ids=" and ".join)
def test_one_backend_for_prompts_and_one_for_decodes(pair: tuple[str, str], found: dict[str, Any]) -> None:
    """Decodes read the keys and values of prompts, which the other backend wrote. Prompts with decodes mixed among them
    read those of earlier decodes. Our backend plans its own steps alone."""
    each = found[" and ".join(pair)]
    assert each["tokens"] == found["llama, theirs"]["tokens"]
    for backend, step in zip(pair, ("EXTEND", "DECODE"), strict=True):
        assert (step in each["steps"]) == (backend == "flashpage")


@pytest.mark.rare
def test_the_example(tmp_path: Path, paths: tuple[Path, Path]) -> None:
    printed = call([str(ROOT / "examples" / "sglang_generate.py")], tmp_path, paths)
    assert printed.count("equal to transformers': True") == 3, printed


def test_lists_of_tokens(paths: tuple[Path, Path], tmp_path: Path) -> None:
    """SGLang's backend for DeepSeek V3.2, up to the kernels of others."""
    assert call([str(SUPPORT / "sglang_lists.py")], tmp_path, paths).split()[-1] == "equal"
