"""The peers of tests/bench/peers.py: what each is not given, and how those that take other arguments are called."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

BENCH = Path(__file__).resolve().parents[1] / "bench"


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    import peers

    return peers


@pytest.fixture
def case(peers: Any) -> Any:
    """A decode of two requests, one of which ends inside of a page."""
    from workloads import Case

    return Case("one", 2, 1, 40, "lognormal", num_q_heads=4, num_kv_heads=2, head_dim=64)


LEFT_OUT = [  # columns, rows of a request, tokens of a page, whether FlashInfer's fa2 is left out
    (96, 1, 16, True),
    (112, 1, 16, True),
    (128, 1, 16, False),
    (80, 1, 16, False),
    (96, 16, 0, True),
    (112, 16, 0, False),
    (96, 16, 16, False),
]


@pytest.mark.parametrize(("columns", "rows", "page_size", "is_left_out"), LEFT_OUT)
def test_calls_that_end_the_process_are_left_out(
    columns: int, rows: int, page_size: int, is_left_out: bool, peers: Any, case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[dict[str, object]] = []
    monkeypatch.setattr(peers, "wrapper_call", lambda *_, **options: calls.append(options) or "a call")
    changed = dataclasses.replace(case, head_dim=columns, q_len=rows, page_size=page_size)
    found = peers.flashinfer_call(types.SimpleNamespace(case=changed), "fa2")
    assert (found, len(calls)) == ((None, 0) if is_left_out else ("a call", 1))


E4M3 = torch.float8_e4m3fn
NOT_XQA = [
    {"page_size": 1},
    {"page_size": 8},
    {"page_size": 256},
    {"page_size": 0},
    {"q_len": 2},
    {"soft_cap": 50.0},
    {"head_dim": 72},
    {"head_dim": 528},
    {"head_dim": 320, "num_q_heads": 64},
    {"head_dim_vo": 32},
    {"q_dtype": E4M3},
    {"kv_dtype": torch.float8_e5m2},
]


@pytest.mark.parametrize("change", NOT_XQA, ids=str)
def test_xqa_is_not_given_what_it_does_not_take(change: dict[str, Any], peers: Any, case: Any) -> None:
    changed = dataclasses.replace(case, **change)
    assert peers.xqa_call(types.SimpleNamespace(case=changed, device=torch.device("cpu"))) is None


@pytest.mark.parametrize("change", [{}, {"kv_dtype": E4M3}, {"window_left": 7}, {"has_sinks": True}], ids=str)
def test_xqa_is_given_the_batch(change: dict[str, Any], peers: Any, case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in computes attention of what arrives, by the meaning that FlashInfer gives to its arguments."""
    batch = peers.Batch(dataclasses.replace(case, **change), torch.device("cpu"))
    assert min(batch.kv_lens) < max(batch.kv_lens)

    def xqa(q: Any, kv: Any, workspace: Any, table: Any, lens: Any, longest: int, **options: Any) -> torch.Tensor:
        assert lens.dtype == torch.uint32 and longest == max(batch.kv_lens) and not workspace[: 8 << 20].any()
        assert options["bmm2_scale"] == 1.0 and options["out"].shape == q.shape
        for i, length in enumerate(lens.view(torch.int32).tolist()):
            k, v = (x[table[i].long()].flatten(0, 1)[:length].float() for x in kv)
            scores = torch.einsum("hgd,khd->hgk", q[i].float().view(2, 2, 64), k) * options["bmm1_scale"]
            if (left := options.get("window_left", -1)) >= 0:
                scores[..., : max(0, length - 1 - left)] = float("-inf")
            sinks = options["sinks"].view(2, 2, 1) if "sinks" in options else torch.full((2, 2, 1), float("-inf"))
            weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
            options["out"][i] = torch.einsum("hgk,khd->hgd", weights, v).view(4, 64)
        return options["out"]

    module = types.ModuleType("flashinfer.decode")
    monkeypatch.setattr(module, "xqa_batch_decode_with_kv_cache", xqa, raising=False)
    monkeypatch.setitem(sys.modules, "flashinfer", types.ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.decode", module)
    assert batch.error(peers.PEERS["xqa"][1](batch)()) < 5e-3


@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("has_one_sign", [False, True])
def test_values_of_one_sign(page_size: int, has_one_sign: bool, peers: Any, case: Any) -> None:
    """Only V changes, of ragged and paged K and V."""
    changes = {"page_size": page_size, "kv_dtype": E4M3, "q_len": 40, "has_one_sign": has_one_sign}
    batch = peers.Batch(dataclasses.replace(case, **changes), torch.device("cpu"))
    k, v = batch.keys_and_values(0)
    assert ((v.float() < 0).any().item(), (k.float() < 0).any().item()) == (not has_one_sign, True)
    assert len(v.float().unique()) > 50


@pytest.mark.parametrize(("kv_dtype", "finds"), [(E4M3, True), (torch.bfloat16, False)], ids=str)
def test_errors_over_fp8_are_against_fp64(kv_dtype: torch.dtype, finds: bool, peers: Any, case: Any) -> None:
    """An error of 1e-9 is seen: by fp32 it would be lost in the rounding of the reference."""
    batch = peers.Batch(dataclasses.replace(case, kv_dtype=kv_dtype), torch.device("cpu"))
    exact = torch.cat(
        [
            peers.reference(batch.q[i : i + 1], *batch.keys_and_values(i), dataclasses.replace(case, kv_dtype=E4M3))
            for i in range(2)
        ]
    )
    assert exact.dtype == torch.float64
    assert (batch.error(exact * (1 + 1e-9)) == pytest.approx(1e-9, rel=1e-3)) == finds
    with pytest.raises(RuntimeError, match="its output is not finite"):
        batch.error(exact * float("nan"))


def test_xqa_runs_only_if_it_is_named(peers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert "flashinfer fa2" in peers.installed() and "xqa" not in peers.installed()


def test_a_case_alone_that_ends_its_process(peers: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """The run goes on, and says so."""
    import gpu

    options = ["decode", "--apart", "--device", "no device", "--only", "Zipf", "--libraries", "flashpage"]
    assert gpu.main(options) == 1
    out, error = capfd.readouterr()
    assert "| batch 64, context 4k, Zipf | | its process ended with 1 | | |" in out and "no device" in error
