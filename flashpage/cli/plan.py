"""Plan a batch of lengths and show the work of each CTA as a picture, and the reasons. Needs no GPU."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from .. import native
from ..base.text import counted
from . import values

if TYPE_CHECKING:
    import numpy as np

    from ..kernels.devices import Device


def add_batch_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that describe a batch."""
    parser.add_argument(
        "kv_lens",
        type=values.lengths,
        help="tokens of each request: 300,17,4096 or 64x4096 (64 requests of 4096) or KIND:64:4096 (64 requests, "
        f"mean), where KIND is {', '.join(values.KINDS[:-1])} or {values.KINDS[-1]}",
    )
    parser.add_argument(
        "--q-lens",
        type=values.lengths,
        help="query rows of each request, in the same forms; a single number is for all (default: 1)",
    )
    parser.add_argument("--heads", type=values.heads, default=(32, 8), help="query/KV heads (default: 32/8)")
    parser.add_argument("--head-dim", type=values.head_dim, default=128, help="dimension of each head (default: 128)")
    parser.add_argument("--page-size", type=int, default=16, help="tokens a page; 0: ragged (default: 16)")
    parser.add_argument("--not-causal", action="store_true", help="every row sees all tokens of its request")
    parser.add_argument("--window-left", type=int, default=-1, help="tokens seen to the left; -1: all (default)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_batch_arguments(parser)
    parser.add_argument(
        "--backend",
        choices=["cuda", "cpu"],
        help="cuda if there is a card, else cpu (default)",
    )
    parser.add_argument("--card", help="name of a card, which need not be in this machine (default: this machine's)")
    parser.add_argument("--ctas", type=values.ctas, help="CTAs that share the work (default: all that run at once)")
    parser.add_argument("--items", action="store_true", help="list the work items, too")
    parser.add_argument("--svg", type=Path, help="file to which the plan is drawn")
    parser.add_argument("--html", type=Path, help="file for a page of the plan, with search, zoom and details")


def run(arguments: argparse.Namespace) -> int:
    from ..plan.report.plan import plan_lengths

    kv_lens, q_lens = arguments.kv_lens, values.q_lengths(arguments.q_lens, arguments.kv_lens)
    if arguments.page_size < 0:
        raise values.ArgumentError(f"--page-size is {arguments.page_size}: pass the tokens of a page, or 0 for ragged")
    if arguments.window_left < -1:
        raise values.ArgumentError(f"--window-left is {arguments.window_left}: pass a number of tokens, or -1 for all")
    card = _card(arguments)
    num_q_heads, num_kv_heads = arguments.heads
    plan = plan_lengths(
        q_lens,
        kv_lens,
        num_q_heads,
        num_kv_heads,
        arguments.head_dim,
        page_size=arguments.page_size,
        num_ctas=arguments.ctas,
        causal=not arguments.not_causal,
        window_left=arguments.window_left,
        backend="cuda" if card else "cpu",
        card=card,
    )
    print(plan.picture())
    print(_assumed(arguments, card))
    print(plan.explain(card.name if card else ""))
    if arguments.items:
        _print_items(plan.work_items())
    if arguments.svg:
        plan.to_svg(arguments.svg)
        print(f"drawn to {arguments.svg}")
    if arguments.html:
        plan.to_html(arguments.html, card.name if card else "")
        print(f"page: {arguments.html}")
    return 0


def _card(arguments: argparse.Namespace) -> Device | None:
    """The card to plan for; None: the CPU."""
    import torch

    from ..base.errors import PlanError
    from ..jit import own_targets  # noqa: F401  devices.of asks it
    from ..kernels import devices

    if arguments.backend == "cpu" and arguments.card:
        raise values.ArgumentError(f"--card is {arguments.card} but --backend is cpu: leave one of them out")
    if arguments.card:
        try:
            return devices.named(arguments.card)
        except PlanError as error:
            raise values.ArgumentError(f"--card: {error}") from None
    if arguments.backend == "cpu" or not (arguments.backend or _has_card()):
        return None
    return devices.of(torch.device("cuda", 0)) if _has_card() else devices.H200


def _has_card() -> bool:
    return bool(native.load().fp_cuda_device_count())


def _assumed(arguments: argparse.Namespace, card: Device | None) -> str:
    """The device that the plan is for, and how to choose another one."""
    if card is None:
        other = "" if arguments.backend or _has_card() else ", as there is no card here; --card H200 plans for one"
        return f"planned for this CPU with {counted(native.load().fp_cpu_threads(), 'thread')}{other}"
    assumed = "" if arguments.card or _has_card() else ", assumed because there is no card here"
    rates = f"{card.gbps:.0f} GB/s, {card.tflops:.0f} TFLOP/s"
    return f"card: {card.name}{assumed}, {card.sms} SMs of {card.sm_shared_bytes >> 10} KiB, {rates}"


def _print_items(items: np.ndarray) -> None:
    """One line a work item."""
    for item in items:
        where = f"CTA {item['cta']}: request {item['request']}, KV head {item['kv_head']}"
        what = f"{counted(item['num_units'], 'unit')} from packed row {item['first_packed_row']}"
        cut = f", piece {item['piece']}" if item["partial_row"] >= 0 else ""
        print(f"{where}, {what}, tokens {item['kv_begin']} to {item['kv_end']}{cut}")
