"""Addresses of tensors whose forms were seen before, written into structs by the host library."""

from __future__ import annotations

import ctypes
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from flashpage import host, vllm_card
from flashpage.pointed import PointedTensors
from flashpage.vllm_attention import Sequences
from flashpage.vllm_forms import Partials

pytestmark = pytest.mark.skipif(
    not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="torch before 2.10 lets nobody else read tensors"
)


class Struct(ctypes.Structure):
    _fields_ = [("other", ctypes.c_int32), *((name, ctypes.c_void_p) for name in ("a", "b", "c"))]


def tensors() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(3, 5, 8, dtype=torch.bfloat16)[:, 1:3], torch.ones(())


def test_addresses_of_tensors_alike() -> None:
    struct = Struct(other=7, c=99)
    pointed = PointedTensors(struct, ("b", "a", "c"), aligned=1)
    pointed.remember(*tensors(), None)
    wide, one = tensors()
    assert pointed.point(wide, one, None)
    assert (struct.other, struct.a, struct.b, struct.c) == (7, one.data_ptr(), wide.data_ptr(), None)


@pytest.mark.parametrize(
    "wide",
    [
        torch.zeros(3, 2, 8, dtype=torch.bfloat16),
        torch.zeros(3, 5, 8, dtype=torch.bfloat16)[:2, 1:3],
        torch.zeros(3, 5, 8, dtype=torch.float16)[:, 1:3],
        torch.zeros(3, 5, 8, dtype=torch.bfloat16).flatten()[1:].as_strided((3, 2, 8), (40, 8, 1)),
        None,
    ],
    ids=["strides", "shape", "dtype", "alignment", "none"],
)
def test_other_tensors_are_told(wide: torch.Tensor | None) -> None:
    pointed = PointedTensors(Struct(), ("b", "a", "c"), aligned=1)
    pointed.remember(*tensors(), None)
    assert not pointed.point(wide, torch.ones(()), None)
    assert not pointed.point(*tensors(), torch.ones(()))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """What vllm_card launches, and with which parameters, on tensors of the CPU."""
    found: list[tuple[Any, ...]] = []

    def launch(handle: int, address: int, grid: int, *_: Any) -> int:
        params = host.BlockAttentionParams.from_address(address)
        names = (name for name, _ in params._fields_ if name not in ("pattern", "partial_out", "partial_lse", "cuts"))
        found.append((handle, grid, *(getattr(params, name) for name in names)))
        return 0

    kernel = types.SimpleNamespace(handle=1, info=types.SimpleNamespace(ctas_per_sm=2, num_sms=132))
    monkeypatch.setattr(vllm_card.jit, "prebuild", lambda *_: (kernel, kernel))
    monkeypatch.setattr(vllm_card, "shared_bytes_per_cta", lambda _: 232448)
    monkeypatch.setattr(vllm_card, "device_sm", lambda _: 90)
    monkeypatch.setattr(vllm_card, "current_stream", lambda _: 0)
    monkeypatch.setattr(host.load(), "fp_launch", launch)
    yield found
    vllm_card._local.__dict__.clear()


def call(seqs: int, max_seq_len: int = 100, scale: float = 0.5, fp8: bool = False, v2: bool = False) -> Any:
    query = torch.zeros(seqs, 8, 64, dtype=torch.bfloat16)
    dtype, x = (torch.uint8, 16) if fp8 else (torch.bfloat16, 8)
    keys, values = torch.zeros(9, 2, 64 // x, 16, x, dtype=dtype), torch.zeros(9, 2, 64, 16, dtype=dtype)
    tables, lens = torch.zeros(seqs, 7, dtype=torch.int32), torch.full((seqs,), 50, dtype=torch.int32)
    numbers = (2, scale, tables, lens, 16, max_seq_len, None, "fp8" if fp8 else "auto", torch.ones(()), torch.ones(()))
    given = Sequences.of((query, keys, values, *numbers, 0, 0, 0, 64, 0))
    sums = (torch.zeros(seqs, 8, 1), torch.zeros(seqs, 8, 1), torch.zeros(seqs, 8, 1, 64, dtype=torch.bfloat16))
    return given, torch.empty_like(query), Partials(*sums) if v2 else None


CALLS = (
    *({}, {}, {"seqs": 5}, {"max_seq_len": 60}, {"scale": 0.25}, {"fp8": True}, {"fp8": True}, {"v2": True}),
    *({"v2": True}, {}),
)


def test_calls_alike_are_launched_alike(launched: list[tuple[Any, ...]]) -> None:
    """Whatever came before, a call's parameters are those of a thread that sees it first."""
    arguments = [call(**{"seqs": 4, **options}) for options in CALLS]
    for given in arguments:
        vllm_card.attention(*given)
    after_others = launched.copy()
    launched.clear()
    for given in arguments:
        vllm_card._local.__dict__.clear()
        vllm_card.attention(*given)
    assert after_others == launched


def test_calls_alike_are_not_bound_again(launched: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    vllm_card.attention(*call(4))
    monkeypatch.setattr(vllm_card._Attention, "run", None)
    vllm_card.attention(*call(4))
    assert len(launched) == 4
    with pytest.raises(TypeError):
        vllm_card.attention(*call(5))
