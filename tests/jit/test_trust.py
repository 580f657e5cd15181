"""The cache loads nothing that another user could have written, and all that it writes is private."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import struct
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from jit_sandbox import Sandbox, toy

from aot import build as aot_build
from flashpage import jit
from flashpage.errors import FlashpageError
from flashpage.jit import build, cache, files


@pytest.fixture
def sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sandbox]:
    sandbox = Sandbox.create(tmp_path / "box")
    sandbox.enter(monkeypatch)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    cache._private_folder.cache_clear()
    yield sandbox
    cache._private_folder.cache_clear()


def obtain(number: int = 0) -> cache.Entry:
    return build.obtain(toy(number), jit.host_target(), cache.jit_store())[0]


def give_away(path: Path) -> None:
    """Gives a file to another user."""
    if os.geteuid():
        pytest.skip("giving a file to another user takes root")
    os.chown(path, 4242, 4242, follow_symlinks=False)


def _writable_folder(sandbox: Sandbox) -> None:
    sandbox.cache.chmod(0o777)


def _group_writable_folder(sandbox: Sandbox) -> None:
    sandbox.cache.chmod(0o770)


def _sticky_folder(sandbox: Sandbox) -> None:
    """A folder where others cannot replace files but can add entries."""
    sandbox.cache.chmod(0o1777)


def _folder_of_another(sandbox: Sandbox) -> None:
    give_away(sandbox.cache)


def _writable_parent(sandbox: Sandbox) -> None:
    sandbox.folder.chmod(0o777)


def _link_of_another(sandbox: Sandbox) -> None:
    sandbox.cache.rename(sandbox.folder / "elsewhere")
    sandbox.cache.symlink_to(sandbox.folder / "elsewhere")
    give_away(sandbox.cache)


def _link_to_a_writable_parent(sandbox: Sandbox) -> None:
    place = sandbox.folder / "shared"
    place.mkdir()
    sandbox.cache.rename(place / "cache")
    sandbox.cache.symlink_to("shared/cache")
    place.chmod(0o777)


FAULTS = [
    *(_writable_folder, _group_writable_folder, _sticky_folder, _folder_of_another, _writable_parent),
    *(_link_of_another, _link_to_a_writable_parent),
]


@pytest.mark.parametrize("spoil", FAULTS, ids=lambda f: f.__name__.strip("_"))
def test_a_folder_that_others_can_write_is_not_used(sandbox: Sandbox, spoil: Callable[[Sandbox], None]) -> None:
    """One warning, and the kernel is compiled into a private folder, where the next process finds it."""
    obtain()
    spoil(sandbox)
    with pytest.warns(RuntimeWarning, match=r"flashpage: the kernel cache .* is not used, because .*") as caught:
        kernel = jit.get_kernel(toy())
        obtain(1)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert kernel.handle and sandbox.num_compiles() == 3
    assert cache.jit_store().folder != sandbox.cache


def test_clear_leaves_a_folder_that_nobody_named(sandbox: Sandbox) -> None:
    """The private one, which serves in place of a cache that is not used."""
    obtain()
    _writable_folder(sandbox)
    with pytest.warns(RuntimeWarning, match="is not used"):
        obtain(1)
        private = cache.jit_store()
    for folder in (sandbox.cache, private.folder):
        assert len(list(folder.glob("*/meta.json"))) == 1
    with pytest.raises(FlashpageError, match=rf"the kernel cache {sandbox.cache} is not cleared, because .*: give it"):
        cache.clear()
    for folder in (sandbox.cache, private.folder):
        assert len(list(folder.glob("*/meta.json"))) == 1


def test_the_private_folder_is_kept_unless_another_was_quicker(sandbox: Sandbox) -> None:
    sandbox.cache.mkdir()
    sandbox.cache.chmod(0o777)
    own = Path(tempfile.gettempdir()) / f"flashpage-{os.geteuid()}"
    with pytest.warns(RuntimeWarning):
        assert cache.jit_store().folder == own
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    own.chmod(0o777)
    cache._private_folder.cache_clear()
    with pytest.warns(RuntimeWarning):
        assert cache.jit_store().folder not in (own, sandbox.cache)


def test_a_forked_child_leaves_its_parents_folder(sandbox: Sandbox) -> None:
    """The folder of one process is removed when that process ends, and not by a child that was forked."""
    code = """
import os, sys, tempfile
from flashpage.jit import cache
folder = Path(os.environ["FLASHPAGE_CACHE_DIR"])
for path in (folder, Path(tempfile.gettempdir(), f"flashpage-{os.geteuid()}")):
    path.mkdir(exist_ok=True)
    path.chmod(0o777)
