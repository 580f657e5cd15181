"""Hardware counters of each kernel in one call of a library: bytes from L2 and DRAM, shared memory, tensor cores, and
why warps wait.

The program runs itself under ncu (Nsight Compute), which measures the kernels between cudaProfilerStart and
cudaProfilerStop in several passes. ncu empties the caches before each pass and leaves the clocks alone. Counters that
this ncu does not know for the card are left out. `--small --device cpu` prints only the host's time: it shows that the
program works.

    flashpage bench counters --case "128 heads, batch 64, context 4k" --library flashmla --json counters.jsonl
"""

from __future__ import annotations

import csv
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from command_line import Parser
from gpu import LIBRARIES, SECTIONS, HostClock, tensors
from peers import Call
from record import Recorder
from workloads import Case

Counts = dict[str, float]  # by metric, or by counter


class Kernel(NamedTuple):
    name: str
    counts: Counts


class Counter(NamedTuple):
    """A row of the table: the sum of metrics, divided so that it has the unit in its name."""

    name: str
    metrics: tuple[str, ...]
    divisor: float = 1.0


SECTOR_BYTES = 32
TIME = Counter("time us", ("gpu__time_duration.sum",), 1e3)
COUNTERS = (
    TIME,
    Counter("L2 reads MB", ("lts__t_sectors_op_read.sum",), 1e6 / SECTOR_BYTES),
    Counter("L2 writes MB", ("lts__t_sectors_op_write.sum",), 1e6 / SECTOR_BYTES),
    Counter("DRAM MB", ("dram__bytes_read.sum", "dram__bytes_write.sum"), 1e6),
    Counter("DRAM busy %", ("dram__throughput.avg.pct_of_peak_sustained_elapsed",)),
    Counter("shared-memory wavefronts, thousands", ("l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",), 1e3),
    Counter("bank conflicts, thousands", ("l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",), 1e3),
    Counter("bank reads, thousands", ("l1tex__data_bank_reads.sum",), 1e3),
    Counter("bank reads busy %", ("l1tex__data_bank_reads.avg.pct_of_peak_sustained_elapsed",)),
    Counter("bank writes, thousands", ("l1tex__data_bank_writes.sum",), 1e3),
    Counter("bank writes busy %", ("l1tex__data_bank_writes.avg.pct_of_peak_sustained_elapsed",)),
    Counter("tensor pipe busy %", ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",)),
    Counter("instructions, thousands", ("smsp__inst_executed.sum",), 1e3),
    Counter("issue slots %", ("smsp__issue_active.avg.pct_of_peak_sustained_elapsed",)),
)
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"  # warps that wait whenever one is issued
REASONS = (
    *("barrier", "branch_resolving", "dispatch_stall", "drain", "gmma", "imc_miss", "lg_throttle", "long_scoreboard"),
    *("math_pipe_throttle", "membar", "mio_throttle", "misc", "no_instruction", "short_scoreboard", "sleeping"),
    *("tex_throttle", "wait"),
)
TOP_REASONS = 5
METRICS = [*(metric for counter in COUNTERS for metric in counter.metrics), *map(STALL.format, REASONS)]
LIMIT_SECONDS = 600


def read_csv(text: str) -> list[Kernel]:
    """The kernels and their metrics, from what `ncu --csv --page raw --print-units base` prints between other lines."""
    rows = csv.DictReader(line for line in text.splitlines() if line.startswith('"'))
    next(rows, None)  # units
    found = []
    for row in rows:
        numbers = {name: _number(value) for name, value in row.items() if "__" in (name or "")}
        counts = {name: number for name, number in numbers.items() if number is not None}
        found.append(Kernel(_short(row["Kernel Name"]), counts))
    return found


def _number(text: str | None) -> float | None:
    try:
        number = float((text or "").replace(",", ""))
    except ValueError:  # n/a, and metrics of text
        return None
    return number if math.isfinite(number) else None


def _short(signature: str) -> str:
    """A kernel's name without its return type, template arguments and parameters."""
    named = re.sub(r"(<unnamed>|\(anonymous namespace\))::", "", signature)
    return re.split("[<(]", named)[0].split()[-1]


def counters_of(metrics: Counts) -> Counts:
    """The counters whose metrics are all known."""
    return {
        counter.name: float(f"{sum(metrics[name] for name in counter.metrics) / counter.divisor:.4g}")
        for counter in COUNTERS
        if metrics.keys() >= set(counter.metrics)
    }


def stalls_of(metrics: Counts) -> Counts:
    """The reasons for which most warps wait: how many do on average, most first."""
    found = {reason: metrics.get(STALL.format(reason), 0.0) for reason in REASONS}
    top = sorted(found, key=lambda reason: -found[reason])[:TOP_REASONS]
    return {reason: round(found[reason], 2) for reason in top if found[reason] >= 0.005}


def find_ncu() -> str | None:
    places = [*Path("/opt/nvidia/nsight-compute").glob("*/ncu"), Path("/usr/local/cuda/bin/ncu")]
    return shutil.which("ncu") or next((str(place) for place in places if place.exists()), None)


def known_metrics(ncu: str) -> list[str]:
    """METRICS that this ncu can collect on this machine's cards, as any other would end its run. All, if it lists
    none."""
    listed = subprocess.run([ncu, "--query-metrics"], capture_output=True, text=True).stdout
    names = {line.split()[0] for line in listed.splitlines() if line.strip()}
    return [metric for metric in METRICS if metric.partition(".")[0] in names] or METRICS


def profiled(ncu: str) -> list[Kernel]:
    """Runs this program with its arguments under ncu. Ends with ncu's last lines if it measured no kernel."""
    options = ["--profile-from-start", "off", "--clock-control", "none", "--csv", "--page", "raw"]
    options += ["--print-units", "base", "--metrics", ",".join(known_metrics(ncu))]
    command = [ncu, *options, sys.executable, __file__, *sys.argv[1:], "--under-ncu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    kernels = read_csv(done.stdout)
    if done.returncode or not kernels:
        words = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise SystemExit("\n".join(["ncu has measured no kernel:", *words[-8:]]))
    return kernels


def call_once(call: Call) -> None:
    """A call of which ncu measures the kernels; what a library prepares in its first calls is left out."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def make_call(case: Case, library: str, device: torch.device) -> Call:
    torch.manual_seed(0)
    batch, peers = tensors(case, device)
    call = peers[library][1](batch) if library in peers else None
    if call is None:
        raise SystemExit(f"{library} does not compute {case.name!r}")
    return call


def show(case: Case, library: str, kernels: Sequence[Kernel]) -> None:
    """A column for each kernel, in the order of their launches."""
    columns = [counters_of(kernel.counts) for kernel in kernels]
    print(f"\n| {case.name}, {library} | {' | '.join(kernel.name for kernel in kernels)} |")
    print("| --- " * (len(kernels) + 1) + "|")
    for counter in COUNTERS:
        if any(counter.name in column for column in columns):
            cells = (f"{column[counter.name]:,}" if counter.name in column else "" for column in columns)
            print(f"| {counter.name} | {' | '.join(cells)} |")
    stalls = [stalls_of(kernel.counts) for kernel in kernels]
    if any(stalls):
        cells = (", ".join(f"{reason} {warps}" for reason, warps in found.items()) for found in stalls)
        print(f"| warps that wait, by reason | {' | '.join(cells)} |")


def find_case(name: str, sections: Iterable[str]) -> tuple[str, Case] | None:
    """The case of this name, and its section."""
    found = ((section, case) for section in sections for case in SECTIONS[section] if case.name == name)
    return next(found, None)


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--case", default="batch 64, context 4k", help="a case's whole name (default: %(default)s)")
    parser.add_argument("--library", default="flashpage", choices=list(LIBRARIES), help="default: %(default)s")
    parser.add_argument("--section", choices=list(SECTIONS), help="of the case (default: the first that has it)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny shapes")
    parser.add_argument("--json", help="append one line to this file (docs/figures.py reads it)")
    parser.add_argument("--under-ncu", action="store_true", help="make the calls, as this program does under ncu")
    arguments = parser.parse_args()
    sections = [arguments.section] if arguments.section else list(SECTIONS)
    if (found := find_case(arguments.case, sections)) is None:
        names = ", ".join(repr(case.name) for case in SECTIONS[arguments.section or "decode"])
        parser.error(f"no case {arguments.case!r}: {arguments.section or 'decode'} has {names}")
    section, case = found
    case = case.shrunk() if arguments.small else case
    device, library = torch.device(arguments.device), arguments.library
    if arguments.under_ncu:
        call_once(make_call(case, library, device))
        return 0
    if device.type == "cuda":
        ncu = find_ncu()
        if ncu is None:
            print("skipped: ncu (Nsight Compute) is not installed")
            return 0
        kernels = profiled(ncu)
    else:
        seconds = HostClock(repeats=3).seconds(make_call(case, library, device))
        kernels = [Kernel("host", {TIME.metrics[0]: seconds * 1e9})]
    show(case, library, kernels)
    rows = [
        {"kernel": kernel.name, "counts": counters_of(kernel.counts), "stalls": stalls_of(kernel.counts)}
        for kernel in kernels
    ]
    name = f"{case.name}, {library}"  # docs/figures.py keeps one line of a name
    Recorder(arguments.json).add("counters", name, of=section, library=library, kernels=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
