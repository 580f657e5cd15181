"""SGLang's models, layers and options that cannot be served: what our backend answers when SGLang starts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import fake_sglang
import pytest
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
    with pytest.raises(ValueError, match="--dcp-size 2"):
        support.check_arguments(fake_sglang.server_args(dcp_size=2))
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
