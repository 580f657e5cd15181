"""From specs to entries of a store: one kernel by one call of its compiler, many side by side through ninja."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..base.errors import CompileError
from ..kernels.spec import KernelSpec
from . import process, progress
from .cache import Entry, Store, jit_store
from .compilers import Compiler
from .job import Job
from .source import source_of
from .targets import Target

Kernel = tuple[KernelSpec, Target]
_DONE = "done "  # before what ninja prints of a finished rule


@dataclasses.dataclass(frozen=True)
class BuildResult:
    """What became of one kernel of a build."""

    spec: KernelSpec
    target: Target
    entry: Entry | None = None  # None: failed
    is_new: bool = False  # False: the store had it
    error: CompileError | None = None

    @property
    def seconds(self) -> float:
        return self.entry.meta["seconds"] if self.entry and self.is_new else 0.0

    @property
    def registers(self) -> int | None:
        """A thread's, as ptxas reports; None for the CPU."""
        return self.entry.meta.get("registers") if self.entry else None

    @property
    def spill_bytes(self) -> int | None:
        """Stores and loads of registers that did not fit; None for the CPU."""
        return self.entry.meta.get("spill_bytes") if self.entry else None

    @property
    def serial_products(self) -> int | None:
        """Warnings that warpgroup products run one after the other; None for the CPU."""
        return self.entry.meta.get("serial_products") if self.entry else None


def build_specs(
    specs: Iterable[KernelSpec], targets: Sequence[Target], folder: Path | None = None, jobs: int | None = None
) -> list[BuildResult]:
    """Builds every spec for every target of its backend."""
    kernels = [(spec, target) for spec in specs for target in targets if target.backend == spec.backend]
    return build_kernels(kernels, folder, jobs)


def build_kernels(
    kernels: Iterable[Kernel], folder: Path | None = None, jobs: int | None = None, *, compiler: Compiler | None = None
) -> list[BuildResult]:
    """Builds what `folder` (default: the cache) does not hold yet, side by side; a failed one does not stop the others.

    `jobs`: compilers at a time, default process.job_count. `compiler`: instead of the one that find_compiler chooses.
    """
    store = Store(folder.absolute()) if folder else jit_store()
    kernels = list(dict.fromkeys(kernels))
    ninja = process.ninja_program()
    if len(kernels) == 1 or ninja is None:
        return [_build_alone(*kernel, store, compiler) for kernel in kernels]
    with tempfile.TemporaryDirectory(prefix="flashpage-") as work, contextlib.ExitStack() as locks:
        batch = _Batch(store, Path(work), locks, compiler)
        batch.take(kernels)
        batch.run(ninja, jobs)
    for kernel in batch.built_elsewhere:  # by another process: wait for each
        batch.results[kernel] = _build_alone(*kernel, store, compiler)
    return [batch.results[kernel] for kernel in kernels]


def obtain(
    spec: KernelSpec,
    target: Target,
    store: Store,
    *,
    unusable: Entry | None = None,
    compiler: Compiler | None = None,
) -> tuple[Entry, bool]:
    """The store's entry, compiled now where there is none; and whether it was. `unusable`: one that does not load.

    Where the store cannot be written (read-only, full, no home folder) the entry lies in a temporary folder, for the
    caller to remove (Entry.is_kept), and a warning says why.
    """
    source = source_of(spec, target)
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # publish meets the same error, and tells it
            try:
                stack.enter_context(store.lock(source.key, blocking=False))
            except BlockingIOError:
                progress.say(f"waiting for another process that compiles {spec.name}")
                stack.enter_context(store.lock(source.key))
        entry = store.read(source.key)
        if entry and not (unusable and unusable.meta["sha256"] == entry.meta["sha256"]):
            return entry, False
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="flashpage-")))
        job = Job.prepare(spec, target, source, work, compiler)
        progress.say(f"compiling {spec.name} for {target.name} with {job.compiler.name}")
        job.run_alone()
        entry = job.finish(store)
        progress.say(f"compiled {spec.name} in {entry.meta['seconds']:.1f} s")
        return entry, True


def _build_alone(spec: KernelSpec, target: Target, store: Store, compiler: Compiler | None) -> BuildResult:
    try:
        entry, is_new = obtain(spec, target, store, compiler=compiler)
    except CompileError as error:
        return BuildResult(spec, target, error=error)
    return BuildResult(spec, target, entry, is_new)


class _Batch:
    """The jobs of one ninja run. Each is published, and its lock let go, as soon as it is done."""

    def __init__(self, store: Store, work: Path, locks: contextlib.ExitStack, compiler: Compiler | None) -> None:
        self.results: dict[Kernel, BuildResult] = {}
        self.built_elsewhere: list[Kernel] = []
        self._store, self._work, self._compiler = store, work, compiler
        self._jobs: dict[str, Job] = {}
        self._locks: dict[str, contextlib.ExitStack] = {}
        self._all_locks = locks

    def take(self, kernels: list[Kernel]) -> None:
        """Sorts kernels into those that are there, those that another process builds now, and our own jobs."""
        for spec, target in kernels:
            try:
                source = source_of(spec, target)
            except CompileError as error:
                self.results[spec, target] = BuildResult(spec, target, error=error)
                continue
            lock = self._all_locks.enter_context(contextlib.ExitStack())
            try:
                lock.enter_context(self._store.lock(source.key, blocking=False))
            except BlockingIOError:
                self.built_elsewhere.append((spec, target))
                continue
            except OSError:
                pass  # as in obtain
            if entry := self._store.read(source.key):
                self.results[spec, target] = BuildResult(spec, target, entry)
                lock.close()
                continue
            try:
                self._jobs[source.key] = Job.prepare(spec, target, source, self._work, self._compiler)
                self._locks[source.key] = lock
            except CompileError as error:
                self.results[spec, target] = BuildResult(spec, target, error=error)
                lock.close()

    def run(self, ninja: str, jobs: int | None) -> None:
        """Compiles all jobs."""
        if not self._jobs:
            return
        (self._work / "build.ninja").write_text("".join(job.ninja_rule() for job in self._jobs.values()))
        count = jobs or process.job_count(len(self._jobs))
        progress.say(f"compiling {len(self._jobs)} kernels, {count} at a time")
        command = [ninja, "-C", str(self._work), "-k", "0", "-j", str(count)]
        bar = progress.Bar(len(self._jobs), "compiled kernels")
        with process.running(command, subprocess.PIPE, {"NINJA_STATUS": _DONE}) as child:
            assert child.stdout is not None
            for line in child.stdout:
                if line.startswith(_DONE):
                    self._finish(line.removeprefix(_DONE).strip(), bar)
        for key in list(self._locks):  # what ninja did not report: it failed to start
            self._finish(key, bar)
        bar.close()

    def _finish(self, key: str, bar: progress.Bar) -> None:
        """Publishes one job and lets its lock go."""
        job = self._jobs[key]
        try:
            result = BuildResult(job.spec, job.target, job.finish(self._store), is_new=True)
        except CompileError as error:
            result = BuildResult(job.spec, job.target, error=error)
        self.results[job.spec, job.target] = result
        self._locks.pop(key).close()
        shutil.rmtree(job.folder, ignore_errors=True)
        bar.advance(job.spec.name, failed=result.error is not None)
