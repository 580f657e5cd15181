"""Downloads SGLang for tests/engines/test_sglang_engine.py: `python tests/support/get_sglang.py [VERSION ...]`.

build/engines/sglang-VERSION is the official wheel, whose Python files run on the CPU, and
build/engines/sglang-packages-VERSION what they import, without what pip would install with it: most of that is never
imported.
tests/support/sglang_tree stands in for a few packages more.
"""

from __future__ import annotations

import sys
from pathlib import Path

from get_vllm import ENGINES, get_tree, install, parser_of

PINS = {  # packages as a version of SGLang names them
    "0.5.15.post1": [
        *("transformers==5.12.1", "tokenizers==0.22.2", "compressed-tensors", "openai==2.6.1", "sentencepiece"),
        "torchao==0.17.0",
    ],
    "0.5.23": [  # the newest
        *("transformers==5.19.0", "tokenizers==0.23.2", "compressed-tensors==0.18.0", "openai==2.8.0"),
        *("sentencepiece==0.2.1", "xgrammar==0.2.7", "apache-tvm-ffi", "python-dateutil", "six", "xxhash"),
    ],
}
NEEDED = [
    *("huggingface_hub<2", "triton==3.6.0"),
    *("aiohappyeyeballs", "aiohttp", "aiosignal", "attrs", "certifi", "charset-normalizer"),
    *("dill", "distro", "einops", "fastapi<0.137,>=0.133", "frozenlist", "gguf", "httpcore", "httpx", "interegular"),
    *("jiter", "loguru", "msgspec", "multidict", "orjson", "partial-json-parser", "pillow"),
    *("prometheus-client", "propcache", "psutil", "pybase64", "python-multipart", "pyzmq", "requests", "scipy"),
    *("setproctitle", "sniffio", "starlette>=1.0.1", "tiktoken", "urllib3"),
    *("uvicorn", "uvloop", "watchfiles", "yarl", "zstandard"),
]


def packages(version: str) -> Path:
    return ENGINES / f"sglang-packages-{version}"


def _is_needed(name: str) -> bool:
    """All but the generation of images and videos."""
    return not name.startswith("sglang/multimodal_gen/")


def main() -> None:
    parser = parser_of(__doc__)
    names = parser.parse_args().names
    if unknown := [name for name in names if name not in PINS]:
        parser.error(f"VERSION {unknown[0]}: pass one of {', '.join(PINS)}, or add its packages to PINS")
    if sys.version_info < (3, 11):
        print("skipped: SGLang's tests need Python 3.11")
        return
    ENGINES.mkdir(parents=True, exist_ok=True)
    for name in names or ["0.5.23"]:
        install(packages(name), *NEEDED, *PINS[name])
        get_tree("sglang", name, _is_needed)


if __name__ == "__main__":
    main()
