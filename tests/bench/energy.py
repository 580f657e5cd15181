"""Energy and time of long prompts: a second of repetitions of each library in turns, between two readings of the
board's energy counter. At its power limit a card lowers its clock, so that fewer joules a call become fewer
microseconds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import torch
from board import Board
from peers import PEERS, Batch, Call
from record import Recorder
from workloads import Case

_LONG = {"batch": 1, "page_size": 0}
CASES = (
    Case("ragged 1 x 16k", q_len=16384, kv_len=16384, **_LONG),
    Case("ragged 1 x 16k, not causal", q_len=16384, kv_len=16384, causal=False, **_LONG),
    Case("ragged 1 x 32k", q_len=32768, kv_len=32768, **_LONG),
    Case("ragged 1 x 32k, not causal", q_len=32768, kv_len=32768, causal=False, **_LONG),
)


def spend(call: Call, seconds: float, board: Board) -> dict[str, float]:
    """Microseconds, joules and watts of a call that is repeated for so many seconds, and the clock halfway."""
    call()
    torch.cuda.synchronize()
    begin, joules = time.perf_counter(), board.joules()
    calls, mhz = 0, 0.0
    while (spent := time.perf_counter() - begin) < seconds:
        for _ in range(8):
            call()
        torch.cuda.synchronize()
        calls += 8
        mhz = mhz or (board.reading().sm_mhz if spent > seconds / 2 else 0)
    joules = board.joules() - joules
    return {"us": spent / calls * 1e6, "joules": joules / calls, "watts": joules / spent, "sm_mhz": mhz}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--libraries", default="flashpage,fa3")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--seconds", type=float, default=1.0, help="of repetitions of each library in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--card", default="", help="words for the card, where there are several of its kind")
    parser.add_argument("--json", help="append one line for each case to this file")
    arguments = parser.parse_args()
    board, recorder = Board(), Recorder(arguments.json)
    print("| case | library | us | joules | watts | MHz |\n| --- | --- | --- | --- | --- | --- |")
    for case in CASES:
        if arguments.only not in case.name:
            continue
        batch = Batch(case, torch.device("cuda"))
        calls = {label: PEERS[label][1](batch) for label in arguments.libraries.split(",")}
        rounds: dict[str, list[dict[str, float]]] = {label: [] for label in calls}
        for i in range(arguments.rounds):
            for label in list(calls)[:: -1 if i % 2 else 1]:
                rounds[label].append(spend(calls[label], arguments.seconds, board))
        medians = {
            label: {key: statistics.median(row[key] for row in found) for key in found[0]}
            for label, found in rounds.items()
        }
        for label, median in medians.items():
            print(
                f"| {case.name} | {label} | {median['us']:,.1f} | {median['joules']:.3f} | {median['watts']:.0f} "
                f"| {median['sm_mhz']:.0f} |",
                flush=True,
            )
        columns = ("us", "joules", "watts", "sm_mhz")
        name = f"{case.name}, {arguments.card}" if arguments.card else case.name
        recorder.add("energy", name, **{key: {label: row[key] for label, row in medians.items()} for key in columns})
    return 0


if __name__ == "__main__":
    sys.exit(main())
