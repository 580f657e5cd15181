"""Downloads SGLang for tests/engines/test_sglang_engine.py: `python tests/support/get_sglang.py [VERSION ...]`.

build/engines/sglang-VERSION is the official wheel, whose Python files run on the CPU, and
build/engines/sglang-packages what they import, without what pip would install with it: most of that is never imported.
tests/support/sglang_tree stands in for a few packages more.
"""

from __future__ import annotations

import sys

from get_vllm import ENGINES, get_tree, install

PACKAGES = ENGINES / "sglang-packages"
TREES = ("0.5.15.post1",)
NEEDED = [
    *("transformers==5.12.1", "tokenizers==0.22.2", "huggingface_hub<2", "triton==3.6.0"),  # as this version names them
    *("aiohappyeyeballs", "aiohttp", "aiosignal", "attrs", "certifi", "charset-normalizer", "compressed-tensors"),
    *("dill", "distro", "einops", "fastapi<0.137,>=0.133", "frozenlist", "gguf", "httpcore", "httpx", "interegular"),
    *("jiter", "loguru", "msgspec", "multidict", "openai==2.6.1", "orjson", "partial-json-parser", "pillow"),
    *("prometheus-client", "propcache", "psutil", "pybase64", "python-multipart", "pyzmq", "requests", "scipy"),
    *("sentencepiece", "setproctitle", "sniffio", "starlette>=1.0.1", "tiktoken", "torchao==0.17.0", "urllib3"),
    *("uvicorn", "uvloop", "watchfiles", "yarl", "zstandard"),
]


def _is_needed(name: str) -> bool:
    """All but the generation of images and videos."""
    return not name.startswith("sglang/multimodal_gen/")


def main(names: list[str]) -> None:
    if sys.version_info < (3, 11):
        print("skipped: SGLang's tests need Python 3.11")
        return
    ENGINES.mkdir(parents=True, exist_ok=True)
    install(PACKAGES, *NEEDED)
    for name in names or TREES:
        get_tree("sglang", name, _is_needed)


if __name__ == "__main__":
    main(sys.argv[1:])
