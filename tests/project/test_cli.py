"""The console command: the output of each subcommand, and one line and exit code 2 for a wrong argument."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import programs
import pytest

from flashpage.base.dtypes import DType
from flashpage.base.env import VARIABLES
from flashpage.base.version import VERSION
from flashpage.cli import _COMMANDS, main, values
from flashpage.cli import plan as plan_command
from flashpage.cli.cache import _ACTIONS
from flashpage.kernels.spec import KernelSpec
from flashpage.kernels.tile import Tile


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command."""
    try:
        code = main(list(arguments))
    except SystemExit as stop:  # argparse
        code = int(stop.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


WRONG = [  # arguments, and a word that the line must contain
    (("nonsense",), "nonsense"),
    (("--nonsense",), "--nonsense"),
    (("cache", "burn"), "burn"),
    (("plan",), "kv_lens"),
    (("plan", "12,zwölf"), "zwölf"),
    (("plan", "0x"), "0x"),
    (("plan", "zipf:4"), "zipf:4"),
    (("plan", "bell:4:100"), "bell"),
    (("plan", "100", "--heads", "7/2"), "7/2"),
    (("plan", "100", "--ctas", "0"), "--ctas"),
    (("plan", "100", "--ctas", "10000000"), "--ctas: 10000000 is more than 65536"),
    (("plan", "100", "--head-dim", "20"), "--head-dim"),
    (("plan", "100", "--window-left", "-2"), "--window-left"),
    (("plan", "99999999999"), "at most 2147483647"),
    (("plan", "100,200", "--q-lens", "1,2,3"), "--q-lens"),
    (("plan", "100", "--page-size", "-3"), "--page-size"),
    (("demo", "--requests", "0"), "--requests"),
    (("demo", "--device", "tpu"), "tpu"),
    (("build", "no-such-file"), "no-such-file"),
    (("build", "--spec", "{}"), "--spec"),
    (("build", "--spec", "["), "--spec"),
    (("build", "--spec", '{"kernel": "cpu_attention"}'), "tile"),
    (("build", "--spec", '{"kernel": "block_decode_sm80"}'), "tile"),
    (("build", "--spec", '{"kernel": 5}'), "not a kernel"),
    (("build", "--spec", '{"kernel": "telepathy"}'), "telepathy"),
    (("build", "--target", "sm_eighty", "--spec", '{"kernel": "merge"}'), "sm_eighty"),
    (("build", "--target", "avx2", "--spec", '{"kernel": "merge"}'), "cuda"),
    (("info", "everything"), "everything"),
    (("replay", "no-such-folder"), "no-such-folder has no call.pt"),
    (("plan", "4096", "--crd", "H200"), "unrecognized arguments: --crd H200 (see `flashpage plan --help`)"),
]


@pytest.mark.parametrize(("arguments", "named"), WRONG, ids=[" ".join(a) or "nothing" for a, _ in WRONG])
def test_wrong_argument(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], named: str) -> None:
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert len(err.splitlines()) == 1, err
    assert named in err


def test_no_command_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys)
    assert code == 0 and err == ""
    listed = {line.split()[0] for line in out.splitlines() if line.startswith("    ")}
    assert set(_COMMANDS) <= listed


def test_no_action_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "cache")
    assert code == 0 and err == ""
    assert [line.split()[:3] for line in out.splitlines()] == [["flashpage", "cache", a] for a in _ACTIONS]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version") == (0, f"flashpage {VERSION}\n", "")


@pytest.mark.parametrize(("target", "says"), [("sm_12", "is of sm_12"), ("avx3", "target 'avx3' is not known")])
def test_a_wrong_target_of_the_aot_list(target: str, says: str) -> None:
    done = programs.run(["-m", "flashpage", "build", "--target", target])
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("flashpage build: ") and says in done.stderr


def test_query_rows_of_all_requests(capsys: pytest.CaptureFixture[str]) -> None:
    """A single number is for all, and 1 the default."""
    batch = ("plan", "100,200,50", "--backend", "cpu", "--items")
    assert run(capsys, *batch, "--q-lens", "4") == run(capsys, *batch, "--q-lens", "4,4,4")
    code, out, err = run(capsys, *batch, "--q-lens", "1")
    assert code == 0 and out and not err


def test_help_of_plan_names_all_distributions(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "plan", "--help")
    assert all(kind in out for kind in values.KINDS)


