"""One compile: a private folder with the source, the compiler's command, and what becomes of its result."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..base import env
from ..base.errors import CompileError, KernelMissingError
from ..base.warn import warn
from ..kernels.spec import KernelSpec
from . import diagnostics, files, manifest, process
from .cache import Entry, Store, read_entry, write_entry
from .compilers import Compiler, find_compiler, looked_for
from .render import include_dirs, source_suffix
from .source import Source, key_of
from .targets import Target

_LEAST_ROOM = 1 << 16  # bytes of a disk that is not full


@dataclasses.dataclass(frozen=True)
class Job:
    """One compile in a private folder."""

    spec: KernelSpec
    target: Target
    key: str
    compiler: Compiler
    folder: Path

    @staticmethod
    def prepare(spec: KernelSpec, target: Target, source: Source, work: Path, compiler: Compiler | None) -> Job:
        """Finds the compiler and writes the source into a folder of its own under `work`."""
        compiler = compiler or find_compiler(target)
        if compiler is None:
            raise missing_error([spec], target)
        job = Job(spec, target, source.key, compiler, work / source.key)
        files.make(job.folder, 0o700)
        files.write(job.source, source.text.encode(), 0o600)
        return job

    @property
    def source(self) -> Path:
        return self.folder / f"kernel{source_suffix(self.spec)}"

    @property
    def binary(self) -> Path:
        return self.folder / self.target.binary

    @property
    def partial(self) -> Path:
        """The file that the compiler writes: the binary's name is for a compile that succeeded."""
        return self.folder / "partial"

    @property
    def log(self) -> Path:
        return self.folder / "log.txt"

    @property
    def started(self) -> Path:
        """An empty file whose time is the start of the compile."""
        return self.folder / "started"

    @property
    def status(self) -> Path:
        """A file with the compiler's exit status, once it has ended."""
        return self.folder / "status"

    @property
    def command(self) -> list[str]:
        return self.compiler.command(self.source, self.partial, self.target, include_dirs(self.spec))

    @property
    def _shell_line(self) -> str:
        started, log, status = (shlex.quote(str(path)) for path in (self.started, self.log, self.status))
        move = shlex.join(["mv", str(self.partial), str(self.binary)])
        compile = f"{shlex.join(self.command)} > {log} 2>&1"
        return f": > {started}; {compile}; s=$?; echo $s > {status}; [ $s = 0 ] && {move}"

    def running(self) -> contextlib.AbstractContextManager[object]:
        """Starts the compiler, and waits for it at the end; `finish` tells success from failure."""
        waits_for_compiler = "trap : TERM; "  # when both are ended, the shell ends last
        command = ["sh", "-c", waits_for_compiler + self._shell_line]
        return process.running(command, self.folder.parent, subprocess.DEVNULL)

    def ninja_rule(self) -> str:
        """`build` statement and command, with the job's key as description (what ninja prints when it is done)."""
        command = self._shell_line.replace("$", "$$")
        paths = [re.sub(r"([$ :])", r"$\1", str(path)) for path in (self.binary, self.source)]
        rule = f"rule r{self.key}\n  command = {command}\n  description = {self.key}\n"
        return f"{rule}build {paths[0]}: r{self.key} {paths[1]}\n"

    def finish(self, store: Store) -> Entry:
        """Publishes the binary; raises CompileError, with the log kept, where there is none."""
        with files.named(self.log):
            log = self.log.read_text(errors="replace") if self.log.exists() else ""
        if not self.binary.exists():
            raise self._failure(store, log)
        meta = {
            "name": self.spec.name,
            "spec": self.spec.to_json(),
            "target": self.target.name,
            "compiler": f"{self.compiler.name} ({self.compiler.version})",
            "flags": self.compiler.flags(self.target),
            "seconds": round(self.binary.stat().st_mtime - self.started.stat().st_mtime, 3),
            **diagnostics.read_ptxas(log),
        }
        try:
            if not self._is_of_sources(store):  # the entry would be found once the edit is undone
                warn(f"{self.spec.name} is not kept: its sources changed while it was compiled")
                return self._unkept(meta)
            entry = store.publish(self.key, self.binary, meta)
        except OSError as error:
            reason = str(error)
            is_of_compile = str(error.filename).startswith(str(self.folder))  # and not of the cache
            if error.errno and not is_of_compile:  # equal for all kernels: Python shows it once
                reason = f"{error.strerror}: {store.folder} (FLASHPAGE_CACHE_DIR names another folder)"
            warn(f"compiled kernels are not kept: {reason}")
            return self._unkept(meta)
        store.remember(self.spec, self.target, self.key)
        return entry

    def _is_of_sources(self, store: Store) -> bool:
        """Whether the sources are still those that were compiled."""
        try:
            return key_of(self.spec, self.target, store.options(self.target)) == self.key
        except OSError:
            return False

    def _unkept(self, meta: dict[str, Any]) -> Entry:
        """The entry in a folder of its own, for the caller to remove."""
        try:
            folder = Path(tempfile.mkdtemp(prefix="flashpage-"))
            write_entry(folder, self.binary, meta | {"key": self.key})
        except OSError as error:
            raise CompileError(f"kernel {self.spec.name} is compiled, and there is no room for it: {error}") from error
        temporary = read_entry(folder, self.key, is_kept=False)
        assert temporary is not None
        return temporary

    def _failure(self, store: Store, log: str) -> CompileError:
        """The error with the compiler's own words, and why it has written no file."""
        try:
            kept = store.keep_failure(self.key, [path for path in (self.source, self.log) if path.exists()])
        except OSError:
            kept = self.folder
        places = kept / self.source.name, kept / self.binary.name
        command = shlex.join(self.compiler.command(*places, self.target, include_dirs(self.spec)))
        where = "they could not be kept" if kept == self.folder else str(kept)
        return diagnostics.compile_error(self.spec, self.target, command, f"{log}\n{self._cause()}".strip(), where)

    def _cause(self) -> str:
        """Why there is no binary, beyond what the compiler has said."""
        if shutil.disk_usage(self.folder).free < _LEAST_ROOM:
            return f"There is no room left in {tempfile.gettempdir()}. TMPDIR names another folder."
        try:
            status = int(self.status.read_text())
        except (OSError, ValueError):
            return "The compiler did not start, or was ended."
        return "" if status else f"{self.compiler.program[0]} ended without an error and wrote no file."


def missing_error(specs: Sequence[KernelSpec], target: Target) -> KernelMissingError:
    """Kernels that are not built and cannot be built here, with the command that does it elsewhere."""
    which, it = (f"kernel {specs[0].name} is", "it") if len(specs) == 1 else (f"{len(specs)} kernels are", "them")
    reason = f"there is no compiler for {it} here (looked for {looked_for(target)})"
    if env.is_off("FLASHPAGE_JIT"):
        reason = f"FLASHPAGE_JIT=off forbids compiling {it} now"
    texts = " ".join(f"--spec {shlex.quote(manifest.spec_text(spec))}" for spec in specs)
    return KernelMissingError(
        f"{which} not built for {target.name}, and {reason}. "
        f"Build {it} with: flashpage build --target {target.name} {texts}"
    )
