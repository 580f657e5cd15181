"""Devices, markers, and one parallel build of all kernels that the collected cases need."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import re
import signal
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cases.case import Case
from native_build import quick_builds, share_builds

LOGGERS = (logging.root, logging.getLogger("flashpage"))
MARKERS = {
    "build": "tests of an alternating file with equal arguments of this mark use one build",
    "slow": "takes more than a few seconds",
    "rare": "takes paths that other tests take too, and seconds in compilers; only CI runs it (--rare), in halves",
    "cuda": "needs an NVIDIA card",
}


def pytest_configure(config: pytest.Config) -> None:
    for name, meaning in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")
    # A suite in the background of a script ignores SIGINT. Its children would ignore it, too, but tests interrupt them.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    share_builds()
    if not (config.getoption("rare") or os.environ.get("FLASHPAGE_CXX") or torch.cuda.is_available()):
        os.environ.update(quick_builds())  # half of the suite's compilers' time; CI's kernels are users'
    # Hundreds of processes import the same sources, and tests' files take half of their import to be parsed.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    _keep_freed_memory()
    # References are small, and torch's waiting threads would take cores from kernels and from tests' child processes.
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")  # saves the program that tests vector units: 9 s


def _keep_freed_memory() -> None:
    """Makes the allocator keep freed memory, because tests allocate and poison workspaces of equal sizes."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc
    if mallopt is not None:
        trim_threshold, mmap_threshold, top_pad = -1, -3, -2
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(mmap_threshold, 2**31 - 1)
        mallopt(top_pad, 64 << 20)


def devices() -> list[str]:
    """The CPU always; the first card if there is one, and the second if there are two."""
    return ["cpu", *(f"cuda:{i}" for i in range(min(torch.cuda.device_count(), 1)))]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" in metafunc.fixturenames:
        marks = {"cuda": [pytest.mark.cuda]}
        values = [pytest.param(name, marks=marks.get(name.split(":")[0], [])) for name in devices()]
        metafunc.parametrize("device", values, scope="session")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="skip slow tests, and most rows of long tables")
    parser.addoption("--rare", action="store_true", help="run rare tests too")
    parser.addoption(
        "--half",
        type=int,
        choices=(0, 1),
        help="run this half of the rare tests and of ALTERNATING, as CI does",
    )
    parser.addoption("--part", help="run this part of the tests: 2/7 is the third of seven")
    parser.addoption("--engines", action="store_true", help="run real engines of vLLM and SGLang too")


# Files whose tests take more than five seconds of CPU time together, mostly in compilers, in processes that they start
# and in importing transformers.
SLOW = {
    *("api/test_api_attention", "api/test_api_sparse", "api/test_cascade", "api/test_ops"),
    *("card/test_card_check", "engines/test_transformers_cache", "engines/test_transformers_masks"),
    *("engines/test_transformers_tokens", "engines/test_vllm_ops", "host/test_host_build"),
    *("host/test_host_packaging", "host/test_host_threads", "jit/test_aot", "jit/test_cache"),
    *("jit/test_compile_failures", "jit/test_jit", "kernels/test_latent_kernel", "project/test_examples"),
    *("engines/test_transformers_latents", "serving/test_latent_engine"),
    *("jit/test_kernel_key", "jit/test_trust", "kernels/test_a_new_kernel", "kernels/test_function_tiles"),
    *("kernels/test_prefill_kernel", "kernels/test_shared_memory", "net/test_bad_inputs"),
    *("net/test_faults", "net/test_faulty_disk", "net/test_fuzz", "net/test_soak", "planner/test_planner_properties"),
    *("planner/test_table_plans", "project/test_bench", "project/test_cli", "project/test_pages"),
    "project/test_selftest",
    *("serving/test_engine", "serving/test_forward_batch", "serving/test_graph_runner", "serving/test_parallel_ranks"),
}


# Rows that take seconds each: kernels on the host, whose paths mostly have other builds too, and programs.
ALTERNATING = {
    *("kernels/test_decode_formats", "kernels/test_decode_units", "kernels/test_function_tiles"),
    *("kernels/test_latent_kernel", "kernels/test_latent_rows", "kernels/test_many_rows"),
    *("kernels/test_merge_kernel", "kernels/test_prefill_kernel", "kernels/test_rotate_pages"),
    "kernels/test_widen_pages",
    *("project/test_bench", "project/test_examples"),
}

