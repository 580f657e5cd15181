"""Compiles below a tool that loads a library into all child processes, and locks that outlive their owner."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from jit_sandbox import Sandbox, toy

from flashpage import jit
from flashpage.jit import build, cache, files, process

# As compute-sanitizer and nsys do: it meets its tool by a file in TMPDIR, and leaves a process with the pipes.
TOOL = """
#include <cstdlib>
#include <string>
#include <unistd.h>
__attribute__((constructor)) static void begin() {
  const char* folder = getenv("TMPDIR");
  const std::string tool = std::string(folder ? folder : "/tmp") + "/tool";
  for (int i = 0; i < 600 && access(tool.c_str(), F_OK) != 0; ++i) usleep(100000);
  if (fork() == 0) {
    for (int i = 0; i < 600 && access(tool.c_str(), F_OK) == 0; ++i) usleep(100000);
    _exit(0);
  }
}
"""


@pytest.fixture
def sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    sandbox = Sandbox.create(tmp_path)
    sandbox.enter(monkeypatch)
    return sandbox


@pytest.mark.parametrize("num_kernels", [1, 2])
def test_a_tool_in_every_process(sandbox: Sandbox, num_kernels: int) -> None:
    """Compiles end although the tool's library waits for its file in TMPDIR and keeps the pipes open."""
    source, library, tool = (sandbox.folder / name for name in ("tool.cpp", "tool.so", "tool"))
    source.write_text(TOOL)
    subprocess.run(["g++", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    tool.touch()
    code = (
        "from jit_sandbox import Sandbox, toy; from pathlib import Path\n"
        f"Sandbox(Path({str(sandbox.folder)!r})).redirect()\n"
        "from flashpage import jit\n"
        f"r = jit.build_specs(map(toy, range({num_kernels})), [jit.host_target()])\n"
        "assert all(x.entry for x in r), r"
    )
    own = {"LD_PRELOAD": str(library), "TMPDIR": str(sandbox.folder)}
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | sandbox.environment | own,
        start_new_session=True,
    )
    try:
        assert child.wait(timeout=40) == 0
    finally:
        tool.unlink()  # the library's processes end
        child.kill()
        child.wait()
    assert len(cache.entries()) == num_kernels


def test_variables_of_images_are_no_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LD_PRELOAD", "LD_AUDIT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NV_CUDA_LIB_VERSION", "13.0")
    assert not process.is_watched()
    monkeypatch.setenv("CUDA_INJECTION64_PATH", "/tool.so")
    assert process.is_watched()


def test_a_forked_child_keeps_no_lock(tmp_path: Path) -> None:
    """A child that is forked while its parent compiles holds the lock's file open, and may live on."""
    with files.locked(tmp_path, "key"):
        if (child := os.fork()) == 0:
            time.sleep(60)
            os._exit(0)
    try:
        with files.locked(tmp_path, "key", is_blocking=False):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_forked_child_keeps_no_lock_of_a_killed_process(tmp_path: Path) -> None:
    """Neither the lock of a key nor that of a scratch folder, which the next compile sweeps."""
    code = """
import os, sys, time
from pathlib import Path
from flashpage.jit import files
with files.locked(Path(sys.argv[1]), "key"), files.scratch(Path(sys.argv[1]), "work-") as folder:
    if not (child := os.fork()):
        time.sleep(60)
        os._exit(0)
    print(child, folder, flush=True)
    time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child, folder = parent.stdout.readline().split()
        files.sweep(tmp_path, "work-")
        assert os.path.isdir(folder)
        parent.kill()
        parent.wait()
        try:
            with files.locked(tmp_path, "key", is_blocking=False):
                pass
            files.sweep(tmp_path, "work-")
            assert not os.path.exists(folder)
        finally:
            os.kill(int(child), signal.SIGKILL)


def test_a_child_that_leaves_the_lock_closes_no_other_file(tmp_path: Path) -> None:
    """Its copy of the lock's descriptor is closed already, and the number may be in use again."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(files.locked(tmp_path, "key"))
        (descriptor,) = files._locks
        if (child := os.fork()) == 0:
            status = 1
            with contextlib.suppress(OSError):
                other = os.dup2(os.open(tmp_path, os.O_RDONLY), descriptor)
                stack.close()
                os.fstat(other)
                status = 0
            os._exit(status)
        assert os.waitpid(child, 0)[1] == 0


def test_who_is_waited_for(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A process that waits says after a while which process compiles."""
    monkeypatch.setattr(build, "_REPORT_SECONDS", 0.2)
    first = sandbox.start("get(toy(1))", COMPILE_SECONDS="3")
    while not sandbox.num_compiles():
        time.sleep(0.02)
    jit.get_kernel(toy(1))
    first.communicate(timeout=30)
    err = capfd.readouterr().err
    assert f"s, for process {first.pid}, which compiles {toy(1).name}" in err
    assert sandbox.num_compiles() == 1


# A compiler that waits until three have started, and fails if they do not.
SOCIAL = """#!/bin/sh
[ "$1" = --version ] && exec g++ --version
echo $$ >> "$COMPILES"
for i in $(seq 200); do [ $(wc -l < "$COMPILES") -ge 3 ] && exec g++ "$@"; sleep 0.1; done
exit 1
"""
HANGS = """#!/bin/sh
[ "$1" = --version ] && exec g++ --version
echo $$ >> "$COMPILES"
exec sleep 60
"""


@pytest.fixture
def below_a_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "is_watched", lambda: True)


@pytest.mark.usefixtures("below_a_tool")
def test_compiles_run_side_by_side_without_ninja(sandbox: Sandbox) -> None:
    sandbox.compiler.write_text(SOCIAL)
    results = jit.build_specs(map(toy, range(5)), [jit.host_target()], jobs=3)
    assert all(result.entry for result in results), results[0].error


@pytest.mark.usefixtures("below_a_tool")
def test_an_interrupt_ends_all_compilers_that_run_side_by_side(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox.compiler.write_text(HANGS)

    def interrupted(*_: object) -> None:
        while sandbox.num_compiles() < 3:
            time.sleep(0.02)
        raise KeyboardInterrupt

    monkeypatch.setattr(build._Build, "_wait_for", interrupted)
    with pytest.raises(KeyboardInterrupt):
        jit.build_specs(map(toy, range(5)), [jit.host_target()], jobs=3)
    for pid in sandbox.compiles.read_text().split():
        assert not os.path.exists(f"/proc/{pid}"), "it runs on"


def test_a_process_that_cannot_be_started(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of processes is reached: an error of ours for each kernel, and the next compile works."""

    def refused(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", refused)
        results = jit.build_specs([toy(1), toy(2)], [jit.host_target()])
    assert all("Resource temporarily unavailable" in str(result.error) for result in results)
    assert all(result.entry for result in jit.build_specs([toy(1), toy(2)], [jit.host_target()]))
