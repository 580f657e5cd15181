"""Plans of transformers models that serve later layers and forwards: only of batches that are still the same."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from hf_models import VOCABULARY, make_model

from flashpage import hf
from flashpage.engines.transformers.forward import attention
from flashpage.wrappers.base import Attention

pytestmark = pytest.mark.usefixtures("quick_kernels")
TOKENS = 12
MODES = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


@pytest.fixture(scope="module")
def model() -> Any:
    hf.register()
    return make_model("llama", implementation=hf.NAME)


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Gets an entry for each plan."""
    found: list[Any] = []
    plan = Attention.plan

    def counted(self: Any, *args: Any, **options: Any) -> None:
        found.append(self)
        plan(self, *args, **options)

    monkeypatch.setattr(Attention, "plan", counted)
    return found


def mode_of(name: str) -> AbstractContextManager[Any]:
    return MODES[name]()


def logits(model: Any, **given: Any) -> torch.Tensor:
    ids = torch.randint(1, VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    out: torch.Tensor = model(ids, use_cache=False, **given).logits
    return out


def of_ends(model: Any, ends: torch.Tensor) -> torch.Tensor:
    return logits(model, cu_seq_lens_q=ends, cu_seq_lens_k=ends)


@pytest.mark.parametrize("mode", MODES)
def test_ends_of_joined_sequences_that_are_written_again(model: Any, mode: str, plans: list[Any]) -> None:
    with mode_of(mode):
        ends = torch.tensor([0, 4, TOKENS], dtype=torch.int32)
        first = of_ends(model, ends)
        ends[1] = 9
        again, expected = of_ends(model, ends), of_ends(model, ends.clone())
    assert not torch.equal(first, expected)
    torch.testing.assert_close(again, expected, rtol=0, atol=0)
    assert len(plans) == 3  # one a forward


def test_ends_of_joined_sequences_that_an_array_shares(model: Any) -> None:
    ends = torch.tensor([0, 4, TOKENS], dtype=torch.int32)
    with torch.no_grad():
        of_ends(model, ends)
        ends.numpy()[1] = 9
        torch.testing.assert_close(of_ends(model, ends), of_ends(model, ends.clone()), rtol=0, atol=0)


@pytest.mark.parametrize("mode", MODES)
def test_a_mask_that_is_written_again(model: Any, mode: str, plans: list[Any]) -> None:
    with mode_of(mode):
        mask = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool).tril()
        first = logits(model, attention_mask=mask)
        mask[..., 4:, 3] = False
        again, expected = logits(model, attention_mask=mask), logits(model, attention_mask=mask.clone())
    assert not torch.equal(first, expected)
    torch.testing.assert_close(again, expected, rtol=0, atol=0)
    assert len(plans) == 3


def layer_of(q_length: int, **given: Any) -> torch.Tensor:
    """The attention of one layer."""
    generator = torch.Generator().manual_seed(q_length)
    q, k, v = (torch.randn(1, heads, q_length, 32, generator=generator) for heads in (4, 2, 2))
    module = SimpleNamespace(is_causal=True, layer_idx=0)
    with torch.no_grad():
        return attention(module, q, k, v, None, **given)[0]


def test_a_plan_that_fails_is_not_used_again() -> None:
    good, bad = (torch.tensor([0, end, 10], dtype=torch.int32) for end in (4, 12))
    expected = layer_of(10, cu_seq_lens_q=good)
    with pytest.raises(ValueError):
        layer_of(10, cu_seq_lens_q=bad)
    assert torch.equal(layer_of(10, cu_seq_lens_q=good), expected)


def test_a_plan_that_is_interrupted_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = layer_of(5)

    def interrupt(self: Any, *args: Any) -> None:
        plan(self, *args)
        raise KeyboardInterrupt

    plan = Attention.plan
    with monkeypatch.context() as changed, pytest.raises(KeyboardInterrupt):
        changed.setattr(Attention, "plan", interrupt)
        layer_of(300)
    assert torch.equal(layer_of(5), expected)
