"""Files that no other user could have written: judged before they are read, and made private when they are written.

A kernel is code that the process runs, so a folder of kernels is as trusted as the program itself. What another user
could have put there is not loaded.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import grp
import hashlib
import os
import pwd
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

_MAX_LINKS = 40  # as the kernel counts them
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO in a file's place would block
_locks: set[int] = set()  # open descriptors that hold a lock, or are about to


def fault(folder: Path) -> str:
    """Why another user could put files into `folder`; "" if none could. What is missing is no fault.

    Every folder and every link on the way there must belong to this user or to root, and be writable by its owner
    alone, or by the user's private group (`_is_private`). The way begins at the home folder for what lies below it,
    else at the root. Folders above may be shared if they are sticky, as /tmp is: another user cannot replace what this
    user has made there.
    """
    if not folder.is_absolute():
        return ""
    above_home = _above(os.path.expanduser("~"))
    place, names, links = "/", list(folder.parts[:0:-1]), 0
    while links <= _MAX_LINKS:
        try:
            status = os.lstat(place)
            if stat.S_ISLNK(status.st_mode):
                target = Path(os.readlink(place))
                if not _is_ours(status):
                    return f"{place} belongs to user {status.st_uid}"
                names += [part for part in reversed(target.parts) if part != "/"]
                place, links = ("/" if target.is_absolute() else os.path.dirname(place)), links + 1
                continue
        except OSError:  # missing, or not to be looked at: nothing is read there
            return ""
        is_shared = bool(names) and bool(status.st_mode & stat.S_ISVTX)
        if place not in above_home and (why := _fault_of(place, status, is_shared)):
            return f"{place} {why}"
        if not names:
            return ""
        name = names.pop()
        place = os.path.dirname(place) if name == ".." else os.path.join(place, name)
    return f"{folder} has too many links"


@functools.cache
def _above(home: str) -> frozenset[str]:
    return frozenset(map(str, Path(os.path.realpath(home)).parents))


def _is_ours(status: os.stat_result) -> bool:
    return status.st_uid in (0, os.geteuid())


def _fault_of(place: str | int, status: os.stat_result, is_shared: bool = False) -> str:
    if not _is_ours(status):
        return f"belongs to user {status.st_uid}"
    others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if others and not is_shared and not (others == stat.S_IWGRP and _is_private(place, status.st_gid)):
        return f"can be written by other users (mode {stat.S_IMODE(status.st_mode):04o})"
    return ""


def _is_private(place: str | int, group: int) -> bool:
    """Whether a group that may write has no member but this user. Systems make such a group for each user, whose umask
    is then 002: it has the user's name, lists no other member, and is no other user's own group."""
    try:
        os.getxattr(place, "system.posix_acl_access")  # the group's bits then stand for users of the list, too
    except OSError as error:
        return error.errno in (errno.ENODATA, errno.ENOTSUP) and _is_private_of(group, os.geteuid())
    return False


@functools.cache
def _is_private_of(group: int, user: int) -> bool:
    try:
        own, found = pwd.getpwuid(user), grp.getgrgid(group)
    except KeyError:
        return False
    if user == 0 or own.pw_gid != group or found.gr_name != own.pw_name or set(found.gr_mem) - {own.pw_name}:
        return False
    return not any(other.pw_gid == group and other.pw_uid != user for other in pwd.getpwall())


@contextlib.contextmanager
def named(path: str | Path) -> Iterator[None]:
    """Puts the path into errors of calls that know only a descriptor."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


@contextlib.contextmanager
def _held(path: str | Path, flags: int, at: int | None = None) -> Iterator[int]:
    """A descriptor through which nothing is written, so that an error of its close loses nothing."""
    descriptor = os.open(path, flags, 0o600, dir_fd=at)
    try:
        yield descriptor
    finally:
        with contextlib.suppress(OSError):
            os.close(descriptor)


@contextlib.contextmanager
def _held_lock(path: str | Path, flags: int, at: int | None = None) -> Iterator[int]:
    """As `_held`, for a descriptor that gets a lock. A child that is forked meanwhile closes its copy, with which the
    lock would outlive this process."""
    descriptor = os.open(path, flags, 0o600, dir_fd=at)
    _locks.add(descriptor)
    try:
        yield descriptor
    finally:
        if descriptor in _locks:  # else closed in this child: the number may be another file's by now
            _locks.remove(descriptor)
            with contextlib.suppress(OSError):
                os.close(descriptor)


def _close_locks() -> None:
    """In a forked child."""
    for descriptor in _locks:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _locks.clear()


os.register_at_fork(after_in_child=_close_locks)


