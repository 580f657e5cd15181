"""A card without kernels of its own: the package has PTX of compute_80 alone, and nothing compiles. Plans are then as
for an A100, the driver compiles the PTX, and a kernel that is not built is an error of one line.

Each claim is a program in its own process, whose package has a temporary folder of kernels. On the CPU the same
programs run with its own target, which tests them where there is no card.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from programs import run

from flashpage.base import env
from flashpage.jit import targets
from flashpage.jit.targets import FIRST_OF_ITS_OWN, PTX, Target

ROOT = Path(__file__).resolve().parents[2]
PROLOGUE = """
import json
from pathlib import Path
from flashpage.base import paths
paths.aot_dir = lambda: Path({folder!r})
device = {device!r}
"""
BATCHES = """
from cases.case import decode, prefill
batches = [
    decode("ptx-decode", "the longest request is cut, and a launch merges its partials", [9000, 17, 300, 1, 5000]),
    prefill("ptx-prefill", "a prompt, and appended rows", [700, 33, 129], [900, 300, 129], causal=True),
]
"""
BUILD = """
from aot.build import build_into
from flashpage import jit
from flashpage.kernels import devices
from prebuild import specs_of
devices.has_own_target = lambda sm: False  # as it will answer when the folder holds PTX alone
target = jit.Target.parse({target!r})
results = build_into(paths.aot_dir(), [(spec, target) for spec in specs_of(batches, device)])
print(json.dumps([[result.spec.kernel, str(result.error or "")] for result in results]))
"""
RUN = """
from flashpage import jit
from harness import run_case
for batch in batches:
    run_case(batch, device)
print(json.dumps(sorted({(spec.kernel, target.name) for spec, target in jit.used_specs()})))
"""
MISSING = """
from cases.case import decode
from flashpage.errors import KernelMissingError
from harness import run_case
try:
    run_case(decode("ptx-missing", "no kernel of this head dim is built", [3], head_dim=96), device)
except KernelMissingError as error:
    print(json.dumps(str(error)))
"""
INFO = """
from flashpage.cli import main
main(["info"])
"""


class Package:
    """The package with a folder of kernels and a cache of its own."""

    def __init__(self, device: str, folder: Path) -> None:
        self.device, self.folder, self.cache = device, folder / "kernels", folder / "cache"

    def run(self, code: str, *, compiles: bool = False, cache: Path | None = None) -> str:
        """Runs a program, and returns its output."""
        left_out = ("FLASHPAGE_CARD", "FLASHPAGE_JIT", "FLASHPAGE_CACHE_DIR")
        environment = {name: value for name, value in os.environ.items() if name not in left_out}
        environment |= {} if compiles else {"FLASHPAGE_JIT": "off"}
        environment["FLASHPAGE_CACHE_DIR"] = str(cache or self.cache)
        folders = (ROOT, ROOT / "tests" / "support", os.environ.get("PYTHONPATH", ""))
        environment["PYTHONPATH"] = os.pathsep.join(map(str, folders))
        prologue = PROLOGUE.format(folder=str(self.folder), device=self.device)
        done = run(["-c", prologue + code], env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def answer(self, code: str, **options: Any) -> Any:
        """Runs a program, and returns the JSON of its last line."""
        return json.loads(self.run(code, **options).splitlines()[-1])


@pytest.fixture(scope="module")
def target(device: str) -> str:
    """The target whose kernels the package has."""
    if device == "cpu":
        return targets.host_target().name
    if targets.device_info(0).sm < FIRST_OF_ITS_OWN:
        pytest.skip("this card's own kernels are those of an A100")
    return PTX


@pytest.fixture(scope="module")
def package(device: str, target: str, tmp_path_factory: pytest.TempPathFactory) -> Package:
    """With the kernels of the batches."""
    package = Package(device, tmp_path_factory.mktemp("package"))
    results = package.answer(BATCHES + BUILD.format(target=target), compiles=True)
    assert results and not any(error for _, error in results), results
    return package


def test_plans_run_with_the_packages_kernels(package: Package, target: str) -> None:
    """The results are the reference's, and no kernel comes from elsewhere."""
    used = package.answer(BATCHES + RUN)
    assert {name for _, name in used} == {target}
    if target == PTX:
        assert [kernel for kernel, _ in used] == ["attention_sm80", "merge"]


def test_a_missing_kernel_is_an_error_of_one_line(package: Package, target: str) -> None:
    told = package.answer(MISSING)
    assert f"is not built for {target}, and FLASHPAGE_JIT=off forbids compiling it now" in told
    assert f"flashpage build --target {target} --spec" in told and "\n" not in told


def test_info_says_that_ptx_alone_serves(package: Package, target: str) -> None:
    told = package.run(INFO)
    assert f"for {target}, in {package.folder}" in told
    if target == PTX:
        assert re.search(
            r"kernels that are built for it: \d of compute_80 \(PTX\); others are missing, as nothing", told
        )
        assert "plans use an A100's kernels in this card's shared memory, and not those of sm_" in told


def test_info_before_anything_is_built(device: str, target: str, tmp_path: Path) -> None:
    package = Package(device, tmp_path)
    told = package.run(INFO, compiles=True)
    assert f"0 kernels in {package.folder}" in told
    if target == PTX:
        assert re.search(r"^cuda:0 .*sm_\d", told, re.MULTILINE)
        assert "kernels that are built for it: none; others are compiled for sm_" in told


def test_with_a_compiler_the_devices_own_kernels_serve(device: str, package: Package, target: str) -> None:
    """On a card they come from this machine's cache, else they are compiled now."""
    own = target if device == "cpu" else Target("cuda", targets.device_info(0).sm).name
    used = package.answer(BATCHES + RUN, compiles=True, cache=env.cache_dir())
    assert {name for _, name in used} == {own}
