"""Places where SGLang puts another backend in ours, or stops for its name, in a stand-in of it."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import fake_sglang
import pytest

from flashpage.engines.sglang import replacements

fake_sglang.install()
SPECULATIVE, OVERRIDES = "sglang.srt.arg_groups.speculative_hook", "sglang.srt.arg_groups.overrides"
REGISTRY = "sglang.srt.layers.attention.attention_registry"
DRAFT, DIFFUSION = f"{SPECULATIVE}._resolve_dflash_draft_attention_backend", f"{OVERRIDES}._dllm_attention_backend"
HYBRID = f"{REGISTRY}.attn_backend_wrapper"


def resolve_draft(arguments: Any) -> None:
    """As SGLang does, which knows a few names."""
    name = arguments.speculative_draft_attention_backend or arguments.attention_backend
    arguments.speculative_draft_attention_backend = name if name == "fa3" else "flashinfer"


def resolve_diffusion(view: Any) -> dict[str, Any]:
    """As SGLang does with graphs, and for algorithms that name their backend."""
    if view.dllm_algorithm is None:
        return {}
    needed = "triton" if view.dllm_algorithm == "Gemma4Renoise" else "flashinfer"
    return {"overlap": False} | ({} if view.attention_backend == needed else {"attention_backend": needed})


def wrap_hybrid(runner: Any, backend: Any) -> Any:
    """As SGLang does on Blackwell: newer versions ask the runner for names."""
    names = [runner.server_args.attention_backend]
    if hasattr(runner, "prefill_attention_backend_str"):
        names = [runner.prefill_attention_backend_str, runner.decode_attention_backend_str]
    assert all(name in ("triton", "flashinfer") for name in names), f"got {names}"
    return "hybrid", backend


FUNCTIONS = {DRAFT: resolve_draft, DIFFUSION: resolve_diffusion, HYBRID: wrap_hybrid}


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Any], None]:
    """Puts a name where imports find it."""

    def put(name: str, value: Any) -> None:
        path, _, last = name.rpartition(".")
        parts = path.split(".")
        for i in range(1, len(parts)):
            parent, whole = ".".join(parts[:i]), ".".join(parts[: i + 1])
            if whole not in sys.modules:
                monkeypatch.setitem(sys.modules, whole, ModuleType(parts[i]))
            monkeypatch.setattr(sys.modules[parent], parts[i], sys.modules[whole], raising=False)
        monkeypatch.setattr(sys.modules[path], last, value, raising=False)

    return put


@pytest.fixture
def hooked(place: Callable[[str, Any], None]) -> Callable[[str], Callable[..., Any]]:
    """SGLang's functions under our hooks."""
    for name, function in FUNCTIONS.items():
        place(name, function)
    place(f"{OVERRIDES}.resolved_view", lambda arguments: arguments)
    place(f"{OVERRIDES}.attention_backends_of", lambda view: (view.attention_backend, view.attention_backend))
    found = replacements.hooks()
    assert found.keys() == FUNCTIONS.keys()
    return lambda name: functools.partial(found[name], FUNCTIONS[name])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "flashpage"),
        ({"attention_backend": "fa3", "speculative_draft_attention_backend": "flashpage"}, "flashpage"),
        ({"speculative_draft_attention_backend": "fa3"}, "fa3"),
        ({"speculative_draft_attention_backend": "flex_attention"}, "flashinfer"),
        ({"attention_backend": "trtllm_mha"}, "flashinfer"),
    ],
)
def test_a_block_draft_keeps_our_backend(
    given: dict[str, Any], expected: str, hooked: Callable[[str], Callable[..., Any]]
) -> None:
    arguments = fake_sglang.server_args(**given)
    hooked(DRAFT)(arguments)
    assert arguments.speculative_draft_attention_backend == expected


def test_newer_versions_have_our_name_in_a_list_of_drafts(
    hooked: Callable[[str], Callable[..., Any]], place: Callable[[str, Any], None]
) -> None:
    """Their arguments are sealed; SGLang's own function chooses."""
    place(f"{SPECULATIVE}.DRAFT_ATTENTION_BACKEND_CHOICES", ["fa3", "flashpage"])
    arguments = fake_sglang.server_args()
    hooked(DRAFT)(arguments)
    assert arguments.speculative_draft_attention_backend == "flashinfer"  # of the stand-in, which has no list


@pytest.mark.parametrize(
    ("name", "algorithm", "expected"),
    [
        ("flashpage", "LowConfidence", {"overlap": False}),
        ("fa3", "LowConfidence", {"overlap": False, "attention_backend": "flashinfer"}),
        ("flashpage", None, {}),
    ],
)
def test_a_diffusion_model_keeps_our_backend(
    name: str, algorithm: str | None, expected: dict[str, Any], hooked: Callable[[str], Callable[..., Any]]
) -> None:
    view = fake_sglang.server_args(attention_backend=name, dllm_algorithm=algorithm)
    assert hooked(DIFFUSION)(view) == expected


def test_an_algorithm_that_names_its_backend_is_refused(hooked: Callable[[str], Callable[..., Any]]) -> None:
    view = fake_sglang.server_args(dllm_algorithm="Gemma4Renoise")
    with pytest.raises(ValueError, match="--dllm-algorithm Gemma4Renoise: .* Choose --attention-backend triton"):
        hooked(DIFFUSION)(view)


@pytest.mark.parametrize("is_newer", [False, True])
def test_linear_attention_on_blackwell(
    is_newer: bool, hooked: Callable[[str], Callable[..., Any]], place: Callable[[str, Any], None]
) -> None:
    """While SGLang compares names, another one stands in place of ours, which returns also after a failure."""
    runner = SimpleNamespace(server_args=fake_sglang.server_args())
    if is_newer:
        runner.prefill_attention_backend_str, runner.decode_attention_backend_str = "flashinfer", "flashpage"
    before = repr(runner)
    place("sglang.srt.utils.is_blackwell", lambda: True)
    assert hooked(HYBRID)(runner, "ours") == ("hybrid", "ours")
    assert repr(runner) == before
    place("sglang.srt.utils.is_blackwell", lambda: False)  # where SGLang compares none
    with pytest.raises(AssertionError, match="flashpage"):
        hooked(HYBRID)(runner, "ours")
    if is_newer:
        runner.prefill_attention_backend_str = "fa3"
        before = repr(runner)
        place("sglang.srt.utils.is_blackwell", lambda: True)
        with pytest.raises(AssertionError, match="fa3"):
            hooked(HYBRID)(runner, "ours")
        assert repr(runner) == before


def test_versions_without_a_place_get_a_line_in_the_log(
    place: Callable[[str, Any], None], caplog: pytest.LogCaptureFixture
) -> None:
    place(DIFFUSION, resolve_diffusion)
    with caplog.at_level(logging.WARNING):
        assert replacements.hooks().keys() == {DIFFUSION}
    (record,) = caplog.records
    assert "for: DFLASH drafts; models with linear attention on Blackwell." in record.getMessage()
