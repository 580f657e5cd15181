"""CPU kernels in a folder that several machines share: none runs on a CPU that lacks its instructions."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from jit_sandbox import Sandbox, toy

from aot import build as aot_build
from flashpage import jit
from flashpage.base.dtypes import DType
from flashpage.errors import DeviceError, KernelMissingError
from flashpage.jit import build, cache, compilers, loader, targets
from flashpage.kernels.spec import KernelSpec
from flashpage.kernels.tile import Tile

LEVELS = [level for level in targets.CPU_LEVELS if level != "neon"]  # of x86-64, the best one first
LAST = LEVELS[-1]


@pytest.fixture
def sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    sandbox = Sandbox.create(tmp_path)
    sandbox.enter(monkeypatch)
    return sandbox


def pretend(monkeypatch: pytest.MonkeyPatch, level: str) -> None:
    """Pretends to be a CPU of this level, in a process that has loaded nothing."""
    monkeypatch.setattr(targets, "cpu_features", lambda: frozenset(targets.CPU_LEVELS[level]))
    monkeypatch.setattr(loader, "runnable", targets.runnable.__wrapped__)
    monkeypatch.setattr(loader, "_kernels", {})


def built_for(monkeypatch: pytest.MonkeyPatch, level: str) -> cache.Entry:
    """The entry of a build on the newer CPU."""
    pretend(monkeypatch, level)
    return build.obtain(toy(), jit.Target("cpu", level), cache.jit_store())[0]


@pytest.mark.parametrize("level", LEVELS[:-1])
@pytest.mark.parametrize("variable", ["FLASHPAGE_CXX", "FLASHPAGE_JIT"])
def test_a_cache_of_an_older_machine(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, level: str, variable: str
) -> None:
    """The newer CPU takes the older one's kernel if it cannot compile, and else compiles its own."""
    built_for(monkeypatch, LAST)
    pretend(monkeypatch, level)
    with monkeypatch.context() as patch:
        patch.setenv(variable, "no-such-compiler" if variable == "FLASHPAGE_CXX" else "off")
        patch.setattr(loader, "_kernels", {})
        assert jit.get_kernel(toy()).target.name == LAST
    assert sandbox.num_compiles() == 1
    assert jit.get_kernel(toy()).target.name == level
    assert sandbox.num_compiles() == 2


@pytest.mark.parametrize("level", LEVELS[:-1])
def test_a_shared_cache(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, level: str) -> None:
    """The older CPU compiles its own kernel, and does not take the newer one's if it cannot compile."""
    built_for(monkeypatch, level)
    pretend(monkeypatch, LAST)
    with monkeypatch.context() as patch:
        patch.setenv("FLASHPAGE_CXX", "no-such-compiler")
        with pytest.raises(KernelMissingError, match=f"is not built for {LAST}"):
            jit.get_kernel(toy())
    assert jit.get_kernel(toy()).target.name == LAST
    assert sandbox.num_compiles() == 2


