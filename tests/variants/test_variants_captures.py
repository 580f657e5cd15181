"""When a variant is traced again: after a change of something that it captures."""

from __future__ import annotations

import functools
from typing import Any

import torch
from variant_examples import HEADS, rows

from flashpage.variants import Variant


def test_same_captures_are_traced_once() -> None:
    calls = 0
    table, factor = rows(HEADS), 2.0

    def helper(score: Any) -> Any:
        nonlocal calls
        calls += 1
        return score * factor

    variant = Variant(lambda score, b, h, q_idx, kv_idx: helper(score) + table[h])
    # `calls` is captured too and grows during a trace; the trace calls a copy, whose list grows instead.
    first = variant.traced()
    assert variant.traced() is first
    table += 1  # the tensor's memory stays the same
    assert variant.traced() is first
    factor = 3.0
    assert variant.traced().scalars == (3.0,)
    assert variant.traced().spec == first.spec


class Settings:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def score_mod(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * self.factor


def test_attributes_are_compiled_in_and_seen_when_they_change() -> None:
    settings = Settings(2.0)
    variants = [
        Variant(settings.score_mod),
        Variant(lambda score, b, h, q_idx, kv_idx: score * settings.factor),
        Variant(functools.partial(Settings.score_mod, settings)),
    ]
    for factor in (2.0, 4.0):
        settings.factor = factor
        assert [variant.traced().spec.logit for variant in variants] == [f"score * {factor}f"] * 3


def test_containers_are_compiled_in_and_seen_when_they_change() -> None:
    table, tables = {"factor": 2.0}, [rows(HEADS), rows(HEADS)]
    variant = Variant(lambda score, b, h, q_idx, kv_idx: score * table["factor"] + tables[1][h])
    assert variant.traced().spec.logit == "(score * 2.0f) + tables(h)"
    tables[1] = rows(HEADS) + 1
    assert variant.traced().tensors[0] is tables[1]
    table["factor"] = 5.0
    assert variant.traced().spec.logit == "(score * 5.0f) + tables(h)"


def test_zero_dimensional_tensor_is_read_again() -> None:
    factor = torch.tensor(2.0)
    variant = Variant(lambda score, b, h, q_idx, kv_idx: score * factor)
    first = variant.traced()
    factor.fill_(7.0)
    assert first.scalars == (2.0,) and variant.traced().scalars == (7.0,)
    assert variant.traced().spec == first.spec and first.tensors == ()


def test_captured_number_that_python_branches_on() -> None:
    depth = 1
    variant = Variant(lambda score, b, h, q_idx, kv_idx: score * 2.0 if depth > 1 else score / 8.0)
    assert variant.traced().spec.logit == "score * (1.0f / 8.0f)"
    depth = 2
    assert variant.traced().spec.logit == "score * 2.0f"


GLOBAL_FACTOR = 2.0


def test_every_change_is_seen() -> None:
    """Plans look at the places of captures alone (Variant.places), and trace only after a change."""
    factor, listed, named, bias = 2.0, [1.0], {"x": 1.0}, rows(HEADS)

    def helper(score: Any, by: float = 3.0, *, more: float = 4.0) -> Any:
        return score * by * more * GLOBAL_FACTOR

    added = functools.partial(lambda score, *, x: score + x, x=2.0)
    by_call = Variant(lambda s, b, h, q, k: added(helper(s) * factor * listed[0] * named["x"]) + bias[h])
    by_text = Variant(logit="s * score + t[h]", scalars={"s": 2.0}, tensors={"t": rows(HEADS)})

    def change_closure() -> None:
        nonlocal factor, bias
        factor, bias = 5.0, bias + 1

    changes: list[tuple[Variant, Any]] = [
        (by_call, change_closure),
        (by_call, lambda: globals().update(GLOBAL_FACTOR=7.0)),
        (by_call, lambda: setattr(helper, "__defaults__", (6.0,))),
        (by_call, lambda: helper.__kwdefaults__.update(more=8.0)),
        (by_call, lambda: added.keywords.update(x=9.0)),
        (by_call, lambda: listed.__setitem__(0, 10.0)),
        (by_call, lambda: named.update(x=11.0)),
        (by_call, lambda: named.update(y=1.0)),
        (by_call, lambda: listed.append(1.0)),
        (by_text, lambda: setattr(by_text, "logit", "s * score + t[h] + 1")),
        (by_text, lambda: by_text.scalars.update(s=3)),
        (by_text, lambda: by_text.tensors.update(t=rows(HEADS).half())),
        (by_text, lambda: by_text.tensors.update(t=rows(HEADS, 2))),
        (by_text, lambda: by_text.tensors.update(u=rows(HEADS))),
    ]
    for i, (variant, change) in enumerate(changes):
        before = variant.traced()
        places = variant.places()
        assert places.are_unchanged() and variant.traced() == before, i
        change()
        assert not places.are_unchanged(), i
    by_text.tensors.pop("u")
    by_text.logit = "s * score + t[h, 0]"
    by_text.traced()
    places = by_text.places()
    by_text.scalars["s"], by_text.tensors["t"] = 4, rows(HEADS, 2)  # other values of the same types compile nothing
    assert places.are_unchanged()
    settings = Settings(2.0)
    unknown = Variant(settings.score_mod)
    unknown.traced()
    assert not unknown.places().are_unchanged()


def test_recursive_helper() -> None:
    def repeated(score: Any, times: int) -> Any:
        return score if times == 0 else repeated(score + 1.0, times - 1)

    assert Variant(lambda score, b, h, q_idx, kv_idx: repeated(score, 2)).traced().spec.logit == "(score + 1.0f) + 1.0f"