@contextlib.contextmanager
def opened(folder: str | Path, *, is_trusted: bool = False) -> Iterator[int]:
    """A folder's descriptor, for `read`. Unless the folder is trusted, it is opened without
    following a link, and PermissionError tells that another user could have written it."""
    with _held(folder, _FOLDER | (0 if is_trusted else os.O_NOFOLLOW)) as descriptor:
        if not is_trusted:
            _judge(descriptor, folder)
        yield descriptor


def read(name: str, at: int, *, is_trusted: bool = False) -> bytes:
    """The bytes of a file in the folder `at`, opened and judged as `opened` does with folders."""
    with _held(name, _FILE | (0 if is_trusted else os.O_NOFOLLOW), at) as descriptor:
        if not is_trusted:
            _judge(descriptor, name)
        with open(descriptor, "rb", closefd=False) as file:
            return file.read()


def _judge(descriptor: int, name: str | Path) -> None:
    if why := _fault_of(descriptor, os.fstat(descriptor)):
        raise PermissionError(f"{name} {why}")


def make(folder: Path, mode: int) -> None:
    """Makes a folder, and those above that are missing, with this mode whatever the umask is."""
    missing = [folder]
    while not missing[-1].parent.is_dir() and missing[-1].parent != missing[-1]:
        missing.append(missing[-1].parent)
    for path in reversed(missing):
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, mode)
            os.chmod(path, mode)
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "Not a directory", str(folder))


def write(path: Path, content: bytes, mode: int) -> None:
    """Writes a file that must not be there yet, with this mode whatever the umask is."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with named(path), open(os.open(path, flags, mode), "wb") as file:
        os.fchmod(file.fileno(), mode)
        file.write(content)


def remove(folder: Path) -> None:
    """Removes a folder as far as possible; `sweep` removes the rest of a `scratch` later."""
    with contextlib.suppress(OSError):  # rmtree ignores errors, but not those of its own descriptors
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def locked(folder: Path, name: str, *, is_blocking: bool = True) -> Iterator[None]:
    """Holds the lock file `name` of a folder, made where it is missing and never changed. BlockingIOError where another
    holds it and `is_blocking` is False."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with opened(folder) as at, _held_lock(name, flags, at) as file:
        with contextlib.suppress(PermissionError):  # another user's, where a cache is not private
            os.fchmod(file, 0o600)
        fcntl.flock(file, fcntl.LOCK_EX | (0 if is_blocking else fcntl.LOCK_NB))
        owner = os.getpid()
        try:
            yield
        finally:
            if os.getpid() == owner:  # not in a child that was forked in the block
                fcntl.flock(file, fcntl.LOCK_UN)


def lock_holder(path: Path) -> int | None:
    """The process that holds a lock file; None where the system does not tell."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        inode = str(os.stat(path).st_ino)
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()  # "1: FLOCK ADVISORY WRITE <pid> <device>:<inode> 0 EOF"; "->" after 1: waits
            if fields[1] == "FLOCK" and fields[5].rpartition(":")[2] == inode and int(fields[4]) > 0:
                return int(fields[4])
    return None


@contextlib.contextmanager
def scratch(parent: Path | None, prefix: str) -> Iterator[Path]:
    """A new folder, mode 0700, that is removed at the end. It is locked meanwhile: `sweep` thus tells it from those
    that killed processes left."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix_here(prefix), dir=parent))
        with contextlib.ExitStack() as stack:
            stack.callback(remove, folder)
            try:
                descriptor = stack.enter_context(_held_lock(folder, _FOLDER))
                with contextlib.suppress(OSError):  # no locks here (NFS): `sweep` leaves all folders alone
                    fcntl.flock(descriptor, fcntl.LOCK_EX)
                os.stat(folder)
            except FileNotFoundError:  # a sweep came between
                continue
            yield folder
            return


def prefix_here(prefix: str) -> str:
    """The beginning of the names that `scratch` gives on this host."""
    return f"{prefix}{_host()}-"


@functools.cache
def _host() -> str:
    """Tells hosts that share a folder apart: a lock may be seen on its own host alone (some kinds of NFS, virtiofs)."""
    try:
        identity = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        identity = os.uname().nodename
    return hashlib.sha256(os.fsencode(identity)).hexdigest()[:12]


def sweep(parent: Path, prefix: str) -> None:
    """Removes what killed processes of this host left of `scratch`. A process that still runs holds its folder's
    lock."""
    for path in listed(parent):
        if not path.name.startswith(prefix_here(prefix)):
            continue
        with contextlib.suppress(OSError), opened(path) as descriptor:
            if os.fstat(descriptor).st_uid == os.geteuid():
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(path)


def listed(folder: Path) -> list[Path]:
    """The paths in a folder; none where it cannot be read."""
    try:
        return list(folder.iterdir())
    except OSError:
        return []
