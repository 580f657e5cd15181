"""SGLang's models, layers and options that cannot be served: what our backend answers when SGLang starts."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import fake_sglang
import pytest
import torch
from sglang_latent import LatentScene
from sglang_step import Form, Scene

from flashpage.engines.sglang import support

DECODE = ([1, 1, 1, 1], [5, 64, 130, 33])
LLAMA4 = SimpleNamespace(architectures=["Llama4ForConditionalGeneration"])
CHUNKED = {"model_config": {"attention_chunk_size": 8192, "hf_config": LLAMA4}}
HRM = SimpleNamespace(architectures=["HrmTextForCausalLM"], model_type="hrm_text")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_config": {"attention_chunk_size": 8192}}, "attention in chunks.* Llama 4 alone"),
        (CHUNKED | {"server_args": {"speculative_eagle_topk": 2}}, "--speculative-eagle-topk 2: .* chunks"),
        ({"model_config": {"hf_config": HRM}}, "HRM-Text.* Choose --attention-backend triton"),
        ({"model_config": {"head_dim": 100}}, "head_dim=100 is not supported"),
    ],
)
def test_models_that_cannot_be_served(changes: dict[str, Any], reason: str) -> None:
    runner = Scene(Form(), *DECODE, "cpu").runner()
    for name, value in changes.items():
        if isinstance(value, dict):
            vars(getattr(runner, name)).update(value)
        else:
            setattr(runner, name, value)
    with pytest.raises(ValueError, match=reason):
        support.check_runner(runner)


def test_a_draft_of_a_model_with_chunks_is_served() -> None:
    """Its config may name chunks that its layers do not have."""
    runner = Scene(Form(), *DECODE, "cpu").runner()
    vars(runner.model_config).update(attention_chunk_size=8192, is_draft_model=True)
    support.check_runner(runner)


@pytest.mark.parametrize("is_prefix", [False, True])
def test_an_hrm_text_of_causal_prompts_is_served(is_prefix: bool) -> None:
    runner = Scene(Form(), *DECODE, "cpu").runner()
    runner.model_config.hf_config = SimpleNamespace(**vars(HRM), prefix_lm=is_prefix)
    if not is_prefix:
        support.check_runner(runner)
        return
    with pytest.raises(ValueError, match="HRM-Text"):
        support.check_runner(runner)


@pytest.mark.parametrize(
    ("name", "value"),
    [("v_head_dim", 32), ("pos_encoding_mode", "ALIBI"), ("logit_capping_method", "rpn"), ("xai_temperature_len", 4)],
)
def test_layers_that_cannot_be_served(name: str, value: Any) -> None:
    scene = Scene(Form(), *DECODE, "cpu")
    setattr(scene.layer, name, value)
    with pytest.raises(ValueError, match=f"layer 0 has {name}="):
        scene.backend()


def test_arguments_that_cannot_be_served() -> None:
    for name in ("attention_backend", "prefill_attention_backend", "speculative_draft_attention_backend"):
        only = {"attention_backend": "fa3", name: "flashpage"}
        with pytest.raises(ValueError, match="--kv-cache-dtype fp4_e2m1"):
            support.check_arguments(fake_sglang.server_args(kv_cache_dtype="fp4_e2m1", **only))
    with pytest.raises(ValueError, match="--dcp-size 2: .*decode context parallelism"):
        support.check_arguments(fake_sglang.server_args(dcp_size=2))
    with pytest.raises(ValueError, match="--attn-cp-size 2: .*prefill context parallelism"):
        support.check_arguments(fake_sglang.server_args(enable_prefill_cp=True, attn_cp_size=2))
    config = SimpleNamespace(
        attention_arch=SimpleNamespace(name="MLA"),
        hf_config=SimpleNamespace(architectures=["DeepseekV32ForCausalLM"]),
        hf_text_config=SimpleNamespace(index_topk=8),
    )
    sparse = {"get_model_config": lambda: config}
    for name in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
        with pytest.raises(ValueError, match="DeepSeek sparse attention"):
            support.check_arguments(fake_sglang.server_args(**{"attention_backend": "fa3", name: "flashpage"} | sparse))
    with pytest.raises(ValueError, match="DeepSeek sparse attention"):  # newer versions have no method for it
        support.check_arguments(fake_sglang.server_args(model_config=config))
    draft = {"speculative_draft_attention_backend": "flashpage"}  # another model, which its runner checks
    support.check_arguments(fake_sglang.server_args(attention_backend="fa3", **draft | sparse))
    support.check_arguments(fake_sglang.server_args(kv_cache_dtype="fp4_e2m1", attention_backend="fa3", **sparse))
    usual = Scene(Form(), *DECODE, "cpu").runner().model_config
    given = {"kv_cache_dtype": "fp8_e5m2", "page_size": 16, "get_model_config": lambda: usual}
    support.check_arguments(fake_sglang.server_args(**given))


def graphs_of_prompts(backend: str) -> dict[str, Any]:
    return {"cuda_graph_config": SimpleNamespace(prefill=SimpleNamespace(backend=backend))}


@pytest.mark.parametrize(
    ("changes", "is_refused"),
    [
        ({}, True),
        ({"attention_backend": "fa3", "prefill_attention_backend": "flashpage"}, True),
        ({"attention_backend": "fa3", "speculative_draft_attention_backend": "flashpage"}, True),
        ({"prefill_attention_backend": "fa3", "decode_attention_backend": "flashpage"}, False),
    ],
)
def test_whole_graphs_of_prompts(changes: dict[str, Any], is_refused: bool) -> None:
    """They would replay the plan of the prompts that were captured."""
    usual = Scene(Form(), *DECODE, "cpu").runner().model_config
    given = {"get_model_config": lambda: usual} | changes
    for other in ("breakable", "tc_piecewise", "disabled"):
        support.check_arguments(fake_sglang.server_args(**given | graphs_of_prompts(other)))
    for full in (graphs_of_prompts("full"), {"cuda_graph_backend_prefill": "full"}):
        if is_refused:
            with pytest.raises(ValueError, match="--cuda-graph-backend-prefill full: .*breakable or disabled"):
                support.check_arguments(fake_sglang.server_args(**given | full))
        else:
            support.check_arguments(fake_sglang.server_args(**given | full))


def test_what_newer_versions_decide_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """They keep the arguments as they were given, and decisions in a view of them."""
    overrides = ModuleType("sglang.srt.arg_groups.overrides")
    monkeypatch.setitem(sys.modules, overrides.__name__, overrides)
    found = {"attn_cp_size": 4, **graphs_of_prompts("disabled")}
    monkeypatch.setattr(overrides, "resolved_view", lambda given: SimpleNamespace(**vars(given) | found), raising=False)
    with pytest.raises(ValueError, match="--attn-cp-size 4"):
        support.check_arguments(fake_sglang.server_args(attn_cp_size=1))
    found |= {"attn_cp_size": 1, **graphs_of_prompts("full")}
    with pytest.raises(ValueError, match="--cuda-graph-backend-prefill full"):
        support.check_arguments(fake_sglang.server_args(cuda_graph_config=None))


@pytest.mark.parametrize("algorithm", ["EAGLE", None])
def test_early_plans_of_guesses(algorithm: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = Scene(Form(), *DECODE, "cpu").runner().model_config
    given = {"get_model_config": lambda: usual, "speculative_algorithm": algorithm}
    support.check_arguments(fake_sglang.server_args(**given))
    is_on = SimpleNamespace(get=lambda: True)
    envs = sys.modules["sglang.srt.environ"].envs
    monkeypatch.setattr(envs, "SGLANG_ENABLE_OVERLAP_PLAN_STREAM", is_on, raising=False)
    if algorithm is None:
        support.check_arguments(fake_sglang.server_args(**given))
        return
    with pytest.raises(ValueError, match="SGLANG_ENABLE_OVERLAP_PLAN_STREAM=1: .* before the guesses are known"):
        support.check_arguments(fake_sglang.server_args(**given))


@pytest.mark.parametrize("mode", [fake_sglang.ForwardMode.DECODE, fake_sglang.ForwardMode.EXTEND])
@pytest.mark.parametrize("is_latent", [False, True])
def test_keywords_that_are_not_served(mode: fake_sglang.ForwardMode, is_latent: bool) -> None:
    """As slopes (ALiBi) of Baichuan-13B, or a scale of queries by their positions."""
    scene: Any = LatentScene(*DECODE, "cpu") if is_latent else Scene(Form(), *DECODE, "cpu")
    backend, batch = scene.backend(), scene.batch(mode)
    backend.init_forward_metadata(batch)
    own = {"save_kv_cache": False, "slopes": torch.ones(4), "cos_sin_cache": None, "is_neox": False}
    with pytest.raises(ValueError, match="layer 0 passes slopes, which flashpage does not serve in SGLang"):
        backend.forward(scene.q, None, None, scene.layer, batch, **own)


@pytest.mark.parametrize("config", ["hf_config", "hf_text_config"])
def test_scales_of_queries_by_their_positions(config: str) -> None:
    """Mistral Large 3, with latent rows."""
    runner = LatentScene(*DECODE, "cpu").runner()
    support.check_runner(runner)
    scaling = {"original_max_position_embeddings": 8192, "beta": 0.1}
    vars(getattr(runner.model_config, config)).update(llama_4_scaling=scaling)
    with pytest.raises(ValueError, match="llama_4_scaling.* Choose another --attention-backend, such as triton"):
        support.check_runner(runner)
