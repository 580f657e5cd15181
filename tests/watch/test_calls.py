"""Watched calls: log lines, kept inputs, their replay, NVTX ranges; and nothing of it without the variables."""

from __future__ import annotations

import logging
import os
import re
import types
from pathlib import Path
from typing import Any

import one_request
import programs
import pytest
import reference as exact
import torch

from flashpage.base import env, log, warn
from flashpage.cli import main
from flashpage.errors import SettingError
from flashpage.jit import progress
from flashpage.watch import describe, dump, reference, replay

PROGRAM = """
import sys
import torch
import flashpage
from flashpage.decode import single_decode_with_kv_cache
sys.path.insert(0, "tests/support")
import one_request
wrapper = one_request.prefill()
one_request.plan(wrapper)
with torch.profiler.profile() as profile:
    wrapper.run(one_request.Q, one_request.KV)
print(sorted(event.key for event in profile.key_averages() if event.key.startswith("flashpage ")))
single_decode_with_kv_cache(torch.zeros(4, 64), torch.zeros(10, 4, 64), torch.zeros(10, 4, 64))
for q in (one_request.Q[:3], one_request.Q * torch.nan):
    try:
        wrapper.run(q, one_request.KV)
    except flashpage.RunError:
        print("refused")
print("flashpage.watch" in sys.modules, hasattr(type(wrapper).run, "__wrapped__"))
"""


def run_program(tmp_path: Path, **variables: str) -> programs.Program:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    return programs.run([file], env=os.environ | variables)


def test_off_is_off(tmp_path: Path) -> None:
    """Without the variables the methods are those of the source, so they cost what they cost."""
    done = run_program(tmp_path)
    assert done.stdout.splitlines() == ["[]", "refused", "False False"], done.stderr
    assert "flashpage: Batch" not in done.stderr


def test_calls_are_logged_kept_and_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "kept"
    done = run_program(tmp_path, FLASHPAGE_LOG="5", FLASHPAGE_DUMP=str(folder), FLASHPAGE_NVTX="on")
    ranges, *rest = done.stdout.splitlines()
    assert ranges == (
        "['flashpage BatchPrefillWithPagedKVCacheWrapper.run cpu_attention', 'flashpage run cpu_attention']"
    ), done.stderr
    assert rest == ["refused", "True True"]
    lines = done.stderr
    assert re.search(r"BatchPrefillWithPagedKVCacheWrapper\(float_workspace_buffer=uint8\[\d+\]\) in", lines)
    assert re.search(r"\.plan\(qo_indptr=int32\[2\] 0 to 8, .*num_qo_heads=4, .*q_data_type=float32\) in", lines)
    assert re.search(r"\.run\(q=float32\[8, 4, 64\] -\d.* to \d.*, 0 NaN, .* -> float32\[8, 4, 64\] .* 0 NaN in", lines)
    assert re.search(r"single_decode_with_kv_cache\(q=float32\[4, 64\] 0 to 0, 0 NaN, k=float32\[10, 4, 64\]", lines)
    assert "q has 3 rows but the plan is for 8" in lines and "chose cpu_attention" in lines
    refused, has_nan = sorted(folder.iterdir(), key=lambda path: int(path.name.rpartition("-")[2]))
    assert main(["replay", str(refused)]) == 0
    first, cpu, *_ = capsys.readouterr().out.splitlines()
    assert "kept because: RunError: q has 3 rows" in first and "RunError: q has 3 rows but the plan is for 8" in cpu
    found = replay.replay(has_nan)
    assert "the result has NaN" in found[0]
    assert any(re.match(r"CPU, run 0 \(cpu_attention\): ", line) for line in found)


def kept(folder: Path, calls: list[tuple[str, dict[str, Any]]]) -> Path:
    path = dump.keep(folder, [dump.Call(*call) for call in calls], "a test")
    assert path is not None
    return path


