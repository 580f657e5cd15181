"""From specs to entries of a store: one kernel by one call of its compiler, many side by side through ninja."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import os
import subprocess
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..base.errors import CompileError
from ..kernels.spec import KernelSpec
from . import files, process, progress
from .cache import Entry, Store, jit_store
from .compilers import Compiler
from .job import Job
from .source import source_of
from .targets import Target

Kernel = tuple[KernelSpec, Target]
_WORK = "flashpage-build-"  # before the names of folders in TMPDIR
_POLL_SECONDS = 0.05
_REPORT_SECONDS = 30.0  # between lines that say which process is waited for
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
        """How long the compile took; 0 if the kernel was there already."""
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
    with _Build(store, compiler) as build:
        for kernel in kernels:
            build.take(*kernel)
        build.run(jobs)
    for kernel in build.built_elsewhere:  # by another process: wait for each
        with _Build(store, compiler) as alone:
            alone.take(*kernel, waits=True)
            alone.run()
        build.results |= alone.results
    return [build.results[kernel] for kernel in kernels]


def obtain(
    spec: KernelSpec,
    target: Target,
    store: Store,
    *,
    unusable: Entry | None = None,
) -> tuple[Entry, bool]:
    """The store's entry, compiled now where there is none; and whether it was. `unusable`: one that does not load.

    Where the store cannot be written (read-only, full, no home folder) the entry lies in a temporary folder, for the
    caller to remove (Entry.is_kept), and a warning says why.
    """
    with _Build(store, None) as build:
        build.take(spec, target, waits=True, unusable=unusable)
        build.run()
    result = build.results[spec, target]
    if result.error is not None:
        raise result.error
    assert result.entry is not None
    return result.entry, result.is_new


class _Build:
    """Jobs that are compiled together. Each is published, and its lock let go, as soon as it is done."""

    def __init__(self, store: Store, compiler: Compiler | None) -> None:
        self.results: dict[Kernel, BuildResult] = {}
        self.built_elsewhere: list[Kernel] = []
        self._store, self._compiler = store, compiler
        self._jobs: dict[str, Job] = {}
        self._locks: dict[str, contextlib.ExitStack] = {}
        self._end = contextlib.ExitStack()

    def __enter__(self) -> _Build:
        return self

    def __exit__(self, *_: object) -> None:
        self._end.close()

    @functools.cached_property
    def _work(self) -> Path:
        """A folder for the jobs, in place of those that killed processes left."""
        parent = Path(tempfile.gettempdir())
        files.sweep(parent, _WORK)
        self._store.sweep()
        return self._end.enter_context(files.scratch(parent, _WORK))

    def take(self, spec: KernelSpec, target: Target, *, waits: bool = False, unusable: Entry | None = None) -> None:
        """A kernel that the store has is a result. Any other is a job, but where another process compiles it:
        `built_elsewhere`, unless this one waits for it."""
        lock = self._end.enter_context(contextlib.ExitStack())
        try:
            source = source_of(spec, target, self._store.options(target))
            if not self._lock(lock, source.key, spec.name if waits else ""):
                self.built_elsewhere.append((spec, target))
                return
            entry = self._store.read_of(source.key, spec, target)
            if entry and not (unusable and unusable.meta["sha256"] == entry.meta["sha256"]):
                self.results[spec, target] = BuildResult(spec, target, entry)
            else:
                self._jobs[source.key] = Job.prepare(spec, target, source, self._work, self._compiler)
                self._locks[source.key] = lock
                return
        except CompileError as error:
            self.results[spec, target] = BuildResult(spec, target, error=error)
        except OSError as error:
            self.results[spec, target] = BuildResult(spec, target, error=_refused(spec, error))
        lock.close()

    def _lock(self, lock: contextlib.ExitStack, key: str, waits_for: str) -> bool:
        with contextlib.suppress(OSError):  # publish meets the same error, and tells it
            try:
                lock.enter_context(self._store.lock(key, blocking=False))
            except BlockingIOError:
                if not waits_for:
                    return False
                progress.say(f"waiting for another process that compiles {waits_for}")
                self._wait(lock, key, waits_for)
        return True

    def _wait(self, lock: contextlib.ExitStack, key: str, name: str) -> None:
        """Waits for a lock that another process holds, and reports now and then which process that is."""
        start = reported = time.monotonic()
        while True:
            time.sleep(_POLL_SECONDS)
            process.fail_if_stopped()
            with contextlib.suppress(BlockingIOError):
                lock.enter_context(self._store.lock(key, blocking=False))
                return
            if (now := time.monotonic()) - reported > _REPORT_SECONDS:
                reported, pid = now, self._store.lock_holder(key)
                holder = f"process {pid}" if pid else "another process"
                progress.say(
                    f"still waiting, since {now - start:.0f} s, for {holder}, which compiles {name}. "
                    "If it hangs, end it: this process then compiles the kernel."
                )

    def run(self, jobs: int | None = None) -> None:
        """Compiles all jobs: through ninja where there are several, and it is there."""
        ninja = process.ninja_program() if len(self._jobs) > 1 else None
        if ninja is not None and self._write_rules():
            with contextlib.suppress(OSError):  # ninja does not start, but a compiler may
                self._run_together(ninja, jobs)
            process.fail_if_stopped()  # which is an OSError, too
        for key in [key for key in self._locks if self._jobs[key].started.exists()]:
            self._finish(key)
        self._run_each(jobs or process.job_count(len(self._locks)))

    def _run_each(self, count: int) -> None:
        """Compiles the jobs that ninja has not started, `count` at a time."""
        running: collections.deque[tuple[str, contextlib.ExitStack]] = collections.deque()
        with contextlib.ExitStack() as ends:  # an exception ends all compilers
            for key in list(self._locks):
                if len(running) == count:
                    self._wait_for(*running.popleft())
                process.fail_if_stopped()
                job, compiler = self._jobs[key], ends.enter_context(contextlib.ExitStack())
                progress.say(f"compiling {job.spec.name} for {job.target.name} with {job.compiler.name}")
                try:
                    compiler.enter_context(job.running())
                except OSError as error:  # too many processes, most often
                    process.fail_if_stopped()
                    self._end_job(key, error=_refused(job.spec, error))
                else:
                    running.append((key, compiler))
            while running:
                self._wait_for(*running.popleft())

    def _wait_for(self, key: str, compiler: contextlib.ExitStack) -> None:
        compiler.close()
        if (entry := self._finish(key).entry) is not None:
            progress.say(f"compiled {entry.meta['name']} in {entry.meta['seconds']:.1f} s")

    def _write_rules(self) -> bool:
        """For ninja; whether there was room for them."""
        rules = "".join(job.ninja_rule() for job in self._jobs.values())
        try:
            (self._work / "build.ninja").write_bytes(os.fsencode(rules))  # paths are in no encoding that is known
        except OSError:  # each job alone then tells
            return False
        return True

    def _run_together(self, ninja: str, jobs: int | None) -> None:
        count = jobs or process.job_count(len(self._jobs))
        progress.say(f"compiling {len(self._jobs)} kernels, {count} at a time")
        command = [ninja, "-C", str(self._work), "-k", "0", "-j", str(count)]
        bar = progress.Bar(len(self._jobs), "compiled kernels")
        with process.running(command, self._work, subprocess.PIPE, {"NINJA_STATUS": _DONE}) as child:
            assert child.stdout is not None
            for line in child.stdout:
                if line.startswith(_DONE):
                    result = self._finish(line.removeprefix(_DONE).strip())
                    bar.advance(result.spec.name, failed=result.error is not None)
        bar.close()

    def _finish(self, key: str) -> BuildResult:
        """Publishes one job and lets its lock go."""
        job = self._jobs[key]
        try:
            return self._end_job(key, entry=job.finish(self._store), is_new=True)
        except CompileError as error:
            return self._end_job(key, error=error)
        except OSError as error:
            return self._end_job(key, error=_refused(job.spec, error))

    def _end_job(self, key: str, **outcome: Any) -> BuildResult:
        job = self._jobs[key]
        result = self.results[job.spec, job.target] = BuildResult(job.spec, job.target, **outcome)
        self._locks.pop(key).close()
        files.remove(job.folder)
        return result


def _refused(spec: KernelSpec, error: OSError) -> CompileError:
    return CompileError(
        f"kernel {spec.name} cannot be compiled: {error}. "
        "A compile takes child processes and temporary files (TMPDIR names another folder for them)."
    )
