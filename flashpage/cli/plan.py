"""Plan a batch of lengths and show it: which CTA does what (rows: CTAs, colours: requests), and why. Needs no GPU."""

from __future__ import annotations

import argparse
from pathlib import Path

from . import values


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "kv_lens", type=values.lengths, help="tokens of each request: 300,17,4096 or 100x64 or zipf:64:4096"
    )
    parser.add_argument(
        "--q-lens", type=values.lengths, help="query rows of each request, in the same forms (default: 1)"
    )
    parser.add_argument("--heads", type=values.heads, default=(32, 8), help="query/KV heads (default: 32/8)")
    parser.add_argument("--head-dim", type=values.count, default=128, help="default: 128")
    parser.add_argument("--page-size", type=int, default=16, help="tokens a page; 0: ragged (default: 16)")
    parser.add_argument("--not-causal", action="store_true")
    parser.add_argument("--window-left", type=int, default=-1, help="tokens; -1: all (default)")
    parser.add_argument(
        "--backend", choices=["cuda", "cpu"], default="cuda", help="whose tiles and costs (default: cuda)"
    )
    parser.add_argument("--ctas", type=values.count, default=132, help="CTAs to fill (default: 132)")
    parser.add_argument("--items", action="store_true", help="list the work items too")
    parser.add_argument("--svg", type=Path, help="file to draw the plan to")


def run(arguments: argparse.Namespace) -> int:
    raise NotImplementedError
