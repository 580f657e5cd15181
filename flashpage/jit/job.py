"""One compile: a private folder with the source, the compiler's command, and what becomes of its result."""

from __future__ import annotations

import dataclasses
import re
import shlex
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path

from ..base.errors import KernelMissingError
from ..kernels.spec import KernelSpec
from . import diagnostics, manifest, process
from .cache import FAILED, Entry, Store, read_entry, write_entry
from .compilers import Compiler, find_compiler, looked_for
from .render import include_dirs, source_suffix
from .source import Source, key_of
from .targets import Target


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
            raise missing_error(spec, target, f"there is no compiler for it here (looked for {looked_for(target)})")
        job = Job(spec, target, source.key, compiler, work / source.key)
        job.folder.mkdir()
        job.source.write_text(source.text)
        return job

    @property
    def source(self) -> Path:
        return self.folder / f"kernel{source_suffix(self.spec)}"

    @property
    def binary(self) -> Path:
        return self.folder / self.target.binary

    @property
    def partial(self) -> Path:
        """What the compiler writes: the binary's name is for a compile that succeeded."""
        return self.folder / "partial"

    @property
    def log(self) -> Path:
        return self.folder / "log.txt"

    @property
    def started(self) -> Path:
        """An empty file whose time is the start of the compile."""
        return self.folder / "started"

    @property
    def command(self) -> list[str]:
        return self.compiler.command(self.source, self.partial, self.target, include_dirs(self.spec))

    @property
    def _shell_line(self) -> str:
        started, log = shlex.quote(str(self.started)), shlex.quote(str(self.log))
        move = shlex.join(["mv", str(self.partial), str(self.binary)])
        return f": > {started}; {shlex.join(self.command)} > {log} 2>&1 && {move}"

    def run(self) -> None:
        """Runs the compiler; `finish` tells success from failure."""
        waits_for_compiler = "trap : TERM; "  # when both are ended, the shell ends last
        with process.running(["sh", "-c", waits_for_compiler + self._shell_line], subprocess.DEVNULL):
            pass

    def ninja_rule(self) -> str:
        """`build` statement and command, with the job's key as description (what ninja prints when it is done)."""
        command = self._shell_line.replace("$", "$$")
        paths = [re.sub(r"([$ :])", r"$\1", str(path)) for path in (self.binary, self.source)]
        rule = f"rule r{self.key}\n  command = {command}\n  description = {self.key}\n"
        return f"{rule}build {paths[0]}: r{self.key} {paths[1]}\n"

    def finish(self, store: Store) -> Entry:
        """Publishes the binary; raises CompileError, with the log kept, where there is none."""
        log = self.log.read_text(errors="replace") if self.log.exists() else ""
        if not self.binary.exists():
            kept = self._keep_failure(store)
            command = self.compiler.command(
                kept / self.source.name, kept / self.binary.name, self.target, include_dirs(self.spec)
            )
            raise diagnostics.compile_error(self.spec, self.target, shlex.join(command), log, str(kept))
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
            if key_of(self.spec, self.target) != self.key:  # the entry would be found once the edit is undone
                raise OSError("its sources changed while it was compiled")
            entry = store.publish(self.key, self.binary, meta)
        except OSError as error:
            warnings.warn(f"flashpage: {self.spec.name} is not kept: {error}", RuntimeWarning, stacklevel=2)
        else:
            store.remember(self.spec, self.target, self.key)
            return entry
        folder = Path(tempfile.mkdtemp(prefix="flashpage-"))
        write_entry(folder, self.binary, meta | {"key": self.key})
        temporary = read_entry(folder, self.key, is_kept=False)
        assert temporary is not None
        return temporary

    def _keep_failure(self, store: Store) -> Path:
        """Copies source and log to where they outlive the build."""
        try:
            kept = store.folder / FAILED / self.key
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(self.folder, kept)
        except OSError:
            kept = Path(tempfile.mkdtemp(prefix="flashpage-failed-"))
            shutil.copytree(self.folder, kept, dirs_exist_ok=True)
        return kept


def missing_error(spec: KernelSpec, target: Target, reason: str) -> KernelMissingError:
    """A kernel that is not built and cannot be built here, with the command that does it elsewhere."""
    text = shlex.quote(manifest.spec_text(spec))
    return KernelMissingError(
        f"kernel {spec.name} is not built for {target.name}, and {reason}. "
        f"Build it with: flashpage build --target {target.name} --spec {text}"
    )