get(toy())
own = cache.jit_store().folder
if not (child := os.fork()):
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
assert own != folder and own.is_dir()
print(own)
"""
    own = sandbox.run(code, TMPDIR=tempfile.gettempdir(), PYTHONWARNINGS="ignore")
    assert not Path(own.strip()).exists()


def test_a_sticky_parent_is_fine(sandbox: Sandbox) -> None:
    """A parent folder like /tmp: others cannot replace the folder in it."""
    sandbox.folder.chmod(0o1777)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        obtain()
    assert cache.jit_store().folder == sandbox.cache


def test_the_way_begins_at_the_home_folder(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """The administrator decides where a user's home is."""
    home = sandbox.folder / "above" / "home"
    home.mkdir(parents=True)
    home.parent.chmod(0o777)
    monkeypatch.setenv("HOME", str(home))
    assert files.fault(home / ".cache" / "flashpage") == ""
    home.chmod(0o777)
    assert files.fault(home / ".cache" / "flashpage").startswith(f"{home} can be written by other users")


class _User(NamedTuple):
    pw_name: str
    pw_uid: int
    pw_gid: int


class _Group(NamedTuple):
    gr_name: str
    gr_mem: list[str]


UID, GID = (os.getuid(), os.getgid()) if os.getuid() else (1000, 7000)
ALICE, BOB = _User("alice", UID, GID), _User("bob", UID + 1, GID + 1)
# An access list that lets BOB write: version 2, then tag, rights and id of the owner, BOB, the group, the mask, others.
ACL = struct.pack("<I" + 5 * "HHI", 2, 1, 7, 0, 2, 7, BOB.pw_uid, 4, 7, 0, 16, 7, 0, 32, 0, 0)


@pytest.mark.parametrize(
    ("users", "group", "mode", "is_fine"),
    [
        pytest.param([ALICE, BOB], _Group("alice", []), 0o770, True, id="a private group"),
        pytest.param([ALICE, BOB], _Group("alice", ["alice"]), 0o2775, True, id="that lists its user"),
        pytest.param([ALICE, BOB], _Group("alice", []), 0o777, False, id="writable by all too"),
        pytest.param([ALICE, BOB], _Group("alice", ["bob"]), 0o770, False, id="with another member"),
        pytest.param([ALICE, BOB._replace(pw_gid=GID)], _Group("alice", []), 0o770, False, id="of another user too"),
        pytest.param([ALICE, BOB], _Group("users", []), 0o770, False, id="of another name"),
        pytest.param([ALICE._replace(pw_gid=100), BOB], _Group("alice", []), 0o770, False, id="not the user's own"),
        pytest.param([BOB], _Group("alice", []), 0o770, False, id="a user without an entry"),
    ],
)
def test_a_private_group_may_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, users: list[_User], group: _Group, mode: int, is_fine: bool
) -> None:
    """A home folder of a user whose umask is 002."""
    folder = tmp_path / "home" / "cache"
    files.make(folder, 0o700)
    for path in (folder, folder.parent):
        os.chown(path, UID, GID)
    folder.chmod(mode)
    monkeypatch.setenv("HOME", str(folder.parent))
    monkeypatch.setattr(os, "geteuid", lambda: UID)
    monkeypatch.setattr(files.pwd, "getpwuid", lambda uid: {user.pw_uid: user for user in users}[uid])
    monkeypatch.setattr(files.pwd, "getpwall", lambda: users)
    monkeypatch.setattr(files.grp, "getgrgid", lambda gid: {GID: group}[gid])
    files._is_private_of.cache_clear()
    try:
        assert (files.fault(folder) == "") is is_fine
        with contextlib.suppress(OSError):  # a file system without access lists
            os.setxattr(folder, "system.posix_acl_access", ACL)
            assert "can be written by other users" in files.fault(folder)
    finally:
        files._is_private_of.cache_clear()


def test_the_group_of_root_is_not_private(tmp_path: Path) -> None:
    """Containers give the group to users without a name."""
    tmp_path.chmod(0o770)
    if os.geteuid() == 0:
        assert "can be written by other users" in files.fault(tmp_path)


def _binary_writable(entry: cache.Entry) -> None:
    entry.path.chmod(0o666)


def _entry_writable(entry: cache.Entry) -> None:
    entry.folder.chmod(0o770)


def _meta_writable(entry: cache.Entry) -> None:
    (entry.folder / cache.META).chmod(0o622)


def _binary_of_another(entry: cache.Entry) -> None:
    give_away(entry.path)


def _binary_is_a_link(entry: cache.Entry) -> None:
    moved = entry.folder.parent / "moved.so"
    entry.path.rename(moved)
    entry.path.symlink_to(moved)