def test_wrong_benchmark() -> None:
    done = programs.run(["-m", "flashpage", "bench", "sleep"])
    assert done.returncode == 2
    assert "sleep" in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "words, code, says",
    [
        ("plan --help", 0, "--largest"),
        ("plan cpu --small", 2, "pass one benchmark"),
        ("cpu --bogus", 2, "--bogus"),
        ("decode --bogus", 2, "gpu.py: unrecognized arguments: --bogus"),
        ("decode --libraries nope", 2, "no library 'nope'"),
        ("counters --library nope", 2, "'nope'"),
        ("vllm", 0, "== vllm: skipped, torch finds no GPU here"),
        ("decode --libraries flashpage,xqa --apart", 0, "\nskipped: torch finds no GPU here"),
        ("trace --repeats 1", 0, "\nskipped: torch finds no GPU here"),
    ],
)
def test_options_of_a_benchmark(words: str, code: int, says: str) -> None:
    no_card = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = programs.run(["-m", "flashpage", "bench", *words.split()], env=no_card)
    assert done.returncode == code and says in done.stdout + done.stderr
    assert len(done.stderr.splitlines()) <= 1


LENGTHS = [
    ("300,17,4096", [300, 17, 4096]),
    ("3x64,5", [64, 64, 64, 5]),
    ("0", [0]),
    ("uniform:3:100", [100, 100, 100]),
    ("one-long:3:160", [460, 10, 10]),
]


@pytest.mark.parametrize(("text", "expected"), LENGTHS)
def test_lengths(text: str, expected: list[int]) -> None:
    assert values.lengths(text) == expected


@pytest.mark.parametrize("kind", values.KINDS)
def test_distributions_keep_their_mean(kind: str) -> None:
    lens = values.distribution(kind, 64, 4096)
    assert len(lens) == 64 and min(lens) >= 1
    assert abs(sum(lens) - 64 * 4096) <= 64  # rounding


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "info")
    assert code == 0
    rows = {line.split()[0] for line in out.splitlines()}
    assert {"flashpage", "python", "cpu", "g++", "nvcc", "nvrtc", "cache"} <= rows
    assert set(VARIABLES) <= rows


SETTINGS = [("FLASHPAGE_JIT", "offf"), ("FLASHPAGE_THREADS", "0"), ("FLASHPAGE_CARD", "foo"), ("FLASHPAGE_LOG", "2")]


