"""Compiled kernels in a folder. An entry is a folder `<key>/` with the binary and meta.json, published by one rename.

The same layout holds the kernels of a wheel (AOT) and those compiled on this machine (the cache). An entry is proven by
the size and sha256 of its binary and by its own key, never by times or paths, so a folder may be copied or moved.

The key is a hash of the kernel's source (source.py), so computing it takes rendering. `.keys/` spares this to the next
process: one small file for each spec and target, with the fingerprint of the package's sources and the key that they
lead to. Such a file only suggests an entry. A file that is missing, damaged or from other sources costs the rendering.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .. import kernels
from ..base import env, paths
from ..kernels.spec import KernelSpec
from .source import key_of
from .targets import Target

META = "meta.json"
_PRIVATE = ".private-"  # prefix of folders that are being filled or thrown away
_LOCKS = ".locks"
FAILED = ".failed"  # source and log of compiles that failed, one folder a key
_KEYS = ".keys"
_KEY = re.compile("[0-9a-f]{40}")


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


def read_entry(folder: Path, key: str, is_kept: bool = True) -> Entry | None:
    """The entry in `folder`; None where there is none or it is not what it says: cut, swapped, unreadable."""
    try:
        meta = json.loads((folder / META).read_bytes())
        image = (folder / meta["binary"]).read_bytes()
        proven = (
            meta["key"] == key and meta["size"] == len(image) and meta["sha256"] == hashlib.sha256(image).hexdigest()
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Entry(folder, meta, image, is_kept) if proven else None


def write_entry(folder: Path, binary: Path, meta: dict[str, Any]) -> None:
    """Fills `folder` with a copy of the binary and its meta.json, to which size and sha256 are added."""
    image = binary.read_bytes()
    proof = {"binary": binary.name, "size": len(image), "sha256": hashlib.sha256(image).hexdigest()}
    (folder / binary.name).write_bytes(image)
    (folder / META).write_text(json.dumps(meta | proof, indent=1) + "\n")


class Store:
    """A folder of entries. `lock` and `publish` raise OSError where the folder cannot be written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, key: str) -> Entry | None:
        return read_entry(self.folder / key, key)

    def find(self, spec: KernelSpec, target: Target) -> Entry | None:
        """The entry by the key of the kernel's source, which is rendered; it is remembered for `recall`."""
        if not self.folder.is_dir():
            return None
        key = key_of(spec, target)
        if entry := self.read(key):
            self.remember(spec, target, key)
        return entry

    def recall(self, spec: KernelSpec, target: Target) -> Entry | None:
        """The entry that `remember` was told, if it is still there and the sources are still the same."""
        if not kernels.is_of_package(spec.kernel):
            return None
        try:
            sources, key = self._memo(spec, target).read_text().split()
        except (OSError, ValueError):
            return None
        entry = self.read(key) if sources == paths.fingerprint() else None
        return entry if entry and entry.is_of(spec, target) else None

    def remember(self, spec: KernelSpec, target: Target, key: str) -> None:
        """Lets `recall` find the entry. Does nothing if the folder cannot be written, a source has just changed, or the
        kernel is made by files outside the package, which its fingerprint does not see."""
        if not (kernels.is_of_package(spec.kernel) and paths.is_settled()):
            return
        memo = self._memo(spec, target)
        with contextlib.suppress(OSError):
            memo.parent.mkdir(exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=_PRIVATE, dir=self.folder) as private:
                written = Path(private) / memo.name
                written.write_text(f"{paths.fingerprint()} {key}\n")
                written.replace(memo)

    def forget(self) -> None:
        """Removes all that `remember` wrote."""
        shutil.rmtree(self.folder / _KEYS, ignore_errors=True)

    def _memo(self, spec: KernelSpec, target: Target) -> Path:
        return self.folder / _KEYS / f"{spec.digest[:40]}-{target.name}"

    @contextlib.contextmanager
    def lock(self, key: str, blocking: bool = True) -> Iterator[None]:
        """Among processes and threads, one at a time builds a key. A killed process leaves no lock behind.

        Not `blocking`: raises BlockingIOError where another holds it.
        """
        locks = self._make() / _LOCKS
        locks.mkdir(exist_ok=True)
        with open(locks / key, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if blocking else fcntl.LOCK_NB))
            yield

    def publish(self, key: str, binary: Path, meta: dict[str, Any]) -> Entry:
        """Makes the entry of `key` from a compiled binary, in place of a broken one. The caller holds the lock."""
        private = Path(tempfile.mkdtemp(prefix=_PRIVATE, dir=self._make()))
        try:
            private.chmod(0o755)
            (private / "new").mkdir()
            write_entry(private / "new", binary, meta | {"key": key})
            with contextlib.suppress(FileNotFoundError):
                os.chmod(self.folder / key, 0o700)  # one that nobody may read could not be moved either
                os.rename(self.folder / key, private / "old")
            os.rename(private / "new", self.folder / key)
        finally:
            shutil.rmtree(private, ignore_errors=True)
        if (entry := self.read(key)) is None:
            raise OSError(f"{self.folder / key} does not read back as it was written")
        return entry

    def _make(self) -> Path:
        """The folder, made where it is missing."""
        if not self.folder.is_absolute():  # "~" stands for itself
            raise OSError("this user has no home folder; FLASHPAGE_CACHE_DIR names another")
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.folder

    def folders(self) -> list[Path]:
        """Of all entries, sound or not."""
        return [folder for folder in _list(self.folder) if _KEY.fullmatch(folder.name)]

    def entries(self) -> list[Entry]:
        """All sound entries, by name."""
        found = [entry for folder in self.folders() if (entry := read_entry(folder, folder.name))]
        return sorted(found, key=lambda entry: (entry.meta["name"], entry.meta["target"]))

    def tidy(self) -> None:
        """Removes locks, logs of failures and what killed processes left."""
        for path in _list(self.folder):
            if path.name.startswith(_PRIVATE) or path.name in (_LOCKS, FAILED):
                shutil.rmtree(path, ignore_errors=True)

    def clear(self) -> int:
        """Removes everything that this module made; returns how many entries there were."""
        folders = self.folders()
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        self.forget()
        self.tidy()
        return len(folders)


def _list(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def jit_store() -> Store:
    """Kernels compiled on this machine."""
    return Store(env.cache_dir())


def aot_store() -> Store:
    """Kernels that came with the package, or were built into it."""
    return Store(paths.aot_dir())


def entries() -> list[Entry]:
    """The cache's entries (flashpage cache list)."""
    return jit_store().entries()


def clear() -> int:
    """Empties the cache; returns how many entries there were (flashpage cache clear)."""
    return jit_store().clear()