def _entry_is_a_link(entry: cache.Entry) -> None:
    moved = entry.folder.with_name("moved")
    entry.folder.rename(moved)
    entry.folder.symlink_to(moved)


def _meta_is_a_fifo(entry: cache.Entry) -> None:
    (entry.folder / cache.META).unlink()
    os.mkfifo(entry.folder / cache.META, 0o600)


def _binary_is_a_path(entry: cache.Entry) -> None:
    """A link to a file that is intact."""
    moved = entry.folder.parent / entry.path.name
    shutil.copy(entry.path, moved)
    meta = entry.meta | {"binary": f"../{entry.path.name}"}
    (entry.folder / cache.META).write_text(json.dumps(meta))


SPOILED = [
    *(_binary_writable, _entry_writable, _meta_writable, _binary_of_another, _binary_is_a_link, _entry_is_a_link),
    *(_meta_is_a_fifo, _binary_is_a_path),
]


@pytest.mark.parametrize("spoil", SPOILED, ids=lambda f: f.__name__.strip("_"))
def test_an_entry_that_others_could_have_written_is_replaced(
    sandbox: Sandbox, spoil: Callable[[cache.Entry], None]
) -> None:
    entry = obtain()
    spoil(entry)
    assert cache.jit_store().read(entry.folder.name) is None
    assert jit.get_kernel(toy()).handle
    assert sandbox.num_compiles() == 2
    assert obtain().spec == toy() and sandbox.num_compiles() == 2


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o177])
def test_all_that_is_written_is_private(sandbox: Sandbox, umask: int) -> None:
    """Kernels, locks, notes and logs of failures are private, and so are missing parent folders."""
    folder = sandbox.folder / "new" / "cache"
    code = f"import os; os.umask({umask}); get(toy())\ntry: get(toy(logit='nonsense'))\nexcept Exception: pass"
    sandbox.run(code, FLASHPAGE_CACHE_DIR=str(folder))
    made = [folder.parent, folder, *folder.rglob("*")]
    modes = {str(path): (path.is_dir(), oct(stat.S_IMODE(path.stat().st_mode))) for path in made}
    assert set(modes.values()) == {(True, "0o700"), (False, "0o600")}, modes
    names = {path.name for path in made}
    assert {".locks", ".failed", ".keys", "log.txt", cache.META} <= names


def test_a_lock_is_neither_followed_nor_emptied(sandbox: Sandbox) -> None:
    store, precious = cache.jit_store(), sandbox.folder / "precious"
    precious.write_text("not a lock")
    with store.lock("a"):
        pass
    lock = sandbox.cache / ".locks" / "a"
    lock.write_text("kept")
    with store.lock("a"):
        assert lock.read_text() == "kept"
    lock.unlink()
    lock.symlink_to(precious)
    with pytest.raises(OSError), store.lock("a"):
        pass
    assert precious.read_text() == "not a lock"


def test_kernels_of_an_installed_package_are_trusted_as_it_is(sandbox: Sandbox) -> None:
    """Installers link files, and set the modes that they prefer."""
    (result,) = aot_build.build_into(sandbox.aot, [(toy(), jit.host_target())])
    assert result.entry is not None
    path = result.entry.path
    path.rename(sandbox.folder / "linked.so")
    path.symlink_to(sandbox.folder / "linked.so")
    result.entry.folder.chmod(0o775)
    compiles = sandbox.num_compiles()
    assert jit.get_kernel(toy()).handle
    assert sandbox.num_compiles() == compiles and not sandbox.cache.exists()


def test_kernels_of_a_package_are_readable_by_all(sandbox: Sandbox) -> None:
    old = os.umask(0o077)
    try:
        (result,) = aot_build.build_into(sandbox.aot, [(toy(), jit.host_target())])
    finally:
        os.umask(old)
    assert result.entry is not None
    assert stat.S_IMODE(result.entry.folder.stat().st_mode) == 0o755
    assert stat.S_IMODE(result.entry.path.stat().st_mode) == 0o644


def test_an_entry_without_its_symbol_is_replaced_in_the_same_process(sandbox: Sandbox) -> None:
    """The replaced library has the right hash and loads. It has another file name, as dlopen maps a name once."""
    entry = obtain()
    source, stranger = sandbox.folder / "empty.cpp", sandbox.folder / "kernel.so"
    source.write_text("int nothing;")
    subprocess.run(["g++", "-shared", "-o", stranger, source], check=True)
    store = cache.jit_store()
    with store.lock(entry.folder.name):
        planted = store.publish(entry.folder.name, stranger, entry.meta)
    assert jit.get_kernel(toy()).handle
    replaced = obtain()
    assert sandbox.num_compiles() == 2
    assert replaced.path.name != planted.path.name and replaced.folder == planted.folder
