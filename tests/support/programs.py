"""Python programs in processes of their own, without the time that importing torch takes: a server forks them.

`run` does what subprocess.run([sys.executable, *arguments], capture_output=True, text=True) does. A program finds torch
imported, and nothing of flashpage; -c, -m and a file are all that it can start with.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

READ_AT_START = ("LD_PRELOAD", "LD_LIBRARY_PATH")  # environment variables of which each value needs a server


class Done(subprocess.CompletedProcess[str]):
    """A program that has ended."""

    cpu_seconds: float  # user time, with that of the processes that it has waited for


def run(
    arguments: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout: float | None = None,
) -> Done:
    environment = dict(os.environ if env is None else env)
    server = _server(*(environment.get(name) for name in READ_AT_START))
    with tempfile.TemporaryDirectory(prefix="program-") as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        request = {"arguments": [str(a) for a in arguments], "environment": environment}
        request |= {"cwd": str(cwd or Path.cwd()), "out": str(out), "err": str(err)}
        reply = _answer(server, request, timeout)
        done = Done([sys.executable, *request["arguments"]], reply["status"], out.read_text(), err.read_text())
    done.cpu_seconds = reply["cpu_seconds"]
    return done


@functools.cache
def _server(*values: str | None) -> subprocess.Popen[str]:
    """This file, started with these values of READ_AT_START. It ends when its input does."""
    environment = {name: value for name, value in os.environ.items() if name not in (*READ_AT_START, "PYTHONPATH")}
    environment |= {name: value for name, value in zip(READ_AT_START, values, strict=True) if value is not None}
    server = subprocess.Popen(
        [sys.executable, __file__],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    atexit.register(_end, server)
    return server


def _end(server: subprocess.Popen[str]) -> None:
    """With the program that it waits for."""
    _server.cache_clear()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


def _answer(server: subprocess.Popen[str], request: dict[str, Any], timeout: float | None) -> dict[str, Any]:
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    if timeout is not None and not select.select([server.stdout], [], [], timeout)[0]:
        _end(server)
        raise subprocess.TimeoutExpired(request["arguments"], timeout)
    line = server.stdout.readline()
    if not line:
        _end(server)
        raise RuntimeError(f"the server ended with status {server.returncode}")
    return json.loads(line)


def serve() -> dict[str, Any] | None:
    """In the server: None at the end. In a process that it has forked: the request."""
    import gc

    import torch  # noqa: F401

    gc.freeze()  # a collection in a program would copy all pages
    for line in iter(sys.stdin.readline, ""):
        request = json.loads(line)
        if (pid := os.fork()) == 0:
            return request
        _, status, usage = os.wait4(pid, 0)
        reply = {"status": os.waitstatus_to_exitcode(status), "cpu_seconds": usage.ru_utime}
        print(json.dumps(reply), flush=True)
    return None


def become(request: dict[str, Any]) -> None:
    """Makes this process what `python ARGUMENTS` is, and runs the program."""
    import runpy
    import types

    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    for number, path in enumerate((os.devnull, request["out"], request["err"])):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), number)
    first, *rest = request["arguments"]
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:1] = [str(Path(first).parent) if first not in ("-c", "-m") else "", *filter(None, paths)]
    if first == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    sys.argv = ["-c", *rest[1:]] if first == "-c" else [first, *rest]
    code = rest[0] if first == "-c" else Path(first).read_text()
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if first != "-c":
        main.__file__ = first
    exec(compile(code, "<string>" if first == "-c" else first, "exec"), vars(main))


if __name__ == "__main__":
    request = serve()
    if request is not None:
        become(request)