# Their processes take minutes of CPU time, which `make test` does not have: CI calls `make test-engines` next to it.
ENGINES = {"engines/test_flashinfer", "engines/test_sglang_engine", "engines/test_vllm_engine"}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves files of slow tests unread: their imports and tables take half of the time before the first test."""
    is_slow = f"{collection_path.parent.name}/{collection_path.stem}" in SLOW
    needs_card = collection_path.name == "card" and not torch.cuda.is_available()
    return True if config.getoption("fast") and (is_slow or needs_card) else None


def _leave_out_rare(config: pytest.Config, items: list[pytest.Item]) -> None:
    rare = [item for item in items if item.get_closest_marker("rare")]
    config.hook.pytest_deselected(items=rare)
    items[:] = [item for item in items if not item.get_closest_marker("rare")]


def _leave_out_half(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Every second build of alternating files and of rare tests stays. Rows whose names differ in a last number alone
    have one build, and so have rows of an equal `build` mark."""
    kept, left_out, builds = [], [], defaultdict[str, dict[object, int]](dict)
    for item in items:
        name, mark = f"{item.path.parent.name}/{item.path.stem}", item.get_closest_marker("build")
        if name in ALTERNATING or item.get_closest_marker("rare"):
            build = mark.args if mark else re.sub(r"-\d+\]$", "]", item.nodeid)
            number = builds[name].setdefault(build, len(builds[name]))
            (left_out if number % 2 != config.getoption("half") else kept).append(item)
        else:
            kept.append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


def _keep_part(config: pytest.Config, items: list[pytest.Item]) -> None:
    given = config.getoption("part")
    found = re.fullmatch(r"(\d+)/(\d+)", given)
    if not found or int(found[1]) >= int(found[2]):
        raise pytest.UsageError(f"--part {given}: pass I/N with I below N; 2/7 is the third of seven")
    number, parts = map(int, found.groups())
    config.hook.pytest_deselected(items=[item for i, item in enumerate(items) if i % parts != number])
    items[:] = items[number::parts]


def _leave_out_most(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps the fast tests; if a test has parameters, its first row and every 24th."""
    kept, left_out, rows = [], [], defaultdict[str, int](int)
    for item in items:
        row = rows[name := item.nodeid.partition("[")[0]]
        rows[name] += 1
        (left_out if item.get_closest_marker("slow") or row % 24 else kept).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


def _deal_out_slow_files(items: list[pytest.Item], workers: int) -> None:
    """Each worker process starts with an equal share of the items, in order: it begins with its slow files. A file is
    not cut, because its tests share fixtures."""
    quick: list[pytest.Item] = []
    slow: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        name = f"{item.path.parent.name}/{item.path.stem}"
        (slow[name] if name in SLOW else quick).append(item)
    dealt: list[list[pytest.Item]] = [[] for _ in range(workers)]
    for number, name in enumerate(slow):
        dealt[number % workers] += slow[name]
    num_items = len(items)
    items.clear()
    for worker, own in enumerate(dealt):
        missing = max(0, num_items * (worker + 1) // workers - len(items) - len(own))
        items += own + quick[:missing]
        del quick[:missing]
    items += quick


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("rare"):
        _leave_out_rare(config, items)
    if config.getoption("half") is not None:
        _leave_out_half(config, items)
    if config.getoption("fast"):
        _leave_out_most(config, items)
    if config.getoption("part"):
        _keep_part(config, items)
    if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 0)):
        _deal_out_slow_files(items, workers)
    card = pytest.mark.skip(reason="no NVIDIA card")
    engine = pytest.mark.skip(reason="real engines run with --engines, as in `make test-engines`")
    for item in items:
        if not config.getoption("engines") and f"{item.path.parent.name}/{item.path.stem}" in ENGINES:
            item.add_marker(engine)
        if item.get_closest_marker("cuda") and not torch.cuda.is_available():
            item.add_marker(card)


@pytest.fixture(scope="session")
def kernels(request: pytest.FixtureRequest) -> None:
    """Compiles the kernels of all collected tests that take a `case` and a `device`, in parallel."""
    from prebuild import prebuild

    wanted: dict[str, dict[Case, None]] = defaultdict(dict)
    for item in request.session.items:
        values = getattr(getattr(item, "callspec", None), "params", {})
        if isinstance(values.get("case"), Case) and "device" in values and values["case"].runs_on(values["device"]):
            wanted[values["device"]][values["case"]] = None
    for device, cases in wanted.items():
        prebuild(cases, device)


@pytest.fixture(scope="module")
def quick_kernels() -> Iterator[None]:
    """Kernels of the CPU that only this file needs compile quickly. With a card, nothing changes: its kernels take
    much longer, and files share them by the cache."""
    from prebuild import quick_builds

    with contextlib.nullcontext() if torch.cuda.is_available() else quick_builds():
        yield


@pytest.fixture(autouse=True)
def keep_loggers() -> Iterator[None]:
    """Engines and commands that a test starts in this process set levels, which decide where compile lines go."""
    levels = [logger.level for logger in LOGGERS]
    yield
    for logger, level in zip(LOGGERS, levels, strict=True):
        logger.setLevel(level)


@pytest.fixture
def on_the_device(device: str) -> Iterator[None]:
    """Tensors of a test are made on the device."""
    with torch.device(device):
        yield
