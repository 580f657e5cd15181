"""Print a block to paste into a bug report: versions, devices, compilers, compiled kernels, environment variables."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform

from ..base import env
from . import info, settings

# Packages whose versions a report needs: those that flashpage uses, and those that call it.
_PACKAGES = "torch numpy jinja2 ninja triton transformers vllm sglang flashinfer-python nvidia-cuda-nvrtc".split()  # noqa: SIM905
# Other programs' variables that change what flashpage finds or compiles.
_OTHERS = "CUDA_VISIBLE_DEVICES CUDA_HOME LD_LIBRARY_PATH XDG_CACHE_HOME TMPDIR OMP_NUM_THREADS".split()  # noqa: SIM905


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    sections = collect()
    if arguments.json:
        print(json.dumps(sections, indent=1))
        return 0
    print("```text")
    for title, rows in sections.items():
        print(f"[{title}]")
        for name, value in rows.items():
            print(f"{name}: {value}")
    print("```")
    return 0


def collect() -> dict[str, dict[str, str]]:
    """Sections of names and values. Paths in the home folder begin with "~", because reports are public."""
    sections = {
        "versions": [*_system(), *info.versions(), *_packages()],
        "devices": [*info.devices(), *_torch_cuda()],
        "compilers": info.compilers(),
        "kernels": info.kernels(),
        "environment": _environment(),
    }
    return {title: _joined(rows) for title, rows in sections.items()}


def _joined(rows: list[tuple[str, str]]) -> dict[str, str]:
    """The rows as a dict; a row without a name continues the one before it."""
    found: dict[str, str] = {}
    for name, value in rows:
        if name:
            found[name] = without_home(value)
        else:
            found[list(found)[-1]] += f"; {without_home(value)}"
    return found


def _system() -> list[tuple[str, str]]:
    try:
        name = platform.freedesktop_os_release().get("PRETTY_NAME", "")
    except OSError:
        name = ""
    libc = " ".join(platform.libc_ver())
    return [("system", f"{name or platform.system()}, kernel {platform.release()}, {platform.machine()}, {libc}")]


def _packages() -> list[tuple[str, str]]:
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
        if name in _PACKAGES or name.startswith("nvidia-cuda-nvrtc"):
            found.setdefault(name, distribution.version)
    return sorted(found.items())


def _torch_cuda() -> list[tuple[str, str]]:
    try:
        import torch
    except ImportError as error:
        return [("torch's CUDA", f"torch does not import: {error}")]
    return [("torch's CUDA", f"{torch.version.cuda or 'none'}, {torch.cuda.device_count()} devices")]


def _environment() -> list[tuple[str, str]]:
    names = sorted(name for name in env.VARIABLES if name in os.environ)
    refused, rows = settings.refused(), []
    for name in [*names, *(name for name in _OTHERS if name in os.environ)]:
        rows.append((name, f"NOT ACCEPTED: {refused[name]}" if name in refused else os.environ[name]))
    rows += [(name, f"{os.environ[name]} (flashpage has no such variable)") for name in settings.unknown()]
    return rows or [("variables", "none is set")]


def without_home(text: str) -> str:
    home = os.path.expanduser("~")
    return text.replace(f"{home}/", "~/") if home not in ("~", "/", "") else text
