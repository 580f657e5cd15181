"""The kernel cache: broken entries, folders that cannot be written, and copies."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from jit_sandbox import Sandbox, toy

from flashpage import jit
from flashpage.base import env
from flashpage.jit import build, cache, manifest


@pytest.fixture
def sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    sandbox = Sandbox.create(tmp_path)
    sandbox.enter(monkeypatch)
    return sandbox


def obtain(number: int = 0) -> cache.Entry:
    """Gets the kernel without loading it into this process, where a mapped file would keep its old contents."""
    return build.obtain(toy(number), jit.host_target(), cache.jit_store())[0]


def _cut(entry: cache.Entry) -> None:
    os.truncate(entry.path, len(entry.image) // 2)


def _empty(entry: cache.Entry) -> None:
    os.truncate(entry.path, 0)


def _flip_a_bit(entry: cache.Entry) -> None:
    image = bytearray(entry.image)
    image[len(image) // 3] ^= 1
    entry.path.write_bytes(image)


def _swap(entry: cache.Entry) -> None:
    """Puts the complete entry of another kernel in its place."""
    other = obtain(7)
    shutil.rmtree(entry.folder)
    shutil.copytree(other.folder, entry.folder)


def _swap_binary(entry: cache.Entry) -> None:
    shutil.copy(obtain(7).path, entry.path)


def _binary_unreadable(entry: cache.Entry) -> None:
    """A folder in the file's place, which root cannot read either."""
    entry.path.unlink()
    entry.path.mkdir()


def _folder_unreadable(entry: cache.Entry) -> None:
    entry.folder.chmod(0)


def _cut_meta(entry: cache.Entry) -> None:
    meta = entry.folder / cache.META
    meta.write_text(meta.read_text()[:100])


def _meta_of_another_shape(entry: cache.Entry) -> None:
    (entry.folder / cache.META).write_text("[1, 2]")


def _no_meta(entry: cache.Entry) -> None:
    (entry.folder / cache.META).unlink()


def _file_in_place(entry: cache.Entry) -> None:
    shutil.rmtree(entry.folder)
    entry.folder.write_text("not a folder")


BREAKS = [
    _cut,
    _empty,
    _flip_a_bit,
    _swap,
    _swap_binary,
    _binary_unreadable,
    _folder_unreadable,
    _cut_meta,
    _meta_of_another_shape,
    _no_meta,
    _file_in_place,
]


@pytest.mark.parametrize("breaks", BREAKS, ids=lambda f: f.__name__.strip("_"))
def test_a_broken_entry_is_a_miss_and_is_replaced(sandbox: Sandbox, breaks: Callable[[cache.Entry], None]) -> None:
    entry = obtain()
    breaks(entry)
    compiles = sandbox.num_compiles()
    if not (breaks is _folder_unreadable and os.geteuid() == 0):  # root reads it in spite of its mode
        assert cache.jit_store().read(entry.folder.name) is None
        assert jit.get_kernel(toy()).handle
        assert sandbox.num_compiles() == compiles + 1
    assert obtain().spec == toy()
    assert [path for path in sandbox.cache.iterdir() if path.name.startswith(".private")] == []
    assert sandbox.run("get(toy()); print('loaded')", FLASHPAGE_CXX="/nowhere/g++") == "loaded\n"


def test_an_entry_that_does_not_load_is_replaced(sandbox: Sandbox) -> None:
    """An entry for another machine: its hash is right, but the loader refuses it."""
    entry = obtain()
    stranger = sandbox.folder / "kernel.so"
    stranger.write_text("built for a machine that this is not")
    with cache.jit_store().lock(entry.folder.name):
        cache.jit_store().publish(entry.folder.name, stranger, entry.meta)
    assert jit.get_kernel(toy()).handle
    assert obtain().image != b"built for a machine that this is not"
    assert sandbox.num_compiles() == 2


