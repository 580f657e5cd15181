"""A driver that refuses kernels of a newer toolkit: the error says so, and later processes do not compile again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from jit_sandbox import Sandbox

from flashpage import jit
from flashpage.errors import DeviceError
from flashpage.jit import cache, driver, loader, source
from flashpage.kernels.spec import KernelSpec

# An nvcc of CUDA 13.0, whose kernels no driver loads.
NVCC = """#!/bin/sh
case "$*" in *--version*) echo "Cuda compilation tools, release RELEASE, VRELEASE.88"; exit;; esac
echo $$ >> "$COMPILES"
while [ "$1" != -o ]; do shift; done
echo "no kernel" > "$2"
"""


@pytest.fixture
def sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    sandbox = Sandbox.create(tmp_path)
    sandbox.enter(monkeypatch)
    (sandbox.templates / "kernel.cu.jinja").write_text("// {{ spec.entry }}\n")
    monkeypatch.setattr(loader, "runnable", lambda _: (jit.Target("cuda", 90),))
    monkeypatch.setattr(loader, "cuda_target", lambda _: jit.Target("cuda", 90))
    return sandbox


def refusal(
    sandbox: Sandbox,
    monkeypatch: pytest.MonkeyPatch,
    release: str,
    driver_version: int,
    get: Callable[[KernelSpec, str], object] = jit.get_kernel,
) -> str:
    """The error in a new process with this toolkit and driver."""
    nvcc = sandbox.folder / f"nvcc-{release}"
    nvcc.write_text(NVCC.replace("RELEASE", release))
    nvcc.chmod(0o755)
    monkeypatch.setenv("FLASHPAGE_NVCC", str(nvcc))
    monkeypatch.setattr(driver, "device_info", lambda _: SimpleNamespace(driver_version=driver_version))
    with pytest.raises(DeviceError) as caught:
        get(KernelSpec("merge"), "cuda:0")
    return str(caught.value)


def test_a_driver_older_than_the_toolkit(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    told = refusal(sandbox, monkeypatch, "13.0", 12040)
    assert told.startswith(f"the driver is older than the toolkit and refuses {KernelSpec('merge').name}: ")
    assert "it is for CUDA 12.4" in told and "is of CUDA 13.0" in told and "\n" not in told
    assert sandbox.num_compiles() == 1
    assert refusal(sandbox, monkeypatch, "13.0", 12040) == told
    assert sandbox.num_compiles() == 1, "the refusal is not remembered"


def test_several_kernels_at_once(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """prebuild says the same, and the kernel whose refusal it met is not compiled again."""

    def prebuild(spec: KernelSpec, device: str) -> object:
        return jit.prebuild([spec, dataclasses.replace(spec, head_dim_vo=64)], device)

    told = refusal(sandbox, monkeypatch, "13.0", 12040, prebuild)
    assert told.startswith(f"the driver is older than the toolkit and refuses {KernelSpec('merge').name}: ")
    assert sandbox.num_compiles() == 2
    assert refusal(sandbox, monkeypatch, "13.0", 12040, prebuild) == told
    assert refusal(sandbox, monkeypatch, "13.0", 12040) == told
    assert sandbox.num_compiles() == 2, "the refusal is not remembered"


def test_another_driver_or_toolkit_gets_its_own_try(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    refusal(sandbox, monkeypatch, "13.0", 12040)
    told = refusal(sandbox, monkeypatch, "13.0", 13010)
    assert told.startswith("the driver refuses ") and "older" not in told
    assert sandbox.num_compiles() == 2
    refusal(sandbox, monkeypatch, "12.4", 13010)
    assert sandbox.num_compiles() == 3


@pytest.mark.parametrize("switch", ["FLASHPAGE_NVCC", "FLASHPAGE_JIT"])
def test_a_built_kernel_that_an_older_driver_refuses(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, switch: str
) -> None:
    """Without a compiler the error is the driver's, and does not say that no kernel is built."""
    spec, ptx = KernelSpec("merge"), jit.Target.parse("compute_80")
    monkeypatch.setattr(loader, "runnable", lambda _: (jit.Target("cuda", 90), ptx))
    monkeypatch.setattr("flashpage.jit.compilers.find_nvrtc", lambda: None)
    monkeypatch.setattr(driver, "device_info", lambda _: SimpleNamespace(driver_version=12080))
    monkeypatch.setenv(switch, "off")
    binary = sandbox.folder / "kernel.ptx"
    binary.write_text("no kernel")
    meta = {"name": spec.name, "spec": spec.to_json(), "target": ptx.name, "compiler": "nvcc (release 13.0, V13.0.88)"}
    cache.aot_store().publish(source.key_of(spec, ptx), binary, meta)
    with pytest.raises(DeviceError, match="the driver is older than the toolkit and refuses .* for CUDA 12.8"):
        jit.get_kernel(spec, "cuda:0")
