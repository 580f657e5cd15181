"""Cards that the compiler here does not know: PTX of compute_80 serves them, and plans see a card like an A100."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flashpage.jit import compilers, own_targets, targets
from flashpage.kernels import devices


@pytest.fixture
def old_nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An nvcc of CUDA 12.8, and a card of each kind as cuda:0, cuda:1 ..."""
    program = tmp_path / "nvcc"
    program.write_text("#!/bin/sh\necho sm_80 sm_90\necho sm_100\necho sm_120\n")
    program.chmod(0o755)
    monkeypatch.setenv("FLASHPAGE_NVCC", str(program))
    monkeypatch.setattr(devices, "of_index", lambda index: devices.CARDS[index])
    caches = (own_targets._is_known, devices.of, targets.cuda_target, targets.runnable)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def test_a_toolkit_that_is_too_old(old_nvcc: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for index, card in enumerate(devices.CARDS):
        planned = devices.of(torch.device("cuda", index))
        is_served = card.sm in (103, 121)
        assert planned.sm == (80 if is_served else card.sm) and planned.shared_bytes == card.shared_bytes
        assert planned.abilities == (() if is_served else card.abilities)
        monkeypatch.setattr(targets, "device_info", lambda _, card=card: card)
        targets.cuda_target.cache_clear()
        assert (targets.cuda_target(index).name == targets.PTX) == is_served
    targets.cuda_target.cache_clear()
    targets.runnable.cache_clear()
    assert targets.runnable(0) == (targets.Target("cuda", targets.PTX),)  # the last card is an sm_121


def test_what_compilers_say() -> None:
    """Every toolkit here knows the targets that CI compiles."""
    for compiler in filter(None, (compilers.find_nvcc(), compilers.find_nvrtc())):
        known = own_targets.known_targets(compiler)
        assert {80, 90} <= known, (compiler, known)


def test_without_a_compiler_built_kernels_decide(old_nvcc: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHPAGE_NVCC", "off")
    monkeypatch.setattr(compilers, "find_nvrtc", lambda: None)
    assert not own_targets.has_own_target(120) and own_targets.has_own_target(90)
