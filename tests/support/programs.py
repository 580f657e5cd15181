"""Python programs in processes of their own, without the time that importing torch takes: a server forks them.

`start` and `run` do what Popen([sys.executable, *arguments]) and subprocess.run do, and keep output as text. A program
finds torch imported, and nothing of flashpage; -c, -m and a file are all that it can start with. With `imported`, a
module of an engine, it finds that imported too, by a server with the variables of the first program that names it.
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


class Program:
    """A process that runs, or has ended: then there are a return code, output, and seconds of user time."""

    returncode: int
    stdout: str
    stderr: str
    cpu_seconds: float  # with those of the processes that it has waited for

    def __init__(self, server: _Server, arguments: list[str], environment: dict[str, str], cwd: Path) -> None:
        self._server, self.args = server, arguments
        self._folder = tempfile.TemporaryDirectory(prefix="program-")
        self._files = [Path(self._folder.name, name) for name in ("out", "err")]
        request = {"arguments": arguments, "environment": environment, "cwd": str(cwd)}
        self.pid: int = server.ask(request | {"files": [str(file) for file in self._files]})["pid"]

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Waits for the end. After a timeout the server is ended, with all that it has started."""
        reply = self._server.ask({"wait": self.pid}, timeout)
        self.returncode, self.cpu_seconds = reply["returncode"], reply["cpu_seconds"]
        self.stdout, self.stderr = (file.read_text() for file in self._files)
        self._folder.cleanup()
        return self.stdout, self.stderr

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


def start(
    arguments: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    imported: str = "",
) -> Program:
    environment = dict(os.environ if env is None else env)
    values = tuple(environment.get(name) for name in READ_AT_START)
    key = imported, environment.get("PYTHONPATH", "")
    server = _engine_servers.get(key) if imported else _server(*values)
    if server is None:
        server = _engine_servers[key] = _Server(environment, imported)
        atexit.register(server.end)
    return Program(server, [str(argument) for argument in arguments], environment, cwd or Path.cwd())


def run(
    arguments: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout: float | None = None,
    imported: str = "",
) -> Program:
    """A program that has ended."""
    program = start(arguments, env=env, cwd=cwd, imported=imported)
    program.communicate(timeout)
    return program


class _Server:
    """This file as a program. It ends when its input does."""

    def __init__(self, environment: dict[str, str], *imported: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, *imported],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def ask(self, request: dict[str, Any], timeout: float | None = None) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], timeout)[0]:
            self.end()
            raise TimeoutError(f"no end after {timeout} s")
        line = self._process.stdout.readline()
        if not line:
            self.end()
            raise RuntimeError(f"the server of programs ended with status {self._process.returncode}")
        return json.loads(line)

    def end(self) -> None:
        _server.cache_clear()
        _engine_servers.clear()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


_engine_servers: dict[tuple[str, str], _Server] = {}  # by module and PYTHONPATH


@functools.cache
def _server(*values: str | None) -> _Server:
    """With these values of READ_AT_START."""
    environment = {name: value for name, value in os.environ.items() if name not in (*READ_AT_START, "PYTHONPATH")}
    environment |= {name: value for name, value in zip(READ_AT_START, values, strict=True) if value is not None}
    server = _Server(environment)
    atexit.register(server.end)
    return server


def serve() -> dict[str, Any] | None:
    """In the server: None at the end. In a process that it has forked: the request."""
    import gc
    import importlib

    import torch  # noqa: F401

    for module in sys.argv[1:]:
        importlib.import_module(module)
    gc.freeze()  # a collection in a program would copy all pages
    if sys.argv[1:]:  # engines freeze and unfreeze by themselves, so that their collections take most of their start
        gc.freeze = gc.unfreeze = lambda: None
    for line in iter(sys.stdin.readline, ""):
        request = json.loads(line)
        if "wait" in request:
            _, status, usage = os.wait4(request["wait"], 0)
            reply = {"returncode": os.waitstatus_to_exitcode(status), "cpu_seconds": usage.ru_utime}
        elif (pid := os.fork()) == 0:
            return request
        else:
            reply = {"pid": pid}
        print(json.dumps(reply), flush=True)
    return None


def become(request: dict[str, Any]) -> None:
    """Makes this process what `python ARGUMENTS` is, and runs the program."""
    import runpy
    import types

    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    for number, path in enumerate((os.devnull, *request["files"])):
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
