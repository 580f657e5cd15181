"""Downloads FlashInfer for tests/engines/test_flashinfer.py: `python tests/support/get_flashinfer.py [VERSION ...]`.

build/engines/flashinfer-python-VERSION has the Python files of the official wheel, build/engines/flashinfer-packages
what they import without a card; tests/support/flashinfer_tree stands in for cuda-python.
"""

from __future__ import annotations

from get_vllm import ENGINES, get_tree, install, parser_of

PACKAGES = ENGINES / "flashinfer-packages"
# Of vLLM 0.26.0, of SGLang 0.5.15.post1, of vLLM 0.33.0 and SGLang 0.5.23, and the newest.
VERSIONS = ("0.6.14", "0.6.12", "0.7.2.post1", "0.7.4")
# torch and pytest bring filelock, NumPy and packaging.
NEEDED = [
    *("apache-tvm-ffi", "certifi", "charset-normalizer", "einops", "idna", "nvidia-ml-py", "requests", "tqdm"),
    "urllib3",
]


def _is_needed(name: str) -> bool:
    """Sources of kernels are most of the wheel's bytes."""
    return not name.startswith("flashinfer/data/") and name.endswith((".py", ".json", "METADATA"))


def main() -> None:
    names = parser_of(__doc__).parse_args().names
    ENGINES.mkdir(parents=True, exist_ok=True)
    install(PACKAGES, *NEEDED)
    for name in names or VERSIONS[:1]:
        get_tree("flashinfer-python", name, _is_needed)


if __name__ == "__main__":
    main()
