"""Compiled kernels in a folder. An entry is a folder `<key>/` with the binary and meta.json, published by one rename.

One layout serves the kernels of a wheel (AOT) and those compiled on this machine (the cache). An entry is proven by
the size and sha256 of its binary and by its own key, never by times or paths, so a folder may be copied or moved.

The key is a hash of the kernel's source (source.py), so computing it takes rendering. `.keys/` spares this to the next
process: one small file for each spec and target, with the fingerprint of the package's sources and the key that they
lead to. Such a file only suggests an entry. A file that is missing, damaged or from other sources costs the rendering.

The cache is private: what another user could have written there is a miss (files.py). A folder of the package is
trusted as the package is.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import re
import stat
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from .. import kernels
from ..base import env, paths
from ..base.errors import FlashpageError
from ..base.warn import warn
from ..kernels.spec import KernelSpec
from . import files
from .compilers import own_options
from .source import key_of
from .targets import Target

META = "meta.json"
_PRIVATE = ".private-"  # prefix of folders that are being filled or thrown away
_LOCKS = ".locks"
FAILED = ".failed"  # source and log of compiles that failed, one folder a key
_KEYS = ".keys"
_KEY = re.compile("[0-9a-f]{40}")
_BINARY = re.compile(r"kernel(-[0-9a-f]{16})?\.(so|cubin|ptx)")  # a name in the entry's folder, never a path


@dataclasses.dataclass(frozen=True)
class Entry:
    """One compiled kernel. `meta`: key, spec, target, binary, size, sha256, compiler, flags, seconds, registers, ..."""

    folder: Path
    meta: dict[str, Any]
    image: bytes = dataclasses.field(repr=False)
    is_kept: bool = True  # False: lies in a temporary folder, to be removed once loaded

    @property
    def path(self) -> Path:
        """The binary."""
        return self.folder / self.meta["binary"]

    @property
    def spec(self) -> KernelSpec:
        return KernelSpec.from_json(self.meta["spec"])

    @property
    def target(self) -> Target:
        return Target.parse(self.meta["target"])

    def is_of(self, spec: KernelSpec, target: Target) -> bool:
        """Whether the entry records this kernel."""
        try:
            return self.spec == spec and self.meta["target"] == target.name
        except (AttributeError, KeyError, TypeError, ValueError):
            return False


def read_entry(folder: Path, key: str, *, is_kept: bool = True, is_trusted: bool = False) -> Entry | None:
    """The entry in `folder`; None where there is none or it is not what it says: cut, swapped, unreadable, or, unless
    the folder is trusted, a link or something that another user could have written."""
    try:
        with files.opened(folder, is_trusted=is_trusted) as at:
            meta = json.loads(files.read(META, at, is_trusted=is_trusted))
            if not _BINARY.fullmatch(meta["binary"]):
                return None
            image = files.read(meta["binary"], at, is_trusted=is_trusted)
        proven = (
            meta["key"] == key and meta["size"] == len(image) and meta["sha256"] == hashlib.sha256(image).hexdigest()
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return Entry(folder, meta, image, is_kept) if proven else None


def write_entry(folder: Path, binary: Path, meta: dict[str, Any], mode: int = 0o600) -> None:
    """Fills `folder` with a copy of the binary and its meta.json, to which name, size and sha256 are added.

    The binary's name has its hash: dlopen, which tells libraries by their names, never takes one that was replaced for
    the new one.
    """
    with files.named(binary):
        image = binary.read_bytes()
    digest = hashlib.sha256(image).hexdigest()
    name = f"{binary.stem}-{digest[:16]}{binary.suffix}"
    files.write(folder / name, image, mode)
    proof = {"binary": name, "size": len(image), "sha256": digest}
    files.write(folder / META, f"{json.dumps(meta | proof, indent=1)}\n".encode(), mode)


class Store:
    """A folder of entries. `lock` and `publish` raise OSError where the folder cannot be written.

    `is_private`: the user's own, which other users neither read nor write. Any other is trusted as the package is.
    """

    def __init__(self, folder: Path, *, is_private: bool = False) -> None:
        self.folder, self.is_private = folder, is_private
        self._folder_mode, self._file_mode = (0o700, 0o600) if is_private else (0o755, 0o644)

    def options(self, target: Target) -> list[str]:
        """What the user adds to the compiler's flags: a part of the keys of the user's own kernels. Kernels of a wheel
        serve whatever compiler is here."""
        return own_options(target) if self.is_private else []

    def read(self, key: str) -> Entry | None:
        return read_entry(self.folder / key, key, is_trusted=not self.is_private)

    def read_of(self, key: str, spec: KernelSpec, target: Target) -> Entry | None:
        """The entry, if it is of this kernel: one that was built for another CPU must not run here."""
        entry = self.read(key)
        return entry if entry and entry.is_of(spec, target) else None

    def find(self, spec: KernelSpec, target: Target) -> Entry | None:
        """The entry by the key of the kernel's source, which is rendered; it is remembered for `recall`."""
        if not self.folder.is_dir():
            return None
        key = key_of(spec, target, self.options(target))
        if entry := self.read_of(key, spec, target):
            self.remember(spec, target, key)
        return entry

    def recall(self, spec: KernelSpec, target: Target) -> Entry | None:
        """The entry that `remember` recorded, if it still exists and the sources are still the same."""
        if not kernels.is_of_package(spec.kernel):
            return None
        try:
            with files.opened(self.folder / _KEYS, is_trusted=not self.is_private) as at:
                memo = files.read(self._memo(spec, target).name, at, is_trusted=not self.is_private)
            sources, key = memo.decode().split()
        except (OSError, ValueError):
            return None
        is_current = sources == paths.fingerprint() and bool(_KEY.fullmatch(key))
        return self.read_of(key, spec, target) if is_current else None

    def remember(self, spec: KernelSpec, target: Target, key: str) -> None:
        """Lets `recall` find the entry. Does nothing if the folder cannot be written, a source has just changed, or the
        kernel is made by files outside the package, which its fingerprint does not see."""
        if not (kernels.is_of_package(spec.kernel) and paths.is_settled()):
            return
        memo = self._memo(spec, target)
        with contextlib.suppress(OSError):
            files.make(memo.parent, self._folder_mode)
            with files.scratch(self.folder, _PRIVATE) as private:
                written = private / memo.name
                files.write(written, f"{paths.fingerprint()} {key}\n".encode(), self._file_mode)
                written.replace(memo)

    def forget(self) -> None:
        """Removes all that `remember` wrote."""
        files.remove(self.folder / _KEYS)

    def _memo(self, spec: KernelSpec, target: Target) -> Path:
        options = self.options(target)
        suffix = f"-{hashlib.sha256(json.dumps(options).encode()).hexdigest()[:16]}" if options else ""
        return self.folder / _KEYS / f"{spec.digest[:40]}-{target.name}{suffix}"

    @contextlib.contextmanager
    def lock(self, key: str, blocking: bool = True) -> Iterator[None]:
        """Among processes and threads, one at a time builds a key. A killed process leaves no lock.

        Not `blocking`: raises BlockingIOError where another holds it.
        """
        locks = self._make() / _LOCKS
        files.make(locks, 0o700)
        with files.locked(locks, key, is_blocking=blocking):
            yield

    def lock_holder(self, key: str) -> int | None:
        """The process that builds a key; None where the system does not tell."""
        return files.lock_holder(self.folder / _LOCKS / key)

    def publish(self, key: str, binary: Path, meta: dict[str, Any]) -> Entry:
        """Makes the entry of `key` from a compiled binary, in place of a broken one. The caller holds the lock."""
        place = self._make() / key
        with files.scratch(self.folder, _PRIVATE) as private:
            files.make(private / "new", self._folder_mode)
            write_entry(private / "new", binary, meta | {"key": key}, self._file_mode)
            with contextlib.suppress(FileNotFoundError):
                if stat.S_ISDIR(os.lstat(place).st_mode):
                    os.chmod(place, 0o700)  # one that the user may not read could not be moved either
                os.rename(place, private / "old")
            os.rename(private / "new", place)
        if (entry := self.read(key)) is None:
            raise OSError(f"{self.folder / key} does not read back as it was written")
        return entry

    def note(self, entry: Entry, **facts: Any) -> None:
        """Adds facts to an entry's meta.json. Does nothing if the folder cannot be written."""
        if not entry.is_kept or entry.folder.parent != self.folder:
            return
        with contextlib.suppress(OSError), files.scratch(self.folder, _PRIVATE) as private:
            files.write(private / META, f"{json.dumps(entry.meta | facts, indent=1)}\n".encode(), self._file_mode)
            (private / META).replace(entry.folder / META)

    def _make(self) -> Path:
        """The folder, made where it is missing."""
        if not self.folder.is_absolute():  # "~" stands for itself
            raise OSError("this user has no home folder; FLASHPAGE_CACHE_DIR names another")
        files.make(self.folder, self._folder_mode)
        if self.is_private and (why := files.fault(self.folder)):  # another user may have been quicker
            raise PermissionError(why)
        return self.folder

    def keep_failure(self, key: str, paths: Iterable[Path]) -> Path:
        """A folder with copies of a failed compile's files, which outlives the build."""
        kept = self._make() / FAILED / key
        files.remove(kept)
        files.make(kept, self._folder_mode)
        for path in paths:
            files.write(kept / path.name, path.read_bytes(), self._file_mode)
        return kept

    def sweep(self) -> None:
        """Removes what killed processes left."""
        files.sweep(self.folder, _PRIVATE)

    def folders(self) -> list[Path]:
        """The folders of all entries, sound or not."""
        return [folder for folder in files.listed(self.folder) if _KEY.fullmatch(folder.name)]

    def entries(self) -> list[Entry]:
        """All sound entries, by name."""
        found = [entry for folder in self.folders() if (entry := self.read(folder.name))]
        return sorted(found, key=lambda entry: (entry.meta["name"], entry.meta["target"]))

    def tidy(self) -> None:
        """Removes locks, logs of failures and what killed processes left."""
        for path in files.listed(self.folder):
            if path.name.startswith(_PRIVATE) or path.name in (_LOCKS, FAILED):
                files.remove(path)

    def clear(self) -> int:
        """Removes everything that this module made; returns how many entries there were."""
        folders = self.folders()
        for folder in folders:
            files.remove(folder)
        self.forget()
        self.tidy()
        return len(folders)


