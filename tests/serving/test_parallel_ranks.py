"""Context parallel attention over 2 and 4 processes (gloo, and NCCL if there are two cards), compared with the
reference, with one process, and between ranks.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import programs
import pytest
import torch
from parallel_batch import CASES, WORKSPACE_BYTES, ParallelBatch, ParallelCase
from parallel_rank import GROWN, NEW_TOKENS, grown_tokens, states_of
from reference import Options, attention, merge

import flashpage

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 120  # a rank that hangs fails after this time


TWO_CARDS = [pytest.mark.cuda, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no two NVIDIA cards")]
STARTS = [(2, "cpu"), (4, "cpu"), pytest.param((2, "cuda"), marks=TWO_CARDS)]


@pytest.fixture(scope="module", params=STARTS, ids=lambda start: f"{start[0]} x {start[1]}")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of each rank by name; one start of the processes runs all cases."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "FLASHPAGE_THREADS": "1"}
    count, kind = request.param
    program = ROOT / "tests" / "support" / "parallel_rank.py"
    started = [programs.start([program, str(rank), str(count), folder, kind], env=environment) for rank in range(count)]
    logs = [rank.communicate(timeout=SECONDS) for rank in started]
    assert not any(rank.returncode for rank in started), logs
    return [torch.load(folder / f"{rank}.pt") for rank in range(count)]


def joined(case: ParallelCase, ranks: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole output: all ranks have it bit by bit, or each rank has its heads."""
    if case.name not in ranks[0]:
        pytest.skip("fp32 queries are the CPU's")
    found = [rank[case.name] for rank in ranks]
    if case.heads == "own":
        out, lse = (torch.cat([state[i] for state in found], 1) for i in (0, 1))
        return out, lse
    for out, lse in found[1:]:
        assert torch.equal(out.view(torch.uint8), found[0][0].view(torch.uint8))
        assert torch.equal(lse.view(torch.uint8), found[0][1].view(torch.uint8))
    return found[0]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_results(case: ParallelCase, ranks: list[dict[str, Any]]) -> None:
    out, lse = joined(case, ranks)
    ParallelBatch(case, case.world(len(ranks))).check(out, lse)


@pytest.mark.parametrize("case", [c for c in CASES if c.q_lens == ()], ids=str)
def test_one_process_gives_the_same(case: ParallelCase, ranks: list[dict[str, Any]]) -> None:
    out, lse = joined(case, ranks)
    batch = ParallelBatch(case, 1)
    indptr, indices = batch.pages(0)
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8)
    if case.head_dim_vo:
        flat: Any = flashpage.BatchPrefillWithPagedKVCacheWrapper(workspace, case.kv_layout)
        flat.plan(batch.q_indptr, indptr, indices, None, *batch.sizes(), **batch.options(), seq_lens=batch.seq_lens)
    else:
        flat = flashpage.BatchDecodeWithPagedKVCacheWrapper(workspace, case.kv_layout)
        options = {"window_left": case.window_left, "q_data_type": batch.q.dtype}
        flat.plan(indptr, indices, None, *batch.sizes(), **options, seq_lens=batch.seq_lens)
    expected = flat.run(batch.q, batch.caches[0].argument("cpu"), sinks=batch.sinks, return_lse=True)
    batch.check(*expected, is_merged=False)
    near = {"float32": 1e-5, "float16": 2.0**-9, "bfloat16": 2.0**-6}[case.dtype]
    torch.testing.assert_close(out, expected[0], rtol=near, atol=near)
    torch.testing.assert_close(lse, expected[1], rtol=1e-5, atol=1e-5)


def test_own_heads_are_those_of_all(ranks: list[dict[str, Any]]) -> None:
    """With heads="own" a rank merges its heads to the bits that heads="all" gives."""
    own = [torch.cat([rank["states-own"][i] for rank in ranks], 1) for i in (0, 1)]
    for rank in ranks:
        assert torch.equal(own[0], rank["states-all"][0]) and torch.equal(own[1], rank["states-all"][1])


def test_states_are_merged(ranks: list[dict[str, Any]]) -> None:
    out, lse = merge(*zip(*(states_of(rank) for rank in range(len(ranks))), strict=True))
    found = ranks[0]["states-all"]
    assert found[1][4].isinf().all() and not found[0][4].any()
    torch.testing.assert_close(found[0], out.half(), rtol=2.0**-10, atol=2.0**-10)
    torch.testing.assert_close(found[1], lse.float(), rtol=1e-6, atol=1e-6)
    natural, natural_lse = ranks[0]["states-basee"]
    torch.testing.assert_close(natural, found[0], rtol=2.0**-10, atol=2.0**-10)
    torch.testing.assert_close(natural_lse, found[1] * math.log(2), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("heads", ["all", "own"])
def test_edges(heads: str, ranks: list[dict[str, Any]]) -> None:
    mine = 4 if heads == "all" else 4 // len(ranks)
    for rank in ranks:
        assert [part.shape for part in rank[f"empty-{heads}"]] == [(0, mine, 16), (0, mine)]
        out, lse = rank[f"unused-{heads}"]
        assert not out[:2].any() and lse[:2].eq(-torch.inf).all()
        assert out[2:].any() and lse[2:].isfinite().all()
        assert "float32" in rank[f"sinks-{heads}"]


def test_requests_grow(ranks: list[dict[str, Any]]) -> None:
    """The tokens that each rank appended to its own pages, step by step."""
    for step in range(NEW_TOKENS):
        for request, (q, k, v) in enumerate(grown_tokens()):
            end = GROWN.kv_lens[request] + step + 1
            state = attention(q[step : step + 1], k[:end], v[:end], Options(GROWN.head_dim**-0.5))
            for rank in ranks:
                out, lse = rank["grown"][step]
                torch.testing.assert_close(out[request].double(), state.out[0], rtol=2.0**-6, atol=2.0**-6)
                torch.testing.assert_close(lse[request].double(), state.lse[0], rtol=1e-5, atol=1e-5)


def test_foreign_groups_are_refused(ranks: list[dict[str, Any]]) -> None:
    if len(ranks) == 2:
        pytest.skip("both ranks are in the one group")
    for number, rank in enumerate(ranks):
        assert f"does not have this process (rank {number})" in rank["foreign group"]


def test_spawned_processes_have_the_drop_in(tmp_path: Path) -> None:
    """A launch script that calls install() at its top level, as in the guide, and an engine that spawns a worker."""
    (tmp_path / "engine.py").write_text(ENGINE)
    (tmp_path / "worker.py").write_text("import flashinfer.decode as d\n\ndef main():\n    print(d.__name__)\n")
    guide = (ROOT / "docs" / "guides" / "engines.md").read_text()
    launcher = re.search(r"^(import runpy.*?)```", guide, re.DOTALL | re.MULTILINE)
    assert launcher, "the guide has no launch script"
    (tmp_path / "launch.py").write_text(launcher[1].replace("my_engine", "engine"))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    done = subprocess.run(
        [sys.executable, "launch.py"], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS
    )
    assert (done.returncode, done.stdout) == (0, "flashpage.decode\n"), done.stderr


ENGINE = """
import multiprocessing

import worker

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=worker.main)
    process.start()
    process.join()
    raise SystemExit(process.exitcode)
"""
