"""The benchmarks run, with few repetitions or tiny shapes; only their output is tested."""

from __future__ import annotations

import gzip
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import programs
import pytest
import torch

from flashpage import jit
from flashpage.jit import compilers

pytestmark = pytest.mark.usefixtures("quick_kernels")

BENCH = Path(__file__).resolve().parents[1] / "bench"
SMALL = ("--small", "--device", "cpu", "--libraries", "flashpage", "--repeats", "1")
MIXED = ("--small", "--device", "cpu", "--repeats", "1", "--rounds", "1")
PROGRAMS = [  # program and arguments, and a line that it prints
    (("host.py", "--device", "cpu", "--repeats", "3"), "| run, prefill, out= given | 1 |"),
    (("gpu.py", "decode", "--only", "Zipf", *SMALL), "| batch 64, context 4k, Zipf | flashpage |"),
    (("gpu.py", "decode", "--apart", "--only", "page 64", *SMALL), "| batch 64, context 4k, page 64 | flashpage |"),
    (("gpu.py", "more-decode", "--only", "chat", *SMALL), "| batch 256, chat | flashpage |"),
    (("gpu.py", "prefill", "--only", "16 x 1k", *SMALL), "| ragged 16 x 1k | flashpage |"),
    (("gpu.py", "fp8-prefill", "--only", "4 x 4k", *SMALL), "| e4m3, page 16, 4 x 4k | flashpage |"),
    (("gpu.py", "fp8-prefill", "--only", "one sign", *SMALL), "| e4m3, ragged 1 x 16k, V of one sign | flashpage |"),
    (("gpu.py", "small-prefill", "--only", "16, 8 x 512", *SMALL), "| page 16, 8 x 512 | flashpage |"),
    (("gpu.py", "fp8-kv", "--only", "e4m3 KV, 1 x", *SMALL), "| e4m3 KV, 1 x 32k | flashpage |"),
    (("gpu.py", "mla", "--only", "16 heads, batch 16", *SMALL), "| 16 heads, batch 16, context 2k | flashpage |"),
    (("gpu.py", "more-mla", "--only", "24 heads", *SMALL), "| 24 heads, batch 64, context 4k | flashpage |"),
    (("gpu.py", "mla-fp8", "--only", "32 heads", *SMALL), "| 32 heads, 656 bytes, batch 64, context 4k, four rows |"),
    (("gpu.py", "expanded", "--only", "16 heads, 4 x", *SMALL), "| 192/128, 16 heads, 4 x 4k | flashpage |"),
    (("gpu.py", "prefill", "--only", "append 8", *SMALL), "| append 8 rows on 8k, 32 requests | flashpage |"),
    (("counters.py", "--case", "d 64, batch 64, context 4k", "--small", "--device", "cpu"), "| time us |"),
    (("sweep.py", "--only", "1.036", "--json", os.devnull, *SMALL), "1.036 decode"),
    (("cascade.py", "--only", "64 requests, 8k", *SMALL), "| 64 requests, 8k shared, 1k own | flashpage |"),
    (("sglang_turns.py", "--small", "--device", "cpu"), "skipped: SGLang is not installed"),
    (("vllm_turns.py", "--small", "--device", "cpu"), "skipped: vLLM is not installed"),
    (
        (
            "energy.py",
            "--small",
            "--device",
            "cpu",
            "--libraries",
            "flashpage",
            "--seconds",
            "0.1",
            "--only",
            "1 x 16k",
        ),
        "| ragged 1 x 16k | flashpage |",
    ),
    (("plan_arithmetic.py", "--rounds", "1", "--largest", "0"), "| prefill, 1,024 rows | 64 |"),
    (("small_pages.py", "--only", "4 x 4k", "--small", "--device", "cpu", "--rounds", "1"), "| 4 x 4k |"),
    (("formats.py", "--only", "8 x 1k", "--small", "--device", "cpu", "--rounds", "1"), "| prefill, 8 x 1k |"),
    (
        ("mixed.py", "--only", "1 x 512", *MIXED, "--decodes", "flashpage", "--prompts", "flashpage"),
        "| 1 x 512, 256 decodes of 1k | flashpage, ",
    ),
    (("mixed.py", "--only", "chunk of", "--ways", *MIXED), "| chunk of 2k on 16k, 64 decodes of 4k | as planned |"),
    (
        ("sparse.py", "--only", "32 heads", "--small", "--device", "cpu", "--rounds", "1"),
        "| 16 heads, batch 2, top-k 100 |",
    ),
    (
        ("sparse_calls.py", "--only", "64 heads", "--small", "--device", "cpu", "--rounds", "1"),
        "| prefill, 4 heads, 2 rows, top-k 64 |",
    ),
    (("e4m3_forms.py", "--only", "1 x 16,384", "--small", "--device", "cpu", "--rounds", "1"), "| page 16, 1 x 64 |"),
    (("cluster.py", "--only", "4 x 1k", "--small", "--device", "cpu", "--rounds", "1"), "| 4 x 1k |"),
    (
        ("engine.py", "--small", "--device", "cpu", "--requests", "4", "--prompt", "40", "--new-tokens", "8"),
        "| torch sdpa, eager | eager |",
    ),
    (
        ("parallel.py", "--only", "64 requests, 4k", "--small", "--device", "cpu", "--repeats", "1"),
        "| 64 requests, 4k | 2 |",
    ),
]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [pytest.param(*row, marks=pytest.mark.rare if row[0][0] == "parallel.py" else ()) for row in PROGRAMS],
    ids=[" ".join(a[:4]) for a, _ in PROGRAMS],
)
def test_runs(arguments: tuple[str, ...], line: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(BENCH.parent.parent)}
    done = programs.run([BENCH / arguments[0], *arguments[1:]], env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    row = next(found for found in done.stdout.splitlines() if found.startswith(line))
    if arguments[0] in ("gpu.py", "cascade.py", "parallel.py", "engine.py") or "--prompts" in arguments:
        assert float(row.split("|")[-2]) < 1e-2  # the error against fp32, or the engine's wrong tokens


@pytest.fixture
def bench_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmarks' folder is importable; one of its modules has the name of a standard module."""
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.delitem(sys.modules, "trace", raising=False)


@pytest.mark.rare
def test_loaders_compile_alone() -> None:
    """The program compiles with the present headers, as CI may have no card to run it on."""
    if compilers.find_compiler(jit.Target("cuda", 90)) is None:
        pytest.skip("neither nvcc nor NVRTC is here")
    environment = os.environ | {"PYTHONPATH": str(BENCH.parent.parent)}
    done = programs.run([BENCH / "load_bench.py", "--compile-only", "--rings", "96"], env=environment)
    assert (done.returncode, done.stdout) == (0, "6 kernels compiled\n"), done.stdout + done.stderr


def test_trace_of_a_launch(bench_path: None) -> None:
    """Three CTAs with work, and one without."""
    import trace

    names = trace.NAMES
    assert len(names) == 8  # the kernel writes int64 [CTAs, 8]
    stamps = np.zeros((5, len(names)))
    for row, (start, first_tile, end) in enumerate(((1000, 3000, 9500), (1500, 4000, 10500), (2000, 0, 2100))):
        for name, stamp in (("start", start), ("first_tile", first_tile), ("end", end)):
            stamps[row, names.index(name)] = stamp
    stamps[3] = stamps[0]
    launch = trace.Launch.of(stamps, names)
    assert launch.num_ctas == 3
    assert launch.steps[names.index("start")].tolist() == pytest.approx([0, 0.5 / 3, 0.5])
    assert launch.steps[names.index("end")].tolist() == pytest.approx([8.5, 26.5 / 3, 9.5])
    assert np.isnan(launch.steps[names.index("written")]).all()
    assert launch.spread == pytest.approx(1 / 9.5)
    assert trace.Launch.median([launch] * 3).spread == launch.spread
    assert trace.Launch.of(np.zeros((5, len(names))), names) is None


def test_attention_of_torch() -> None:
    """Every case runs on flashpage, in tiny shapes."""
    environment = os.environ | {"PYTHONPATH": str(BENCH.parent.parent)}
    small = ["--small", "--device", "cpu", "--repeats", "1"]
    done = programs.run([BENCH / "torch_attention_bench.py", *small], env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("| flashpage |") == 11


def test_options_with_scales() -> None:
    """Scales by head and by request over bf16 and e4m3 caches have times, not refusals."""
    environment = os.environ | {"PYTHONPATH": str(BENCH.parent.parent)}
    small = ["--small", "--device", "cpu", "--repeats", "1", "--only", "scales", "--cases", "decode,decode-e4m3,16k"]
    done = programs.run([BENCH / "variants_bench.py", "options", *small], env=environment)
    assert done.returncode == 0, done.stderr
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| scales, ")]
    assert all(float(number) > 0 for row in rows for number in row[1:4])
    names = [row[0].removeprefix("| scales, ") for row in rows]
    by_request = "k and v by request and head", "q by head, k and v by request and head"
    for name in ("v by head", "q, k and v by head", *by_request):
        assert names.count(name) == (2 if name in by_request else 3)


@pytest.mark.rare
def test_batches_of_transformers() -> None:
    """FlashAttention is left out with a reason, and sdpa gives the same tokens."""
    pytest.importorskip("transformers", "5.18")
    environment = os.environ | {"PYTHONPATH": str(BENCH.parent.parent)}
    small = ["--small", "--device", "cpu", "--repeats", "1", "--backends"]
    done = programs.run([BENCH / "transformers_turns.py", *small, "fpage,flash_attention_3"], env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "flash_attention_3: left out: transformers finds no package" in done.stdout
    assert "4 new each: fpage: " in done.stdout and " decode_per_s, " in done.stdout
    done = programs.run([BENCH / "transformers_turns.py", *small, "fpage,sdpa", "--check"], env=environment)
    assert "sdpa: 4 of 4 prompts have equal tokens, 4 equal first ones" in done.stdout, done.stdout + done.stderr


def test_a_sweep_draws_the_same_cases_and_lists_those_behind(
    bench_path: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import sweep

    cases = sweep.drawn(1, 30)
    assert cases == sweep.drawn(1, 40)[:30] and cases != sweep.drawn(2, 30)
    assert len({case.name for case in cases}) == 30
    common = {"section": sweep.SECTION, "best_peer": "fa3", "us": {"flashpage": 10.0}}
    ratios = {"a": 0.9, "b": 1.019, "c": 1.02, "d": None}
    lines = [{**common, "case": case, "ratio": ratio} for case, ratio in [("a", 2.0), *ratios.items()]]
    (path := tmp_path / "sweep.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    sweep.report(sweep.timed(path).values())
    *_, first, second, end = capsys.readouterr().out.splitlines()
    assert (first[:10], second[:11]) == ("| a | 0.90", "| b | 1.019")
    assert end.startswith("4 cases, 3 with a peer: 1 (33.3%) below 1, 2 below 1.02, geometric mean 0.978")


def test_counters_of_ncu(bench_path: None) -> None:
    """Two kernels between other lines: some metrics have no number, and one belongs to no counter."""
    import counters

    rows = [  # metric, unit, value of each kernel
        ("gpu__time_duration.sum", "ns", "39,456", "4000.5"),
        ("lts__t_sectors_op_read.sum", "sector", "2,000,000", "1000"),
        ("dram__bytes_read.sum", "byte", "80000000", "32"),
        ("dram__bytes_write.sum", "byte", "1e+06", ""),
        ("dram__throughput.avg.pct_of_peak_sustained_elapsed", "%", "n/a", "1.5"),
        ("sm__cycles_active.avg", "cycle", "168", "32"),
        (counters.STALL.format("wait"), "inst", "1.234567", "0.001"),
        (counters.STALL.format("gmma"), "inst", "2.5", "nan"),
    ]
    names = ("Kernel Name", "", "flashpage_decode_sm90(const AttentionParams)", "void <unnamed>::merge<(int)4>(int)")
    table = [",".join(f'"{cell}"' for cell in column) for column in zip(names, *rows, strict=True)]
    text = "\n".join(["==PROF== Connected to process 7 (/usr/bin/python3)", *table, "==PROF== Disconnected"])
    kernels = counters.read_csv(text)
    assert [kernel.name for kernel in kernels] == ["flashpage_decode_sm90", "merge"]
    first, second = (counters.counters_of(kernel.counts) for kernel in kernels)
    assert first == {"time us": 39.46, "L2 reads MB": 64.0, "DRAM MB": 81.0}
    assert second == {"time us": 4.0, "L2 reads MB": 0.032, "DRAM busy %": 1.5}
    assert [counters.stalls_of(kernel.counts) for kernel in kernels] == [{"gmma": 2.5, "wait": 1.23}, {}]
    assert "nan" not in str(kernels[1].counts)
    assert counters.read_csv("==ERROR== The user has no permission\n") == []


def test_counters_runs_itself_under_ncu(
    bench_path: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With an ncu that knows two metrics and writes down how it is called."""
    import counters

    ncu, calls, asked = tmp_path / "ncu", tmp_path / "calls", counters.METRICS[:2]
    ncu.write_text(
        '#!/bin/sh\n[ "$1" = --query-metrics ] && printf "Device\\n----\\n'
        + "".join(f"{name.partition('.')[0]}  Counter  words\\n" for name in asked)
        + f'" && exit\necho "$@" >> {calls}\ncat {tmp_path / "csv"}\n'
    )
    ncu.chmod(0o755)
    (tmp_path / "csv").write_text('"Kernel Name","gpu__time_duration.sum"\n"","ns"\n"decode(int)","2000"\n')
    monkeypatch.setattr(sys, "argv", ["counters.py", "--case", "one"])
    assert counters.profiled(str(ncu)) == [("decode", {"gpu__time_duration.sum": 2000.0})]
    called = calls.read_text()
    assert f"--metrics {','.join(asked)} {sys.executable}" in called
    assert called.endswith("counters.py --case one --under-ncu\n") and "--profile-from-start off" in called
    (tmp_path / "csv").write_text("==ERROR== ERR_NVGPUCTRPERM\n")
    with pytest.raises(SystemExit, match="no kernel:\n==ERROR== ERR_NVGPUCTRPERM"):
        counters.profiled(str(ncu))


def test_every_benchmark_has_its_program(bench_path: None) -> None:
    from run import BENCHMARKS

    for benchmark in BENCHMARKS.values():
        assert (BENCH / benchmark.program[0]).is_file(), benchmark.program


@pytest.mark.parametrize(("ended", "code"), [([0, 0], 0), ([0, 2], 2), ([1, 0], 1), ([0, -11], 1)])
def test_exit_codes(bench_path: None, monkeypatch: pytest.MonkeyPatch, ended: list[int], code: int) -> None:
    import run

    codes = iter(ended)
    monkeypatch.setattr(run, "commit", lambda: "")
    monkeypatch.setattr(run.subprocess, "run", lambda _: SimpleNamespace(returncode=next(codes)))
    monkeypatch.setattr(sys, "argv", ["run.py", "host", "cpu"])
    assert run.main() == code and next(codes, None) is None


def test_latent_cases_refuse_what_no_library_is_given(bench_path: None) -> None:
    from workloads import LatentCase

    assert LatentCase("one", 1, 1, 64, num_q_heads=16, page_size=1).shrunk().kv_len == 48
    with pytest.raises(ValueError, match="^has_sinks=True is not timed over latent rows: leave it out"):
        LatentCase("one", 1, 1, 64, has_sinks=True)


def test_bytes_of_latent_rows(bench_path: None) -> None:
    """The bytes that rates count are those that a cache holds for a token, its scales included."""
    from latent_peers import LatentBatch
    from workloads import MLA, MLA_FP8

    assert len({case.name for case in MLA_FP8}) == len(MLA_FP8)
    sizes = {"": 1152, "tensor": 576, "tokens": 576 + 16, "deepseek_v32": 656}
    cases = {case.row_format: case for case in (*MLA[::-1], *MLA_FP8[::-1]) if case.num_q_heads == 16}
    assert set(cases) == set(sizes)
    for name, case in cases.items():
        batch = LatentBatch(case.shrunk(), torch.device("cpu"))
        scales = batch.store.token_scales
        held = [batch.cache] if scales is None else [batch.cache, scales]
        tokens = batch.table.num_pages * case.page_size
        assert case.token_bytes == sizes[name] == sum(part.nbytes for part in held) / tokens, name


def test_lists_of_latent_rows(bench_path: None) -> None:
    """FlashMLA reads rows of 656 bytes by lists, of the tokens that each row sees."""
    from latent_peers import LatentBatch
    from workloads import LatentCase

    batch = LatentBatch(LatentCase("two rows", 2, 2, 70, "one-long", num_q_heads=1), torch.device("cpu"))
    lists = batch.lists()
    assert lists.shape == (2, 2, -(-max(batch.kv_lens) // 64) * 64) and lists.dtype == torch.int32
    for i, length in enumerate(batch.kv_lens):
        pages = batch.table.indices[slice(*batch.table.indptr[i : i + 2].tolist())]
        slots = (pages[:, None] * 64 + torch.arange(64)).flatten()
        for row in range(2):
            seen = length - 1 + row
            assert torch.equal(lists[i, row, :seen], slots[:seen].int()) and bool((lists[i, row, seen:] == -1).all())


def test_a_step_of_an_engine(bench_path: None) -> None:
    """Matrix products and cache writes are no attention."""
    import step_profile

    kernels = {
        "flashpage_decode_sm90": True,
        "flashpage_append": False,
        "prepare_varlen_num_blocks_flash": True,
        "void flashinfer::PrefillWithKVCacheKernel<flashinfer::SparseCollectiveMainloop": True,
        "void flashinfer::BatchPrefillWithPagedKVCacheKernel<true": True,
        "void flashinfer::PersistentVariableLengthMergeStatesKernel<8u": True,
        "void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16": False,
        "nvjet_sm90_tst_128x8": False,
        "flashinfer::sampling::TopKTopPSamplingKernel": False,
    }
    assert {name: step_profile.is_attention(name) for name in kernels} == kernels
    host = {"GPUModelRunner.execute_model": [2, 900.0], "MetadataBuilder.build": [2, 50.0]}
    phase = {"span_us": 5000.0, "steps": 2, "attention_us": 644.0, "host_us": host}
    found = step_profile.of_a_step(phase)
    assert found == {"step_us": 2500.0, "attention_us": 322.0, "plan_us": 50.0, "host_step_us": 900.0}


def test_kernels_side_by_side_count_once(bench_path: None) -> None:
    from step_profile import Span, covered

    assert covered([]) == 0.0
    assert covered([Span("", *times) for times in ((0.0, 5.0), (1.0, 2.0), (4.0, 7.0), (9.0, 10.0))]) == 8.0


def test_steps_of_a_written_trace(bench_path: None, tmp_path: Path) -> None:
    """The call in which the profile ends is no step, and a plan inside of a plan counts once."""
    import chrome_steps
    import step_profile

    def event(category: str, name: str, start: float, microseconds: float) -> dict[str, Any]:
        return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": microseconds}

    functions = ("run_batch", 0, 90), ("init_forward_metadata", 5, 20), ("init_forward_metadata_out_graph", 6, 10)
    later = ("run_batch", 100, 110), ("init_forward_metadata_out_graph", 105, 30), ("run_batch", 300, 5)
    events = [event("python_function", f"sglang/a.py(7): {name}", *times) for name, *times in (*functions, *later)]
    events += [event("kernel", "flashpage_decode_sm90", 50, 40), event("kernel", "nvjet_sm90", 150, 100)]
    path = tmp_path / "1-TP-0-DECODE.trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    found = chrome_steps.phase_of(path, "run_batch", "init_forward_metadata")
    assert found["steps"] == 2 and found["span_us"] == 200.0 and found["attention_us"] == 40.0
    assert found["host_us"] == {"run_batch": [2, 100.0], "init_forward_metadata": [2, 25.0]}
    step = {"step_us": 100.0, "attention_us": 20.0, "plan_us": 25.0, "host_step_us": 100.0}
    assert step_profile.of_a_step(found) == step


@pytest.mark.parametrize(("new_tokens", "phases"), [(1, ["prompts"]), (6, ["prompts", "decodes"])])
def test_a_phase_without_steps_has_no_profile(
    new_tokens: int, phases: list[str], bench_path: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of one token end with their prompts."""
    import engine
    import torch

    profile = {"kernels": [], "host_us": {}, "span_us": 0.0, "busy_us": 0.0, "attention_us": 0.0}
    monkeypatch.setattr(engine, "started_profiler", lambda: None)
    monkeypatch.setattr(engine, "kernels_of", lambda *_: profile)
    model = engine.Llama(engine.SMALL, torch.device("cpu"), torch.float32)
    work = engine.trace(2, 8, new_tokens, engine.SMALL.vocabulary)
    assert list(engine.profiled(engine.engine_of("flashpage", model, work, 64), work)) == phases
