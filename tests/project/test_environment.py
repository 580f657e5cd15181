"""Environment variables: each is checked when it is read, and errors have its name and the accepted values."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from flashpage import jit
from flashpage.base import env
from flashpage.errors import CompileError, FlashpageError, SettingError
from flashpage.jit import compilers, process
from flashpage.kernels import devices

SWITCHES = ("FLASHPAGE_JIT", "FLASHPAGE_PROGRESS", "FLASHPAGE_CHECK_INDICES")
COUNTS = ("FLASHPAGE_JOBS", "FLASHPAGE_THREADS")
NO_COUNTS = ("abc", "0", "-3", "1.5", "4 threads", "1025", "9" * 5000, "²", "+2", " 2")


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for value, is_on, is_off in (("on", True, False), ("FALSE", False, True), ("1", True, False), ("", False, False)):
        monkeypatch.setenv(name, value)
        assert (env.is_on(name), env.is_off(name)) == (is_on, is_off)
    for value in ("offf", "2", "off ", "x" * 5000):
        monkeypatch.setenv(name, value)
        for read in (env.is_on, env.is_off):
            with pytest.raises(
                SettingError, match=rf"^{name} is '.*': give 'on' \(1, true, yes\) or 'off' \(0, false, no\)"
            ):
                read(name)


@pytest.mark.parametrize("name", COUNTS)
def test_a_count(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1024")
    assert env.count(name) == 1024
    for value in NO_COUNTS:
        monkeypatch.setenv(name, value)
        with pytest.raises(SettingError, match=f"^{name} is .*: give a whole number from 1 to 1024") as caught:
            env.count(name)
        assert len(str(caught.value)) < 250


@pytest.mark.parametrize("value", ["abc", "0", "-3"])
def test_threads_are_judged_before_the_first_plan(value: str) -> None:
    code = "import flashpage; print('imported', flush=True); from flashpage import native; native.load()"
    environment = os.environ | {"FLASHPAGE_THREADS": value}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout == "imported\n" and done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.endswith(
        f"SettingError: FLASHPAGE_THREADS is '{value}': give a whole number from 1 to 1024, or leave it unset"
    )


def test_every_variable_is_read_with_a_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each variable with a value that it does not accept, at its first use. Any text may be a folder's name."""
    uses = {
        "FLASHPAGE_JIT": lambda: env.is_off("FLASHPAGE_JIT"),
        "FLASHPAGE_PROGRESS": lambda: env.is_off("FLASHPAGE_PROGRESS"),
        "FLASHPAGE_CHECK_INDICES": lambda: env.is_on("FLASHPAGE_CHECK_INDICES"),
        "FLASHPAGE_VLLM": lambda: env.is_on("FLASHPAGE_VLLM"),
        "FLASHPAGE_SGLANG": lambda: env.is_on("FLASHPAGE_SGLANG"),
        "FLASHPAGE_CARD": lambda: devices.as_card(env.get("FLASHPAGE_CARD"), devices.H200),
        "FLASHPAGE_LOG": env.log_level,
        "FLASHPAGE_NVTX": lambda: env.is_on("FLASHPAGE_NVTX"),
        "FLASHPAGE_JOBS": lambda: process.job_count(1),
        "FLASHPAGE_THREADS": lambda: env.count("FLASHPAGE_THREADS"),
        "FLASHPAGE_CXX": lambda: compilers.find_compiler(jit.Target("cpu", "avx2")),
        "FLASHPAGE_NVCC": lambda: compilers.find_compiler(jit.Target("cuda", 90)),
    }
    assert set(uses) | {"FLASHPAGE_CACHE_DIR", "FLASHPAGE_DUMP"} == set(env.VARIABLES)
    for name, use in uses.items():
        with monkeypatch.context() as patch:
            patch.setenv(name, '/no/such"')
            with pytest.raises(FlashpageError, match=rf"^{name} is '/no/such\"'.*: give "):
                use()


def test_compilers_that_are_no_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHPAGE_CXX", '"x')
    with pytest.raises(CompileError, match=r"FLASHPAGE_CXX is '\"x' \(No closing quotation\): give a program"):
        compilers.find_cxx()
    monkeypatch.setenv("FLASHPAGE_CXX", "")
    monkeypatch.setenv("FLASHPAGE_NVCC", "/no/such/nvcc")
    with pytest.raises(CompileError, match="FLASHPAGE_NVCC is '/no/such/nvcc', which is no program: give the path"):
        compilers.find_nvcc()
    for value in ("off", "OFF", "0"):
        monkeypatch.setenv("FLASHPAGE_NVCC", value)
        assert compilers.find_nvcc() is None