def jit_store() -> Store:
    """Kernels compiled on this machine. Where another user could write to the cache folder, a warning says so and a
    private folder serves instead."""
    folder = env.cache_dir()
    why = files.fault(folder)
    return Store(_private_folder(folder, why) if why else folder, is_private=True)


@functools.cache
def _private_folder(wanted: Path, why: str) -> Path:
    """The user's own folder below TMPDIR; one for this process alone where another user was quicker. Warns once."""
    folder = Path(tempfile.gettempdir(), f"flashpage-{os.geteuid()}")
    with contextlib.suppress(OSError):
        files.make(folder, 0o700)
    if files.fault(folder):
        folder = Path(tempfile.mkdtemp(prefix="flashpage-"))
        atexit.register(_remove_own, folder, os.getpid())
    warn(
        f"the kernel cache {wanted} is not used, because {why}, and a kernel is code that this process would run: "
        f"{folder} is used instead. Give the folder to this user and take write access from others "
        "(chown, chmod go-w), or set FLASHPAGE_CACHE_DIR."
    )
    return folder


def _remove_own(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked child ends earlier
        files.remove(folder)


def aot_store() -> Store:
    """Kernels that came with the package, or were built into it."""
    return Store(paths.aot_dir())


def entries() -> list[Entry]:
    """The cache's entries (flashpage cache list)."""
    return jit_store().entries()


def clear() -> int:
    """Empties the cache; returns how many entries there were (flashpage cache clear). FlashpageError if another user
    could write to its folder: nothing is then removed, neither there nor in the folder that serves instead."""
    folder = env.cache_dir()
    if why := files.fault(folder):
        raise FlashpageError(
            f"the kernel cache {folder} is not cleared, because {why}: give it to this user and take write access from "
            "others (chown, chmod go-w), or set FLASHPAGE_CACHE_DIR to the folder to clear"
        )
    return jit_store().clear()