def test_a_shared_wheel(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older CPU takes the best kernel that it can run, and none if a wheel has no such kernel."""
    monkeypatch.setenv("FLASHPAGE_JIT", "off")
    aot_build.build_into(sandbox.aot, [(toy(), jit.Target("cpu", level)) for level in LEVELS])
    for level in reversed(LEVELS[1:]):  # levels that run here; the test's own CPU may be an old one too
        if set(targets.CPU_LEVELS[level]) <= targets.cpu_features():
            pretend(monkeypatch, level)
            assert jit.get_kernel(toy()).target.name == level
    aot_build.build_into(sandbox.aot, [(toy(), jit.Target("cpu", level)) for level in LEVELS[:-1]])
    pretend(monkeypatch, LAST)
    with pytest.raises(KernelMissingError):
        jit.get_kernel(toy())


def test_an_entry_under_the_key_of_another_level(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that was renamed together with its record is intact, but it is for the newer CPU."""
    newer = built_for(monkeypatch, LEVELS[0])
    key = cache.key_of(toy(), jit.Target("cpu", LAST))
    renamed = newer.folder.with_name(key)
    shutil.copytree(newer.folder, renamed)
    (renamed / cache.META).write_text(json.dumps(newer.meta | {"key": key}))
    pretend(monkeypatch, LAST)
    assert cache.jit_store().read(key) is not None
    assert jit.get_kernel(toy()).target.name == LAST
    assert sandbox.num_compiles() == 2


def test_a_cpu_without_avx2_is_reported(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    built_for(monkeypatch, LAST)
    monkeypatch.setattr(targets, "cpu_features", lambda: frozenset({"fma"}))
    monkeypatch.setattr(loader, "_kernels", {})
    with pytest.raises(DeviceError, match="it lacks avx2, f16c"):
        jit.get_kernel(toy())


def test_an_arm_processor_runs_neon_kernels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "neon")
    assert loader.runnable(None) == (jit.Target("cpu", "neon"),)
    assert not [flag for flag in compilers.fixed_flags(jit.Target("cpu", "neon"))["g++"] if flag.startswith("-m")]


def test_options_of_a_user_have_kernels_of_their_own(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options in FLASHPAGE_CXX change what is compiled, and so the kernel; a launcher of the compiler does not."""
    own, launched = str(sandbox.compiler), f"env {sandbox.compiler}"
    commands = (own, 1), (f"{own} -DONE", 2), (f"{own} -DTWO", 3), (launched, 3), (f"{launched} -DONE", 3), (own, 3)
    for command, kernels in commands:
        monkeypatch.setenv("FLASHPAGE_CXX", command)
        monkeypatch.setattr(loader, "_kernels", {})
        jit.get_kernel(toy())
        assert len(cache.entries()) == kernels, command


def test_kernels_of_a_wheel_serve_whatever_the_options_are(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHPAGE_CXX", f"{sandbox.compiler} -DTWO")
    aot_build.build_into(sandbox.aot, [(toy(), jit.host_target())])
    for options in ("", " -DTWO", " -DONE"):
        monkeypatch.setenv("FLASHPAGE_CXX", f"{sandbox.compiler}{options}")
        monkeypatch.setattr(loader, "_kernels", {})
        jit.get_kernel(toy())
    assert cache.entries() == []


@pytest.mark.parametrize("options", ["", " -march=native", " -march=sapphirerapids"])
def test_a_march_of_the_user_adds_no_instructions(options: str) -> None:
    """A folder of kernels is copied between machines: a kernel has the features of its target alone."""
    if "avx2" not in targets.cpu_features():
        pytest.skip("g++ of another machine")
    compiler = compilers.Compiler("g++", ("g++", *options.split()))
    command = [*compiler.program, *compiler.flags(jit.Target("cpu", LAST)), "-dM", "-E", "-x", "c++", "/dev/null"]
    macros = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "#define __AVX2__ 1" in macros and "__AVX512" not in macros and "__AVXVNNI__" not in macros


def test_zig_has_names_of_its_own() -> None:
    zig = compilers.Compiler("g++", ("python", "-m", "ziglang", "c++", "-march=native"))
    assert "-march=x86_64" in zig.flags(jit.Target("cpu", LAST))
    assert not [flag for flag in zig.flags(jit.Target("cpu", "neon")) if flag.startswith("-march")]


def test_kernels_have_the_instructions_of_their_level(tmp_path: Path) -> None:
    """In a real kernel, only AVX-512 levels use 512-bit registers, and only AVX512-BF16 uses bf16 products."""
    if shutil.which("objdump") is None:
        pytest.skip("no objdump")
    dtype = DType.BFLOAT16
    spec = KernelSpec("cpu_attention", dtype, dtype, dtype, 16, 16, tile=Tile(96, 128, 1, 1, 1))
    levels = [LEVELS[0], LAST]
    for result in jit.build_kernels([(spec, jit.Target("cpu", level)) for level in levels], tmp_path):
        assert result.entry is not None, result.error
        command = ["objdump", "-d", "--no-show-raw-insn", str(result.entry.path)]
        code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert "%ymm" in code
        assert bool(re.search(r"%zmm|%k[1-7]", code)) == (result.target.name != LAST)
