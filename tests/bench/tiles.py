"""Tiles of attention_sm80 under another card's limits: microseconds of the card's own tile and of others, in turns.

Plans have as many CTAs an SM as the other card's shared memory allows, on all SMs of the card here and by its speed, so
only ratios between tiles of equal CTAs an SM hold for the other card's rates:

    python tests/bench/tiles.py --card "RTX 4090"
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from unittest import mock

import torch
from command_line import Parser
from gpu import GpuClock, in_turns
from peers import Batch
from workloads import Case

import flashpage
from flashpage.kernels import attention_sm80, choose, devices
from flashpage.kernels.tile import Tile

DECODES = (Case("64 x 4k", 64, 1, 4096), Case("16 x 1k", 16, 1, 1024), Case("64 x 4k, d 64", 64, 1, 4096, head_dim=64))
PREFILLS = (
    Case("4 x 4k", 4, 4096, 4096),
    Case("1 x 16k, full", 1, 16384, 16384, causal=False),
    Case("16 x 1k", 16, 1024, 1024),
    Case("4 x 4k, d 64", 4, 4096, 4096, head_dim=64),
    Case("4 x 4k, d 64, 64/8 heads, sinks", 4, 4096, 4096, num_q_heads=64, head_dim=64, has_sinks=True),
)


def tiles_of(case: Case, card: devices.Device) -> dict[str, Tile | None]:
    """Candidates by name; None: the tile that plans choose for the card."""
    limit = card.shared_bytes
    if case.q_len == 1:
        whole = {"ring_bytes": 73728, "shared_limit": limit}
        return {
            "own": None,
            "4 warps, one CTA": Tile(16, 64, 1, 4, 4, 1, **whole),
            "2 warps, one CTA": Tile(16, 32, 1, 2, 4, 1, **whole),
        }
    if case.head_dim <= 64:
        wide = {"128 x 64": Tile(128, 64, 4, 1, 1, 2), "128 x 48, two stages": Tile(128, 48, 4, 1, 2, 2)}
        return {"own": None, "128 x 32": Tile(128, 32, 4, 1, 1, 3), "64 x 64": Tile(64, 64, 4, 1, 1, 3)} | wide
    few = {"own": None, "64 x 48": Tile(64, 48, 4, 1, 1, 2), "64 x 32": Tile(64, 32, 4, 1, 1, 2)}
    eight = {"128 x 48, 8 warps, two stages": Tile(128, 48, 8, 1, 2, 1)}
    return few | eight | {"128 x 48, two stages": Tile(128, 48, 4, 1, 2, 2), "128 x 48": Tile(128, 48, 4, 1, 1, 2)}


def planned(batch: Batch, tile: Tile | None) -> Callable[[], torch.Tensor]:
    case, kernel = batch.case, attention_sm80.KERNEL
    if tile is not None:
        kernel = dataclasses.replace(kernel, tile=lambda _: tile)
    wrapper = flashpage.BatchPrefillWithPagedKVCacheWrapper(torch.empty(512 << 20, dtype=torch.uint8, device="cuda"))
    heads = (case.num_q_heads, case.num_kv_heads, case.head_dim, case.page_size)
    indices = (batch.q_indptr, batch.table.indptr, batch.table.indices, batch.table.last_page_len)
    with mock.patch.object(choose, "ATTENTION", [kernel]):
        wrapper.plan(*indices, *heads, causal=case.causal, q_data_type=batch.q.dtype)
    out = torch.empty_like(batch.q)
    sinks = {} if batch.sinks is None else {"sinks": batch.sinks}
    return lambda: wrapper.run(batch.q, batch.cache, out=out, **sinks)


def measure(case: Case, card: devices.Device, clock: GpuClock, rounds: int) -> None:
    torch.manual_seed(0)
    batch, runs = Batch(case, torch.device("cuda:0")), {}
    for name, tile in tiles_of(case, card).items():
        runs[name] = planned(batch, tile)
        if not (error := batch.error(runs[name]())) < 1e-2:
            raise SystemExit(f"{case.name}, {name}: a relative error of {error}")
    times = in_turns({name: clock.capture(run) for name, run in runs.items()}, rounds, clock)
    for name, time in times.items():
        print(f"| {case.name} | {name} | {time} |", flush=True)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--card", default="RTX 4090", help="a row of the table of cards")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=15, help="replays in each round, of which the median counts")
    arguments = parser.parse_args()
    here, card = devices.of(torch.device("cuda:0")), devices.named(arguments.card)
    # Prices of the card here: by those of a slower one, units would be cut and shared out as they would take there.
    card = dataclasses.replace(card, sms=here.sms, l2_bytes=here.l2_bytes, gbps=here.gbps, tflops=here.tflops)
    clock = GpuClock(arguments.repeats)
    print("| case | tile | us |\n| --- | --- | --- |")
    with mock.patch.object(devices, "of", lambda device: card if device.type == "cuda" else devices.CPU):
        for case in DECODES + PREFILLS:
            if arguments.only in case.name:
                measure(case, card, clock, arguments.rounds)


if __name__ == "__main__":
    main()
