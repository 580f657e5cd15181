"""All checks of a change that need a card, in one command: every test marked `cuda`, with one process for each file,
and the short case table under three tools of compute-sanitizer and with NVRTC's kernels. They run at the same time on
all cards of the machine.

    python tests/card/card_check.py --logs /tmp/card

Exits with 1 if anything fails, with 2 if there is no card.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))
from profiles import PROFILES  # noqa: E402

SANITIZERS = (("memcheck",), ("racecheck",), ("synccheck", "--num-cuda-barriers", "65536"))
SANITIZED_PROFILES = ("RTX 4090", "A100", "B200")  # 99 KiB and e4m3 products; sm_80 alone; decode_sm90 on Blackwell
SANITIZERS_AT_ONCE = 3  # on a card: each takes up to 18 GB of its memory
PARTS_OF_TABLE = 7  # processes of the case table, which takes five minutes in one
ALONE = ("test_card_errors",)  # measure milliseconds of a new process, next to no other one
NO_TESTS = 5  # pytest's status for a file without a marked test


@dataclasses.dataclass(frozen=True)
class Check:
    name: str
    command: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Outcome:
    check: Check
    status: int
    seconds: float
    last_line: str

    @property
    def has_passed(self) -> bool:
        return self.status in (0, NO_TESTS)


def as_card(name: str) -> tuple[str, ...]:
    """Begins a command that plans as on the card of this name."""
    return "env", f"FLASHPAGE_CARD={name}"


def builds(with_sanitized_profiles: bool) -> list[Check]:
    """Compiles kernels before the checks, on all cores: sanitizers slow compilers down, and parallel processes
    would wait for each other's kernels."""
    command = (sys.executable, "tests/support/harness.py", "--device", "cuda", "--only-prebuild")
    found = [Check("kernels", command)]
    for name in SANITIZED_PROFILES if with_sanitized_profiles else ():
        found.append(Check(f"kernels {name}", (*as_card(name), *command, "--reduced")))
    return found


def sanitizers(card: str = "") -> list[Check]:
    """The short case table under each tool, with the card's own tiles or those of another card."""
    tools = (*(as_card(card) if card else ()), "compute-sanitizer", "--error-exitcode", "1", "--tool")
    table = (sys.executable, "tests/support/harness.py", "--device", "cuda", "--reduced")
    return [Check(f"{tool[0]} {card}".strip(), (*tools, *tool, *table)) for tool in SANITIZERS]


def by_nvrtc() -> Check:
    """The short case table with kernels that NVRTC compiled, in a cache of their own."""
    cache = Path(tempfile.gettempdir(), "flashpage-kernels-of-nvrtc")
    command = (sys.executable, "tests/support/harness.py", "--device", "cuda", "--reduced")
    return Check("kernels of NVRTC", ("env", "FLASHPAGE_NVCC=off", f"FLASHPAGE_CACHE_DIR={cache}", *command))


def checks(with_sanitizers: bool, with_profiles: bool = False) -> list[Check]:
    """All checks but those of `sanitizers(card)`, the longest first. The case table under other cards' profiles has a
    process for each."""
    tools = [*sanitizers(), by_nvrtc()] if with_sanitizers else []
    own = {"test_card_profiles", "test_cases"}
    files = sorted((path for path in (ROOT / "tests").rglob("test_*.py") if path.stem not in own), key=lambda p: p.stem)
    pytest = (sys.executable, "-m", "pytest", "-q", "-m", "cuda")
    table = [
        Check(f"case table {i}", (*pytest, f"--part={i}/{PARTS_OF_TABLE}", "tests/kernels/test_cases.py"))
        for i in range(PARTS_OF_TABLE)
    ]
    profiles = [
        Check(f"profile {name}", (*pytest, f"tests/card/test_card_profiles.py::test_the_case_table[{name}]"))
        for name in PROFILES
        if with_profiles
    ]
    found = [Check(path.stem, (*pytest, str(path.relative_to(ROOT)))) for path in files]
    return tools + profiles + table + found


def run(check: Check, cards: Sequence[str], logs: Path, limit_seconds: float) -> Outcome:
    """Runs a check on the first of the cards; tests that need two cards take the next one, too."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(cards)}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    log, start = logs / f"{check.name}.log", time.perf_counter()
    with log.open("w") as out:
        try:
            status = subprocess.run(
                check.command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT, timeout=limit_seconds
            ).returncode
        except (OSError, subprocess.TimeoutExpired) as failure:
            print(failure, file=out)
            status = -1
    lines = log.read_text(errors="replace").strip().splitlines()
    return Outcome(check, status, time.perf_counter() - start, lines[-1] if lines else "")


def run_all(wanted: Sequence[Check], cards: Sequence[str], jobs: int, logs: Path, limit_seconds: float) -> int:
    """Runs the checks, prints a line for each that had tests, and the failed ones. Returns the exit status."""
    with ThreadPoolExecutor(jobs) as pool:
        firsts = [i % len(cards) for i in range(len(wanted))]
        started = [
            pool.submit(run, check, [*cards[first:], *cards[:first]], logs, limit_seconds)
            for check, first in zip(wanted, firsts, strict=True)
        ]
        outcomes = []
        for future in started:
            outcomes.append(outcome := future.result())
            if outcome.status != NO_TESTS:
                verdict = "ok" if outcome.has_passed else "FAIL"
                print(f"{verdict:5} {outcome.seconds:6.1f} s  {outcome.check.name}: {outcome.last_line}", flush=True)
    failed = [outcome.check.name for outcome in outcomes if not outcome.has_passed]
    print(f"failed: {', '.join(failed) or 'nothing'}; logs in {logs}")
    return int(bool(failed))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="processes at a time")
    parser.add_argument("--no-sanitizers", action="store_true")
    parser.add_argument(
        "--profiles", action="store_true", help="tables and sanitizers with the tiles of other cards, too"
    )
    parser.add_argument("--logs", type=Path, help="folder for the output of each process (default: a temporary one)")
    parser.add_argument("--limit", type=float, default=900.0, help="most seconds of a process")
    arguments = parser.parse_args()
    if arguments.jobs < 1:
        parser.error(f"--jobs {arguments.jobs}: pass 1 or more")
    if not arguments.limit > 0:
        parser.error(f"--limit {arguments.limit}: pass more than 0 seconds")
    if not torch.cuda.is_available():
        print("torch finds no GPU here", file=sys.stderr)
        return 2
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    cards = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    logs = arguments.logs or Path(tempfile.mkdtemp(prefix="flashpage-card-"))
    logs.mkdir(parents=True, exist_ok=True)
    kernels = builds(arguments.profiles and not arguments.no_sanitizers)
    if run_all(kernels, cards, 1, logs, arguments.limit):
        return 1
    wanted = checks(not arguments.no_sanitizers, arguments.profiles)
    alone = [check for check in wanted if check.name in ALONE]
    status = run_all([check for check in wanted if check not in alone], cards, arguments.jobs, logs, arguments.limit)
    if arguments.profiles and not arguments.no_sanitizers:
        of_profiles = [check for name in SANITIZED_PROFILES for check in sanitizers(name)]
        jobs = min(arguments.jobs, SANITIZERS_AT_ONCE * len(cards))
        status |= run_all(of_profiles, cards, jobs, logs, arguments.limit)
    return run_all(alone, cards, 1, logs, arguments.limit) | status


if __name__ == "__main__":
    sys.exit(main())
