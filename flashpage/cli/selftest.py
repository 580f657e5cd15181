"""Check the kernels of common models on this machine against a reference, and their speed against its own read and
matmul rates. Exit code 0: right; 1: a wrong result, a failure, or nothing could be checked; 3: right, but slow."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from . import collect_env, info

if TYPE_CHECKING:
    from ..selftest.main import Report, Result

VERDICTS = {
    "right": (0, "all kernels are right, and none is slow next to this machine's own rates"),
    "partial": (0, "what was run is right; some cases were not run, or not timed"),
    "unchecked": (1, "nothing could be checked"),
    "slow": (3, "all kernels are right, but some are slow next to this machine's own rates; is it idle?"),
    "wrong": (1, "some kernels failed or are wrong: please file a bug with the file of --json"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="two models only: about 20 s if their kernels are built")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results, for a bug report")
    parser.add_argument(
        "--device",
        choices=["auto", "cpu", "cuda"],
        default="auto",
        help="auto (default): the current GPU if there is one",
    )


def run(arguments: argparse.Namespace) -> int:
    from ..selftest.main import choose_device, run_selftest

    device = choose_device(arguments.device)
    if arguments.json:
        # A file that cannot be written is reported before the work, and an interrupted run leaves no earlier report.
        arguments.json.write_text('{"verdict": "unfinished"}\n')
    report = run_selftest(device, arguments.quick)
    _print(report)
    code, verdict = VERDICTS[report.verdict]
    print(f"{report.device}, {report.seconds:.1f} s: {verdict}")
    if arguments.json:
        machine = [*info.versions(), *info.devices(), *info.compilers()]
        written = report.as_json() | {"machine": [collect_env.without_home(": ".join(row)) for row in machine]}
        arguments.json.write_text(json.dumps(written, indent=1) + "\n")
        print(f"written to {arguments.json}")
    return code


def _print(report: Report) -> None:
    read, multiplied = report.read_gbps, report.matmul_tflops
    number = "bf16 or fp32, the faster one," if report.device == "cpu" else "bf16"  # rates.matmul_tflops
    rates = f"torch reads {read or 0:.1f} GB/s and multiplies {number} at {multiplied or 0:.3g} TFLOP/s here"
    if read is None or multiplied is None:
        rates = "torch's own rates could not be measured here"
    width = max(len(result.name) for result in report.results)
    for result in report.results:
        print(f"{result.name:<{width}}  {_outcome(result)}")
    print(rates)


def _outcome(result: Result) -> str:
    if result.failure:
        return f"FAILED: {result.failure}"
    if result.skipped:
        return f"not run: {result.skipped}"
    if result.rate is not None and result.share is not None:
        slow = "  SLOW" if result.is_slow else ""
        of_what = "read" if result.unit == "GB/s" else "matmul"
        return f"{result.rate:8.3g} {result.unit}, {100 * result.share:.0f}% of the {of_what} rate{slow}"
    verdict = "right" if result.is_right else "WRONG"
    error = f"error {result.error:.1e} (at most {result.most_error:.0e})"
    if result.has_wrong_head:
        error += f", of one row and head {result.head_error:.1e}"
    return f"{verdict}: {error}, LSE {result.lse_error:.1e} (at most 2e-02)"
