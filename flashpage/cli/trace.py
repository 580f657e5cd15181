"""Run a batch of lengths on this machine and show when each CTA started, loaded, computed and merged."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import values
from .plan import add_batch_arguments

if TYPE_CHECKING:
    from ..watch.timeline import Timeline

_FLUSHED_BYTES = 512 << 20  # more than any card's L2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_batch_arguments(parser)
    parser.add_argument("--backend", choices=["cuda", "cpu"], help="cuda if there is a card, else cpu (default)")
    parser.add_argument("--repeats", type=values.count, default=3, help="recorded runs, of which the last is shown")
    parser.add_argument("--json", type=Path, help="file for a Chrome trace of all runs, which Perfetto opens")
    parser.add_argument("--svg", type=Path, help="file to which the last run is drawn")


def run(arguments: argparse.Namespace) -> int:
    import torch

    backend = arguments.backend or ("cuda" if torch.cuda.is_available() else "cpu")
    if backend == "cuda" and not torch.cuda.is_available():
        raise values.ArgumentError(
            "--backend is cuda but torch finds no card here: pass --backend cpu, or leave it out"
        )
    arguments.q_lens = values.q_lengths(arguments.q_lens, arguments.kv_lens)
    if arguments.page_size < 1:
        raise values.ArgumentError(f"--page-size is {arguments.page_size}: pass the tokens of a page")
    timeline = _record(arguments, torch.device(backend))
    print(timeline.explain())
    if arguments.json:
        timeline.to_json(arguments.json)
        print(f"Chrome trace: {arguments.json}")
    if arguments.svg:
        timeline.to_svg(arguments.svg)
        print(f"drawn to {arguments.svg}")
    return 0


def _record(arguments: argparse.Namespace, device: Any) -> Timeline:
    """Runs a batch of random numbers, whose pages are in random order."""
    import torch

    from ..plan.page_indices import Pages
    from ..watch.timeline import Timeline
    from ..wrappers.base import Attention
    from ..wrappers.plan_arguments import DecodeArguments, PrefillArguments

    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    (num_q_heads, num_kv_heads), dim, page = arguments.heads, arguments.head_dim, arguments.page_size
    lens = torch.tensor(arguments.kv_lens, dtype=torch.int32)
    indptr = _indptr((lens + page - 1).div(page, rounding_mode="floor"))
    heads, window, q_indptr, rows = (num_q_heads, num_kv_heads, dim, page), arguments.window_left, None, len(lens)
    given: DecodeArguments | PrefillArguments = DecodeArguments(*heads, window_left=window, q_data_type=dtype)
    if arguments.q_lens is not None:
        q_indptr = _indptr(torch.tensor(arguments.q_lens))
        rows, is_causal = int(q_indptr[-1]), not arguments.not_causal
        given = PrefillArguments("paged", *heads, causal=is_causal, window_left=window, q_data_type=dtype)
    wrapper = Attention(torch.empty(256 << 20, dtype=torch.uint8, device=device))
    pages = Pages(torch.randperm(int(indptr[-1])).int())
    wrapper.plan((q_indptr, indptr, None, lens), pages, *given.checked())
    q = torch.randn(rows, num_q_heads, dim, dtype=dtype, device=device)
    cache = torch.randn(int(indptr[-1]), 2, page, num_kv_heads, dim, dtype=dtype, device=device)
    flushed = torch.empty(_FLUSHED_BYTES if device.type == "cuda" else 1, dtype=torch.uint8, device=device)
    with Timeline(wrapper) as timeline:
        for _ in range(1 + arguments.repeats):
            flushed.zero_()
            wrapper.run(q, cache)
    del timeline.runs[0]  # it loaded the kernels
    return timeline


def _indptr(counts: Any) -> Any:
    import torch

    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
