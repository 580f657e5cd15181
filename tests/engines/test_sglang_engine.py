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

import get_sglang
import pytest
import tiny_model
from entry_points import ROOT, write_entry_points
from sglang_program import NEW_TOKENS

SUPPORT = ROOT / "tests" / "support"
TREE = get_sglang.ENGINES / f"sglang-{get_sglang.TREES[0]}"

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

pytestmark = pytest.mark.slow


def needs(*folders: Path) -> None:
    for needed in folders:
        if not needed.is_dir():
            pytest.skip(f"{needed.relative_to(ROOT)} is missing: run `python tests/support/get_sglang.py`")


def call(arguments: list[str], folder: Path) -> str:
    """Runs a program, and returns what it prints."""
    entries = write_entry_points(folder / "entries", "sglang.srt.plugins")
    paths = entries, TREE, get_sglang.PACKAGES, ROOT, SUPPORT, SUPPORT / "sglang_tree"
    given = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "FLASHPAGE_PROGRESS": "off",
        "HF_HUB_OFFLINE": "1",
        "TORCHDYNAMO_DISABLE": "1",  # SGLang compiles its experts for the CPU, which takes ten seconds
    }
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=given, cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def answers(folder: Path, engines: list[dict[str, Any]]) -> list[Any]:
    """The tokens of each engine, all in one process."""
    job, out = folder / "job.json", folder / "out.json"
    job.write_text(json.dumps({"prompts": tiny_model.prompts(), "engines": engines}))
    call([str(SUPPORT / "sglang_program.py"), str(job), str(out)], folder)
    found: list[Any] = json.loads(out.read_text())
    return found


def test_tokens_equal_those_of_its_own_attention(tmp_path: Path) -> None:
    """Prefixes shared through the radix cache, prompts in chunks next to decodes; a Llama against SGLang's attention in
    torch, and others against transformers. Gemma2 has soft caps, and windows in every second layer, whose tokens have
    the slots of all layers or their own; DeepSeek-V3 has latent rows. gpt-oss (with sinks), EXAONE 4 and Gemma 4 have
    windows too, and SGLang would not start them without our hooks."""
    needs(TREE, get_sglang.PACKAGES)
    llama, wide = (tiny_model.write(tmp_path / name.replace(" ", "-"), name) for name in ("llama", "head_dim 80"))
    gemma2, deepseek = tiny_model.write_gemma2(tmp_path / "gemma2"), tiny_model.write_deepseek(tmp_path / "deepseek")
    gpt_oss, exaone4 = tiny_model.write_gpt_oss(tmp_path / "gpt-oss"), tiny_model.write_exaone4(tmp_path / "exaone4")
    gemma4 = tiny_model.write_gemma4(tmp_path / "gemma4")
    # SGLang reads another name of the activation; a soft cap of logits runs in Triton, and changes no greedy token.
    changes: dict[str, Any] = {"hidden_act": "gelu_pytorch_tanh", "final_logit_softcapping": None}
    own_pool = changes | {"is_hybrid_swa": True, "hybrid_layer_pattern": [1, 0, 1, 0]}
    theirs, ours = ({"attention_backend": name} for name in ("torch_native", "flashpage"))
    found = answers(
        tmp_path,
        [
            {"model_path": str(llama), **theirs},
            {"model_path": str(llama), **ours},
            {"model_path": str(wide), **ours},
            {"model_path": str(gemma2), **ours, "json_model_override_args": json.dumps(changes)},
            {"model_path": str(gemma2), **ours, "json_model_override_args": json.dumps(own_pool)},
            {"model_path": str(gpt_oss), **ours},
            {"model_path": str(exaone4), **ours},
            {"model_path": str(gemma4), **ours, "json_model_override_args": json.dumps(GEMMA4_OWN)},
            {"model_path": str(deepseek), **ours, "json_model_override_args": json.dumps(CHECKPOINTS_OWN)},
        ],
    )
    assert [each["pool"] for each in found] == [
        *("", "MHATokenToKVPool", "MHATokenToKVPool", "MHATokenToKVPool", "SWAKVPool"),
        *("SWAKVPool", "MHATokenToKVPool", "SWAKVPool", "MLATokenToKVPool"),
    ]
    tokens = [each["tokens"] for each in found]
    assert tokens[1] == tokens[0], "llama"
    assert tokens[2] == tiny_model.expected_tokens(wide, NEW_TOKENS), "head_dim 80"
    windows = tiny_model.expected_tokens(gemma2, NEW_TOKENS)
    assert tokens[3] == windows, "windows"
    assert tokens[4] == windows, "windows in their own pool"
    for i, model in ((5, gpt_oss), (6, exaone4), (7, gemma4)):
        assert tokens[i] == tiny_model.expected_tokens(model, NEW_TOKENS), model.name
    assert tokens[8] == tiny_model.expected_tokens(deepseek, NEW_TOKENS), "latent rows"


@pytest.mark.rare
def test_the_example(tmp_path: Path) -> None:
    needs(TREE, get_sglang.PACKAGES)
    printed = call([str(ROOT / "examples" / "sglang_generate.py")], tmp_path)
    assert printed.count("equal to transformers': True") == 3, printed
