"""The console command `flashpage`: one module a subcommand, each with `add_arguments(parser)` and `run(arguments)`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from types import ModuleType
from typing import NoReturn

from ..base.errors import FlashpageError, PlanError, SettingError
from ..base.version import VERSION
from . import settings
from .values import ArgumentError

_COMMANDS = {
    "info": "show devices, compilers, torch, environment variables and compiled kernels",
    "demo": "decode a batch with a small model and check its tokens against torch",
    "selftest": "check the kernels of common models on this machine, and their speed",
    "plan": "plan a batch of lengths; show a picture and an explanation",
    "trace": "run a batch and show when each CTA started, loaded, computed and merged",
    "replay": "run a call again that FLASHPAGE_DUMP has kept, and say where backends part",
    "bench": "run the benchmarks that this machine can run (in a checkout)",
    "build": "compile kernels ahead of time: a manifest, one spec, or the AOT list",
    "cache": "list or remove compiled kernels, or print their folder",
    "collect-env": "print what a bug report needs to say about this machine",
}


class _Parser(argparse.ArgumentParser):
    """Reports a wrong argument in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see `{self.prog} --help`)\n")


_SHOWS_SETTINGS = ("info", "collect-env")  # with refused values in place


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; returns the exit code: 0, 1 failed, 2 wrong argument or environment variable, 3 slow
    (selftest), 130 interrupted."""
    program = "flashpage"
    try:
        found = _parsed(arguments)
        if found is None:
            return 0
        module, parsed = found
        program += f" {parsed.command}"
        if parsed.command not in _SHOWS_SETTINGS:
            settings.check()
        code: int = module.run(parsed)
        return code
    except FlashpageError as error:
        for line in str(error).splitlines() if isinstance(error, SettingError) else [error]:
            print(f"{program}: {line}", file=sys.stderr)
        return 2 if isinstance(error, PlanError | ArgumentError | SettingError) else 1
    except BrokenPipeError:  # `flashpage ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:  # a file that cannot be written, a full disk
        message = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else error
        print(f"{program}: {message}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, RuntimeError) as error:
        # Python 3.11 and older put RuntimeError around what __set_name__ raises, which torch's import has.
        if not isinstance(error, KeyboardInterrupt) and not isinstance(error.__cause__, KeyboardInterrupt):
            raise
        print(f"{program}: interrupted", file=sys.stderr)
        return 130


def _parsed(arguments: list[str] | None) -> tuple[ModuleType, argparse.Namespace] | None:
    """The module of the command with its arguments; None: help was printed."""
    parser = _Parser(prog="flashpage", description="Attention for LLM servers: plan once a step, run once a layer.")
    parser.add_argument("--version", action="version", version=f"flashpage {VERSION}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    modules = {}
    for name, summary in _COMMANDS.items():
        modules[name] = importlib.import_module(f".{name.replace('-', '_')}", __name__)
        modules[name].add_arguments(commands.add_parser(name, help=summary, description=modules[name].__doc__))
    parsed, unknown = parser.parse_known_args(arguments)
    if parsed.command is None and not unknown:
        parser.print_help()
        return None
    if parsed.command is None:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if unknown:
        commands.choices[parsed.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    return modules[parsed.command], parsed
