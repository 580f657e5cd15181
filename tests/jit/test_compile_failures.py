"""Compiles that fail for reasons of the machine, and processes that die while they compile."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from jit_sandbox import Sandbox, toy

from flashpage import jit
from flashpage.errors import CompileError
from flashpage.jit import build, cache, diagnostics, files

# A compiler that ignores SIGTERM, with a child that ignores it too.
STUBBORN = """#!/bin/sh
[ "$1" = --version ] && exec g++ --version
trap '' TERM
echo $$ >> "$COMPILES"
sh -c 'trap "" TERM; echo $$ >> "$COMPILES"; sleep 60; sleep 60'
"""
PATIENT = """#!/bin/sh
[ "$1" = --version ] && exec g++ --version
touch "$TMPDIR/ccTEMPORARY.s"
echo $$ >> "$COMPILES"
sleep 60
"""


@pytest.fixture
def sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    """A sandbox with a separate TMPDIR."""
    sandbox = Sandbox.create(tmp_path / "box")
    sandbox.enter(monkeypatch)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)  # makes tempfile read TMPDIR again
    return sandbox


def use(sandbox: Sandbox, compiler: str) -> None:
    sandbox.compiler.write_text(compiler)


def failure(*, many: bool) -> str:
    """The message of a compile that fails."""
    if many:
        results = jit.build_specs([toy(1), toy(2)], [jit.host_target()])
        assert all(result.error is not None for result in results)
        return str(results[0].error)
    with pytest.raises(CompileError) as caught:
        jit.get_kernel(toy(1))
    return str(caught.value)


@pytest.mark.parametrize("many", [False, True])
def test_a_compiler_that_writes_no_file(sandbox: Sandbox, many: bool) -> None:
    use(sandbox, "#!/bin/sh\nexit 0\n")
    text = failure(many=many)
    assert f"{sandbox.compiler} ended without an error and wrote no file." in text
    assert cache.entries() == []


@pytest.mark.parametrize("many", [False, True])
def test_a_command_with_an_open_quote(sandbox: Sandbox, many: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHPAGE_CXX", '"x')
    assert failure(many=many).startswith("FLASHPAGE_CXX is '\"x' (No closing quotation): give ")


def test_a_compiler_that_is_killed(sandbox: Sandbox) -> None:
    use(sandbox, "#!/bin/sh\nkill -9 $PPID\n")  # ends the shell that would record its exit status
    assert "The compiler did not start, or was ended." in failure(many=False)


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk with room for one small file."""
    folder = tmp_path / "full"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small tmpfs is not permitted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("room", [0, 1, 2, 3])
@pytest.mark.parametrize("many", [False, True])
def test_a_full_folder_of_temporary_files(
    sandbox: Sandbox, full_disk: Path, room: int, many: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If any file does not fit on the disk, even the source, the error says so and names the folder."""
    subprocess.run(["mount", "-o", f"remount,size={4 * (room + 1)}k", str(full_disk)], check=True)
    (full_disk / "others").write_bytes(b"x" * 4096)
    monkeypatch.setattr(tempfile, "tempdir", str(full_disk))
    text = failure(many=many)
    assert "No space left on device" in text or f"There is no room left in {full_disk}." in text
    assert "TMPDIR names another" in text
    assert [path.name for path in full_disk.iterdir()] == ["others"]


@pytest.mark.parametrize("text", ["", "no C++"])
def test_a_folder_of_temporary_files_that_is_not_ascii(sandbox: Sandbox, tmp_path: Path, text: str) -> None:
    """In a process whose locale is ASCII, several kernels compile, or fail by the compiler's words."""
    (folder := tmp_path / "tmp é").mkdir()
    (sandbox.templates / "kernel.cpp.jinja").open("a").write(text)
    code = (
        "from jit_sandbox import Sandbox, toy; from pathlib import Path\n"
        f"Sandbox(Path({str(sandbox.folder)!r})).redirect()\n"
        "from flashpage import jit\n"
        "for result in jit.build_specs([toy(1), toy(2)], [jit.host_target()]):\n"
        "    print(result.error or 'built')\n"
    )
    ascii = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "utf-8:surrogateescape"}
    environment = os.environ | sandbox.environment | ascii | {"TMPDIR": str(folder)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=False)
    shown = (done.stdout + done.stderr).decode(errors="replace")
    assert shown.count("does not name a type" if text else "built\n") >= 2, shown


def test_no_folder_of_temporary_files(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "mkdtemp", _refuse)
    assert "No usable temporary directory" in failure(many=False)


def _refuse(*_: object, **__: object) -> str:
    raise FileNotFoundError(2, "No usable temporary directory found")


def wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def is_gone(pid: str) -> bool:
    """Whether a process runs; a zombie that its reaper has not collected yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("compiler", [PATIENT, STUBBORN], ids=["patient", "stubborn"])
def test_the_death_of_the_process_ends_its_compilers(
    sandbox: Sandbox, compiler: str, many: bool, number: signal.Signals
) -> None:
    """After an interrupt no process runs on, and nothing is left in TMPDIR."""
    use(sandbox, compiler)
    both = "from flashpage import jit; jit.build_specs([toy(1), toy(2)], [jit.host_target()], jobs=2)"
    child = sandbox.start(both if many else "get(toy(1))")
    wait_for(lambda: sandbox.num_compiles() >= (1 + many) * (1 + (compiler is STUBBORN)))
    child.send_signal(number)
    child.communicate(timeout=20)
    assert child.returncode == -number
    for pid in sandbox.compiles.read_text().split():
        wait_for(lambda pid=pid: is_gone(pid))
    wait_for(lambda: not list(Path(tempfile.gettempdir()).iterdir()))
    assert cache.entries() == []


def test_what_a_dead_process_left_is_swept(sandbox: Sandbox) -> None:
    """The next compile removes build folders and half-published entries; a living process keeps its own."""
    temporary = Path(tempfile.gettempdir())
    places = (temporary, build._WORK), (sandbox.cache, cache._PRIVATE)
    left = [parent / f"{files.prefix_here(prefix)}left" for parent, prefix in places]
    for folder in left:
        files.make(folder, 0o700)
        files.write(folder / "file", b"", 0o600)
    (temporary / "flashpage-of-another-kind").mkdir()
    with files.scratch(temporary, build._WORK) as held:
        jit.get_kernel(toy())
        assert held.is_dir()
    assert not any(folder.exists() for folder in left)
    assert [path.name for path in temporary.iterdir()] == ["flashpage-of-another-kind"]


@pytest.mark.parametrize("boot", [True, False])
def test_a_sweep_leaves_what_is_of_another_host(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, boot: bool) -> None:
    """Hosts that share TMPDIR or the cache do not see each other's locks where the file system keeps them local."""
    temporary, other = Path(tempfile.gettempdir()), os.uname_result(("Linux", "other", "", "", ""))
    read = Path.read_text

    def another(path: Path, **arguments: str) -> str:
        if path.name == "boot_id" and not boot:
            raise PermissionError
        return "another boot\n" if path.name == "boot_id" else read(path, **arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", another)
        patch.setattr(os, "uname", lambda: other)
        files._host.cache_clear()
        theirs = files.prefix_here(build._WORK)
        (running := temporary / f"{theirs}running").mkdir()
        jit.get_kernel(toy(1))
        assert not running.exists(), "its own"
        running.mkdir()
    files._host.cache_clear()
    assert files.prefix_here(build._WORK) != theirs
    jit.get_kernel(toy(2))
    assert running.is_dir()


def test_a_sweep_follows_no_link(sandbox: Sandbox) -> None:
    precious = sandbox.folder / "precious"
    files.make(precious, 0o700)
    link = Path(tempfile.gettempdir()) / f"{files.prefix_here(build._WORK)}link"
    link.symlink_to(precious)
    files.sweep(link.parent, build._WORK)
    assert precious.is_dir() and link.is_symlink()


def test_a_folder_that_a_sweep_has_taken_is_made_again(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweep happens between the creation of a folder and of its lock."""
    make, taken = tempfile.mkdtemp, []

    def mkdtemp(**arguments: object) -> str:
        folder = make(**arguments)  # type: ignore[call-overload]
        if not taken:
            taken.append(folder)
            os.rmdir(folder)
        return folder

    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    with files.scratch(None, build._WORK) as folder:
        assert folder.is_dir() and str(folder) != taken[0]


def test_a_fork_while_another_thread_compiles(sandbox: Sandbox) -> None:
    """The child's copy of the thread's lock is let go by no thread; it waits for the parent's entry."""
    code = """
import os, threading
compiles = threading.Thread(target=lambda: get(toy(1)))
compiles.start()
while not Path(os.environ["COMPILES"]).exists():
    time.sleep(0.01)
if not (child := os.fork()):
    os._exit(0 if get(toy(1)).handle else 1)
assert os.waitpid(child, 0)[1] == 0
compiles.join()
"""
    sandbox.run(code, COMPILE_SECONDS="1")
    assert sandbox.num_compiles() == 1


@pytest.mark.parametrize("kind", ["missing", "closed", "a broken pipe"])
def test_a_stderr_that_takes_no_text(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Progress is not worth an error."""
    reader, writer = os.pipe()
    os.close(reader)
    stream = io.TextIOWrapper(io.FileIO(writer, "w"), write_through=True)
    if kind == "closed":
        stream.close()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", None if kind == "missing" else stream)
        results = jit.build_specs([toy(1), toy(2)], [jit.host_target()])
        assert jit.get_kernel(toy(3)).handle
    assert all(result.entry for result in results)
    stream.close()


def test_error_after_the_end_of_a_variant(sandbox: Sandbox) -> None:
    """A backslash joins the text's last line with the next one, where the compiler finds the error."""
    with pytest.raises(CompileError, match=r"\Avariant: score \* 2 \\\n  does not compile: "):
        jit.get_kernel(toy(logit="score * 2 \\"))


@pytest.mark.parametrize(
    "warning",
    [
        "(C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to non wgmma instructions",
        "(C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized due to insufficient registers",
        "(C7518) Potential Performance Loss: wgmma.mma_async instructions are serialized due to program dependence",
    ],
)
def test_each_warning_of_serialised_products_counts(warning: str) -> None:
    log = f"ptxas info    : {warning}\nptxas info    : (C7519) warpgroup.arrive is injected in around line 2509\n"
    found = diagnostics.read_ptxas(
        f"{log}    0 bytes spill stores, 8 bytes spill loads\nUsed 128 registers, used 0 barriers"
    )
    assert found == {"registers": 128, "spill_bytes": 8, "serial_products": 1}
