"""SGLang's checks by names of backends, in a stand-in of it: what sees our name, and what another one."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import fake_sglang
import pytest

from flashpage.engines.sglang import admission, support

fake_sglang.install()
OVERRIDES, SPECULATIVE = "sglang.srt.arg_groups.overrides", "sglang.srt.arg_groups.speculative_hook"
MODELS = "sglang.srt.arg_groups.model_hook"
FIELDS = "attention_backend", "prefill_attention_backend", "decode_attention_backend"


def arguments(architecture: str = "LlamaForCausalLM", **changes: Any) -> Any:
    config = SimpleNamespace(
        hf_config=SimpleNamespace(architectures=[architecture]),
        attention_arch=SimpleNamespace(name="MHA"),
    )
    return fake_sglang.server_args(model_config=config, **changes)


def names_in(view: Any) -> tuple[str | None, ...]:
    return tuple(getattr(view, field) for field in FIELDS)


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Makes the named functions, which return the names that their view has; gives them with our hooks."""

    def make(*functions: str) -> dict[str, Any]:
        places: dict[str, Any] = {f"{OVERRIDES}.resolved_view": lambda arguments: SimpleNamespace(**vars(arguments))}
        places |= {
            name: lambda arguments: names_in(sys.modules[OVERRIDES].resolved_view(arguments)) for name in functions
        }
        for place, function in places.items():
            path, _, name = place.rpartition(".")
            parts = path.split(".")
            for i in range(len(parts)):
                module = ModuleType(parts[i])
                if ".".join(parts[: i + 1]) not in sys.modules:
                    monkeypatch.setitem(sys.modules, ".".join(parts[: i + 1]), module)
                if i:
                    parent, child = sys.modules[".".join(parts[:i])], sys.modules[".".join(parts[: i + 1])]
                    monkeypatch.setattr(parent, parts[i], child, raising=False)
            monkeypatch.setattr(sys.modules[path], name, function, raising=False)
        found = {}
        for place, hook in admission.hooks().items():
            path, _, name = place.rpartition(".")
            found[name] = functools.partial(hook, getattr(sys.modules[path], name))
            monkeypatch.setattr(sys.modules[path], name, found[name])
        return found

    return make


def test_a_check_sees_a_name_that_it_admits(sglang: Callable[..., dict[str, Any]]) -> None:
    tree, lines = f"{SPECULATIVE}._handle_eagle_family", f"{SPECULATIVE}._handle_ngram"
    functions = sglang(tree, lines, f"{MODELS}.handle_model_specific_adjustments")
    given = arguments()
    assert functions["_handle_eagle_family"](given) == ("triton", None, None)
    assert functions["_handle_ngram"](given) == ("flashinfer", None, None)
    mixed = arguments(attention_backend=None, prefill_attention_backend="fa3", decode_attention_backend="flashpage")
    assert functions["_handle_eagle_family"](mixed) == (None, "fa3", "triton")
    # Everything else reads our name, also after a check that failed.
    with pytest.raises(AttributeError):
        functions["_handle_eagle_family"](SimpleNamespace(attention_backend="flashpage"))
    assert names_in(functions["resolved_view"](given)) == names_in(given) == ("flashpage", None, None)
    assert functions["_handle_eagle_family"](arguments(attention_backend="trtllm_mha")) == ("trtllm_mha", None, None)


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("GptOssForCausalLM", "triton"),
        ("Gemma4ForConditionalGeneration", "triton"),
        ("Exaone4ForCausalLM", "triton"),
        ("Llama4ForConditionalGeneration", "triton"),
        ("NemotronHForCausalLM", "flashpage"),  # may not have triton
    ],
)
def test_models_that_are_admitted(architecture: str, name: str, sglang: Callable[..., dict[str, Any]]) -> None:
    check = sglang(f"{MODELS}.handle_model_specific_adjustments")["handle_model_specific_adjustments"]
    assert check(arguments(architecture)) == (name, None, None)


def test_versions_without_a_check_get_a_line_in_the_log(
    sglang: Callable[..., dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert admission.hooks() == {}
        assert sglang(f"{SPECULATIVE}._handle_ngram").keys() == {"resolved_view", "_handle_ngram"}
    first, second = (record.getMessage() for record in caplog.records)
    assert "gpt-oss, EXAONE 4, Gemma 4 and Llama 4; drafts of trees" in first and "n-gram" in first
    assert "gpt-oss, EXAONE 4, Gemma 4 and Llama 4; drafts of trees" in second and "n-gram" not in second


@pytest.mark.parametrize(
    ("changes", "is_refused"),
    [
        ({}, True),
        ({"attention_backend": "triton", "speculative_draft_attention_backend": "flashpage"}, True),
        ({"attention_backend": "triton", "decode_attention_backend": "flashpage"}, True),
        ({"speculative_draft_attention_backend": "triton"}, False),
        ({"attention_backend": "triton"}, False),
    ],
)
def test_drafts_over_the_models_own_cache(changes: dict[str, Any], is_refused: bool) -> None:
    given = arguments("Gemma4ForCausalLM", speculative_algorithm="FROZEN_KV_MTP", **changes)
    if not is_refused:
        support.check_arguments(given)
        return
    with pytest.raises(ValueError, match="FROZEN_KV_MTP.* Choose --speculative-draft-attention-backend triton"):
        support.check_arguments(given)


def test_such_a_draft_is_refused_by_its_model_too() -> None:
    """Newer versions of SGLang find out which algorithm it is after they check the arguments."""
    config = arguments("Gemma4AssistantForCausalLM").model_config
    with pytest.raises(ValueError, match="FROZEN_KV_MTP"):
        support.check_model(config, 0)