def test_a_read_only_cache_still_hits(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hit writes nothing: no lock, no time stamp, no log."""
    obtain()
    before = _state(sandbox.cache)
    monkeypatch.setattr(cache.Store, "lock", _refuse(errno.EROFS))
    assert jit.get_kernel(toy()).handle
    assert _state(sandbox.cache) == before


def _state(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(p): (p.stat().st_mtime_ns, p.stat().st_size) for p in folder.rglob("*")}


def _refuse(number: int) -> Callable[..., None]:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return refuse


def test_file_in_place_of_the_cache(sandbox: Sandbox) -> None:
    sandbox.cache.write_text("")
    _check_not_kept("Not a directory|File exists")


def test_read_only_folder(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder answers as a read-only mount, which stops root too."""
    make, refuse = os.mkdir, _refuse(errno.EROFS)
    monkeypatch.setattr(
        os, "mkdir", lambda p, *a, **k: (refuse if Path(p).is_relative_to(sandbox.cache) else make)(p, *a, **k)
    )
    _check_not_kept("Read-only file system")


def test_disk_that_fills_up_while_an_entry_is_written(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(cache.Store, "publish", _refuse(errno.ENOSPC))
        _check_not_kept("No space left on device")
    assert cache.entries() == []
    assert sandbox.run("get(toy()); print('built')") == "built\n"


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "tiny"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4k,mode=700", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small tmpfs is not permitted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_full_disk(sandbox: Sandbox, tiny_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One page of room: the lock fits, the binary does not."""
    monkeypatch.setenv("FLASHPAGE_CACHE_DIR", str(tiny_disk))
    _check_not_kept("No space left on device")
    assert cache.entries() == []
    assert not any(path.name.startswith(".private") for path in tiny_disk.iterdir())


@pytest.mark.filterwarnings("default")
def test_many_on_a_full_disk(sandbox: Sandbox, tiny_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHPAGE_CACHE_DIR", str(tiny_disk))
    with warnings.catch_warnings(record=True) as caught:
        assert all(kernel.handle for kernel in jit.prebuild([toy(1), toy(2), toy(3)]))
    assert sandbox.num_compiles() == 3
    assert len(caught) == 1


def _check_not_kept(reason: str) -> None:
    """The kernel runs in spite of that, and one line says why it is not kept."""
    with pytest.warns(RuntimeWarning, match=f"flashpage: compiled kernels are not kept: .*({reason})") as caught:
        assert jit.get_kernel(toy()).handle
    assert len(caught) == 1
    message = str(caught[0].message)
    assert "\n" not in message and "FLASHPAGE_CACHE_DIR names another" in message


def test_no_home_folder(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without an entry in the password file has no home: nothing is written below the working folder."""
    for name in ("FLASHPAGE_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.chdir(sandbox.folder)
    _check_not_kept("no home folder")
    assert not (sandbox.folder / "~").exists()


@pytest.mark.parametrize("move", [shutil.copytree, shutil.move], ids=["copied", "moved"])
def test_another_place_still_hits(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, move: Callable[[Path, Path], object]
) -> None:
    obtain()
    place = sandbox.folder / "elsewhere" / "cache"
    place.parent.mkdir()
    move(sandbox.cache, place)
    monkeypatch.setenv("FLASHPAGE_CACHE_DIR", str(place))
    assert jit.get_kernel(toy()).handle
    assert sandbox.num_compiles() == 1


def test_entries_and_clear(sandbox: Sandbox) -> None:
    obtain(1)
    _cut(obtain(2))
    (sandbox.cache / ".private-left-by-a-killed-process").mkdir()
    (sandbox.cache / "notes.txt").write_text("the user's own")
    (found,) = cache.entries()
    assert found.spec == toy(1)
    assert found.target == jit.host_target()
    assert cache.clear() == 2
    assert [path.name for path in sandbox.cache.iterdir()] == ["notes.txt"]
    assert cache.clear() == 0


def test_an_entry_says_how_it_was_built(sandbox: Sandbox) -> None:
    meta = json.loads((obtain().folder / cache.META).read_text())
    assert manifest.parse_spec(meta["spec"]) == toy()
    assert meta["name"] == toy().name
    assert meta["target"] == jit.host_target().name
    assert meta["compiler"].startswith("g++ (")
    assert "-O3" in meta["flags"]
    assert "-march=native" not in meta["flags"]
    assert "-mavx2" in meta["flags"]
    assert meta["seconds"] > 0
    assert not any(str(sandbox.folder) in str(value) for value in meta.values())


def test_relative_cache_folder(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative folder refers to the current working folder; kernels are loaded by absolute path."""
    monkeypatch.chdir(sandbox.folder)
    monkeypatch.setenv("FLASHPAGE_CACHE_DIR", "relative")
    assert jit.get_kernel(toy()).handle
    assert (sandbox.folder / "relative").is_dir()
    assert env.cache_dir().is_absolute()
