"""Energy and time of long prompts, by the board's energy counter. At its power limit a card lowers its clock, so that
fewer joules a call become fewer microseconds.

Each library is called for some seconds in a round, several calls ahead of the card. A round counts the joules and the
seconds from one step of the counter to another, as between two steps it tells the same. `--small --device cpu` runs
tiny shapes and pretends that a call takes one watt: it only shows that the program works.
"""

from __future__ import annotations

import collections
import statistics
import sys
import time
from collections.abc import Callable

import torch
from board import Board, Reading
from command_line import Parser
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
LEAST_SECONDS = 3.0  # of a round on a card: at most 3% of it is one step of the counter
AHEAD = 4  # calls that the card has before it
PAUSE = 2e-4  # seconds between looks at the counter
MOST_WAIT = 5.0  # seconds without a step of the counter


class Pretended:
    """A board of one watt, whose counter moves every 20 ms."""

    def joules(self) -> float:
        return int(time.perf_counter() * 50) / 50

    def reading(self) -> Reading:
        return Reading(1000.0, 1.0, 40.0)


class Steps:
    """Steps of the energy counter since the first one that was seen."""

    def __init__(self, board: Board | Pretended) -> None:
        self.board, self.last, self.looked = board, board.joules(), time.perf_counter()
        self.begin: tuple[float, float] | None = None  # time and joules of the first step
        self.seconds = self.joules = 0.0  # from the first step to the last one
        self.mhz: list[float] = []  # at each step

    def look(self) -> bool:
        """Whether the counter has moved."""
        joules, now = self.board.joules(), time.perf_counter()
        if joules == self.last:
            if now - self.looked > MOST_WAIT:
                raise RuntimeError(f"the energy counter has not moved for {MOST_WAIT:g} s")
            return False
        self.last, self.looked = joules, now
        self.begin = self.begin or (now, joules)
        self.seconds, self.joules = now - self.begin[0], joules - self.begin[1]
        self.mhz.append(self.board.reading().sm_mhz)
        return True


def spend(
    call: Call, seconds: float, board: Board | Pretended, mark: Callable[[], Callable[[], bool]]
) -> dict[str, float]:
    """Microseconds, joules and mean watts of a call that is repeated for at least so many seconds between two steps of
    the counter, and the mean clock. `mark()` returns whether the calls before it are done, when it is asked."""
    call()
    steps, calls, waiting = Steps(board), 0, collections.deque([mark()])
    while not waiting[-1]():
        time.sleep(PAUSE)
    begin = time.perf_counter()
    is_over = False
    while not is_over:
        while len(waiting) <= AHEAD:  # a look at the counter may take longer than a call
            call()
            calls += 1
            waiting.append(mark())
        is_over = steps.look() and steps.seconds >= seconds
        while not waiting[0]() and not is_over:
            time.sleep(PAUSE)
            is_over = steps.look() and steps.seconds >= seconds
        while waiting and waiting[0]():
            waiting.popleft()
    while waiting and not waiting[-1]():
        time.sleep(PAUSE)
    us = (time.perf_counter() - begin) / calls * 1e6
    watts = steps.joules / steps.seconds
    return {"us": us, "joules": watts * us * 1e-6, "watts": watts, "sm_mhz": statistics.fmean(steps.mhz)}


def mark_on_card() -> Callable[[], bool]:
    event = torch.cuda.Event()
    event.record()
    return event.query


def mark_on_host() -> Callable[[], bool]:
    return lambda: True


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--libraries", default="flashpage,fa3")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--seconds", type=float, default=LEAST_SECONDS, help=f"of each library in a round, at least {LEAST_SECONDS:g}"
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds, each in the other order of libraries")
    parser.add_argument("--card", default="", help="words for the card, where there are several of its kind")
    parser.add_argument("--small", action="store_true", help="tiny shapes")
    parser.add_argument("--json", help="append one line for each case to this file")
    arguments = parser.parse_args()
    is_card = torch.device(arguments.device).type == "cuda"
    if is_card and arguments.seconds < LEAST_SECONDS:
        parser.error(f"--seconds {arguments.seconds:g}: a round needs at least {LEAST_SECONDS:g}")
    board, mark = (Board(), mark_on_card) if is_card else (Pretended(), mark_on_host)
    recorder = Recorder(arguments.json)
    print("| case | library | us | joules | watts | MHz |\n| --- | --- | --- | --- | --- | --- |")
    for case in CASES:
        if arguments.only not in case.name:
            continue
        batch = Batch(case.shrunk() if arguments.small else case, torch.device(arguments.device))
        calls = {label: PEERS[label][1](batch) for label in arguments.libraries.split(",")}
        rounds: dict[str, list[dict[str, float]]] = {label: [] for label in calls}
        for i in range(arguments.rounds):
            for label in list(calls)[:: -1 if i % 2 else 1]:
                rounds[label].append(spend(calls[label], arguments.seconds, board, mark))
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
        figures = {key: {label: row[key] for label, row in medians.items()} for key in columns}
        recorder.add("energy", name, **figures, seconds=arguments.seconds, rounds=arguments.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
