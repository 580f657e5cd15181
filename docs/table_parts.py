"""Parts that all tables of results share: their lines, names of libraries, and Markdown."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Line = dict[str, Any]

# Labels of flashpage in lines of engines; ratios are those of the other labels to these.
OWN = ("flashpage", "fpage", "fpage+graphs", "fpage+all_graphs")
UNITS = {"gb_per_s": "GB/s", "tflop_per_s": "TFLOP/s"}
NAMES = {
    "flashinfer": "FlashInfer",
    "flashinfer fa2": "FlashInfer",
    "flashinfer fa3": "FlashInfer fa3",
    "xqa": "XQA",
    "fa3": "FA3",
    "fa3 scheduled": "FA3 scheduled",
    "torch cudnn": "cuDNN",
    "cudnn fp8": "cuDNN fp8",
    "flashmla": "FlashMLA",
}


def name(label: str) -> str:
    return NAMES.get(label, label)


def table(header: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    header = list(header)
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)