@pytest.mark.parametrize(("name", "value"), SETTINGS)
def test_refused_settings(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    """One line and exit code 2, before any work; info shows all rows first."""
    monkeypatch.setenv(name, value)
    for command in (("info",), ("selftest", "--quick"), ("plan", "100")):
        code, out, err = run(capsys, *command)
        assert code == 2 and name in err and f"'{value}'" in err and len(err.splitlines()) == 1
        assert not out or command == ("info",)
        assert f"\n{name:<24} NOT ACCEPTED: {name}" in out or command != ("info",)


def test_a_setting_that_is_read_at_import() -> None:
    command = [sys.executable, "-m", "flashpage", "info"]
    done = subprocess.run(command, env=os.environ | {"FLASHPAGE_LOG": "2"}, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "flashpage info: FLASHPAGE_LOG is '2': give 0, 1, 3 or 5, or leave it unset\n"
    command[1:] = ["-c", "import flashpage"]
    done = subprocess.run(command, env=os.environ | {"FLASHPAGE_LOG": "2"}, capture_output=True, text=True)
    assert done.returncode == 1 and "SettingError: FLASHPAGE_LOG is '2'" in done.stderr


def test_unknown_settings(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHPAGE_CACHEDIR", "elsewhere")
    code, out, _ = run(capsys, "info")
    assert code == 0 and "FLASHPAGE_CACHEDIR       elsewhere: flashpage has no such variable" in out


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("Error calling __set_name__")])
def test_an_interrupt_while_modules_are_imported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    error.__cause__ = KeyboardInterrupt() if isinstance(error, RuntimeError) else None

    def interrupted(name: str, package: str) -> None:
        raise error

    monkeypatch.setattr(importlib, "import_module", interrupted)
    assert run(capsys, "plan", "100") == (130, "", "flashpage: interrupted\n")


@pytest.mark.parametrize("as_json", [False, True])
def test_collect_env(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, as_json: bool
) -> None:
    """One block with everything, where nothing works as well; without the user's name in paths."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FLASHPAGE_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setenv("FLASHPAGE_CXX", '"x')
    monkeypatch.setenv("FLASHPAGE_THREAD", "4")
    code, out, err = run(capsys, "collect-env", *(["--json"] if as_json else []))
    assert code == 0 and err == "" and str(tmp_path) not in out
    if as_json:
        found = json.loads(out)
        assert list(found) == ["versions", "devices", "compilers", "kernels", "environment"]
        assert {"system", "flashpage", "python", "torch", "numpy"} <= set(found["versions"])
        assert found["kernels"]["cache"].endswith("~/kernels")
    else:
        assert out.startswith("```text\n") and out.endswith("\n```\n") and out.count("```") == 2
    assert "no such variable" in out
    assert "NOT ACCEPTED: FLASHPAGE_CXX is" in out


def test_plan_without_a_card(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's plan, and a card's where it is wanted; CTAs without work are not drawn."""
    monkeypatch.setattr(plan_command, "_has_card", lambda: False)
    out = run(capsys, "plan", "3,5")[1]
    assert "planned for this CPU with " in out and "--card H200 plans for one" in out and "kernel cpu_attention" in out
    out = run(capsys, "plan", "3,5", "--backend", "cuda")[1]
    assert "card: H200, assumed because there is no card here" in out
    assert "16 of 132 CTAs" in out and out.index("card: H200") > 0
    assert len([line for line in out.splitlines() if "|" in line]) == 16
    assert "\ncard: A100, " in run(capsys, "plan", "3,5", "--card", "A100")[1]


def test_plan(capsys: pytest.CaptureFixture[str], tmp_path: os.PathLike[str]) -> None:
    svg = os.path.join(tmp_path, "plan.svg")
    code, out, _ = run(capsys, "plan", "5000,3,0,77", "--ctas", "8", "--items", "--svg", svg)
    assert code == 0
    for request in (0, 1, 3):  # each request with tokens is in some work item
        assert f"request {request}" in out
    with open(svg) as file:
        assert file.read().lstrip().startswith("<svg")


def test_plan_of_prefill(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "plan", "100,200", "--q-lens", "100,16", "--page-size", "0", "--backend", "cpu")
    assert code == 0 and out


def cpu_spec(head_dim: int) -> KernelSpec:
    """A kernel that compiles in a few seconds."""
    f32 = DType.FLOAT32
    return KernelSpec("cpu_attention", f32, f32, f32, head_dim, head_dim, tile=Tile(96, 128, 1, 1, 1))


def test_build_fills_the_cache(
    capsys: pytest.CaptureFixture[str], tmp_path: os.PathLike[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Builds a manifest of one kernel twice (compiled, then found), lists the cache and clears it."""
    from flashpage import jit

    monkeypatch.setenv("FLASHPAGE_CACHE_DIR", os.path.join(tmp_path, "cache"))
    spec = cpu_spec(16)
    manifest = os.path.join(tmp_path, "kernels.json")
    jit.write_manifest(manifest, [(spec, jit.host_target())])
    code, out, _ = run(capsys, "build", manifest)
    assert code == 0 and out.startswith("1 built, 0 there already")
    code, out, _ = run(capsys, "build", "--spec", json.dumps(spec.to_json()))
    assert code == 0 and out.startswith("0 built, 1 there already")
    assert spec.name in run(capsys, "cache", "list")[1]
    assert run(capsys, "cache", "path")[1].strip() == os.environ["FLASHPAGE_CACHE_DIR"]
    assert run(capsys, "cache", "clear")[1].startswith("removed 1 kernel from")
    assert run(capsys, "cache", "list")[1].startswith("0 kernels")


def test_build_tells_what_failed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHPAGE_CXX", "no-such-compiler")
    code, _, err = run(capsys, "build", "--spec", json.dumps(cpu_spec(24).to_json()))
    assert code == 1
    assert "no-such-compiler" in err


def test_interrupted_compile_leaves_nothing_behind(tmp_path: os.PathLike[str]) -> None:
    """Ctrl-C while the compiler runs: exit code 130, one line, no child, no partial entry; the next call works."""
    slow = os.path.join(tmp_path, "slow-g++")
    with open(slow, "w") as file:
        file.write('#!/bin/sh\necho $$ > "$0.pid"\nsleep 60\n')
    os.chmod(slow, 0o755)
    cache = os.path.join(tmp_path, "cache")
    environment = os.environ | {"FLASHPAGE_CACHE_DIR": cache, "FLASHPAGE_CXX": slow}
    command = [sys.executable, "-m", "flashpage", "build", "--spec", json.dumps(cpu_spec(40).to_json())]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 30
    while not os.path.exists(slow + ".pid") and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert err.splitlines()[-1] == "flashpage build: interrupted"
    with open(slow + ".pid") as file, pytest.raises(ProcessLookupError):
        os.kill(int(file.read()), 0)
    listed = programs.run(["-m", "flashpage", "cache", "list"], env=environment)
    assert listed.stdout.startswith("0 kernels")


def test_version_is_the_package_s() -> None:
    text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    assert f'\nversion = "{VERSION}"\n' in text, "flashpage/base/version.py and pyproject.toml differ"