def test_replay_names_the_first_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A kernel that writes one wrong number, in a batch of two requests with GQA, HND, a window, sinks and scales."""
    monkeypatch.setattr(dump, "_numbers", iter(range(1, 5)))
    torch.manual_seed(0)
    ints, name = one_request.ints, "BatchPrefillWithPagedKVCacheWrapper"
    lengths = dict(zip(("qo_indptr", "paged_kv_indptr"), (ints(0, 3, 8), ints(0, 2, 5)), strict=True))
    pages = {"paged_kv_indices": ints(4, 0, 3, 1, 2), "paged_kv_last_page_len": ints(5, 16)}
    sizes = {"num_qo_heads": 8, "num_kv_heads": 4, "head_dim_qk": 64, "page_size": 16}
    sizes |= {"causal": True, "window_left": 20, "q_data_type": torch.float32}
    run = {"q": torch.randn(8, 8, 64), "paged_kv_cache": torch.randn(5, 2, 4, 16, 64), "k_scale": 0.5, "v_scale": 2.0}
    workspace = {"float_workspace_buffer": one_request.workspace(1 << 22), "kv_layout": "HND"}
    calls = [(name, workspace), (f"{name}.plan", lengths | pages | sizes), (f"{name}.run", run)]
    path = kept(tmp_path, calls)
    agrees = replay.replay(path)[-1]
    assert re.match(r"CPU, run 0 \(cpu_attention\): agrees with the reference, largest difference \d", agrees)

    attention = type(one_request.prefill()._attention)
    original = attention.run
    monkeypatch.setattr(attention, "run", lambda self, *args, **kwargs: _off_by_one(original(self, *args, **kwargs)))
    assert re.search(
        r"parts from the reference at row 4, head 2, column 7 \(request 1\): .* 1 of 4096 elements differ",
        replay.replay(path)[-1],
    )
    monkeypatch.setattr(attention, "run", original)
    in_fp8 = [calls[0], (f"{name}.plan", lengths | pages | sizes | {"o_data_type": torch.float8_e4m3fn})]
    for o_scale in (2**-6, torch.tensor([2**-12])):  # of the second one, most outputs are beyond e4m3's largest number
        path = kept(tmp_path, [*in_fp8, (f"{name}.run", run | {"o_scale": o_scale})])
        assert "agrees with the reference" in replay.replay(path)[-1]
    variant = [calls[0], (f"{name}.plan", lengths | pages | sizes | {"variant": object()}), calls[2]]
    assert main(["replay", str(kept(tmp_path, variant))]) == 2
    assert "lacks an argument, a object" in capsys.readouterr().err


def _off_by_one(out: torch.Tensor) -> torch.Tensor:
    out[4, 2, 7] += 1
    return out


def test_the_reference_knows_every_option() -> None:
    """The package's reference against that of the tests: RoPE, ALiBi, soft cap, chunk, sinks and scales for heads."""
    q, k, v = torch.randn(5, 6, 32), torch.randn(40, 3, 32), torch.randn(40, 3, 16)
    sinks, scale = torch.randn(6), torch.rand(3) + 0.5
    for given in (
        {"rope": (2.0, 1e4), "causal": True},
        {"alibi_slopes": exact.alibi_slopes(6), "soft_cap": 5.0},
        {"chunk": 8, "window_left": 5, "causal": True, "sinks": sinks, "k_scale": scale, "v_scale": scale},
    ):
        want = exact.attention(q, k, v, exact.Options(0.2, **given))
        rope, mode = given.get("rope"), "ROPE_LLAMA" if "rope" in given else "NONE"
        options = types.SimpleNamespace(head_dim_qk=32, chunk=given.get("chunk", 0), has_mask=False)
        values = types.SimpleNamespace(
            causal=given.get("causal", False),
            window_left=given.get("window_left", -1),
            logits_soft_cap=given.get("soft_cap", 0.0),
            sm_scale=0.2,
            rope_scale=rope and rope[0],
            rope_theta=rope and rope[1],
            pos_encoding_mode="ALIBI" if "alibi_slopes" in given else mode,
        )
        scales = (None, given.get("k_scale"), given.get("v_scale"))
        session: Any = types.SimpleNamespace(options=options)
        inputs = reference.Inputs(session, values, "NHD", q, (k, v), scales, given.get("sinks"))  # type: ignore[arg-type]
        out = reference._attend(inputs, q.double(), k.double(), v.double(), None)
        torch.testing.assert_close(out, want.out, rtol=1e-6, atol=1e-6)


def test_copies_keep_strides_and_alignment() -> None:
    for tensor in (
        torch.arange(64.0)[5:29].view(2, 12)[:, ::3],
        torch.arange(6).view(6, 1).expand(6, 4),
        torch.zeros(0, 3),
        torch.arange(24).view(2, 3, 4).permute(2, 0, 1),
    ):
        copy = dump.strided_copy(tensor, torch.device("cpu"))
        assert torch.equal(copy, tensor) and copy.stride() == tensor.stride()
        assert copy.storage_offset() % 16 == tensor.storage_offset() % 16


def test_lines_go_to_a_routed_log(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    with caplog.at_level(logging.INFO, logger="flashpage"):
        progress.say("compiling x")
        with pytest.warns(RuntimeWarning, match="flashpage: careful"):
            warn.warn("careful")
    assert [record.message for record in caplog.records] == ["compiling x", "careful"]
    assert not log.is_routed()
    assert capsys.readouterr().err == ""


def test_values_of_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHPAGE_LOG", "2")
    with pytest.raises(SettingError, match=r"^FLASHPAGE_LOG is '2': give 0, 1, 3 or 5, or leave it unset"):
        env.log_level()
    assert describe.value(torch.full((2,), torch.nan), 5) == "float32[2] all 2 are NaN"
    assert describe.value(torch.tensor([[1.0, torch.nan, -torch.inf]]).T, 5) == "float32[3, 1] -inf to 1, 1 NaN"
    assert describe.value((torch.zeros(4, 4)[:, :2], None), 3) == "(float32[4, 2] strides (4, 1), None)"


@pytest.mark.cuda
def test_replay_on_a_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of a card runs there and on the CPU, and both agree with the reference."""
    monkeypatch.setattr(dump, "_numbers", iter((1,)))
    ints, name = one_request.ints, "BatchDecodeWithPagedKVCacheWrapper"
    plan = {"indptr": ints(0, 20, 21), "indices": torch.randperm(21).int(), "last_page_len": ints(3, 16)}
    plan |= {"num_qo_heads": 8, "num_kv_heads": 2, "head_dim": 64, "page_size": 16, "q_data_type": torch.float16}
    run = {"q": torch.randn(2, 8, 64).half().cuda(), "paged_kv_cache": torch.randn(21, 2, 16, 2, 64).half().cuda()}
    workspace = {"float_workspace_buffer": one_request.workspace(1 << 24).cuda()}
    lines = replay.replay(kept(tmp_path, [(name, workspace), (f"{name}.plan", plan), (f"{name}.run", run)]))
    assert re.search(r"^card, run 0 \(\w+\): agrees with the reference", lines[-1]), lines
    assert any(re.match(r"CPU, run 0 \(cpu_attention\): agrees with the reference", line) for line in lines), lines
