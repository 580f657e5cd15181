"""The wheels: built from the checkout with only g++, tagged for every Python, and complete after installation."""

from __future__ import annotations

import fcntl
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import programs
import pytest
import torch

from aot import specs
from flashpage import jit
from flashpage.base.dtypes import DType
from flashpage.kernels.choose import choose
from flashpage.kernels.options import Options
from flashpage.kernels.work import Problem

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
CHECKOUT = ("setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE", "csrc", "include", "templates", "flashpage", "aot")


def copy_of_checkout(folder: Path) -> Path:
    """The files that a build reads, without the products of earlier builds."""
    folder.mkdir()
    left_out = shutil.ignore_patterns("__pycache__", "lib", "structs.py", "aot_kernels", "*.egg-info")
    for name in CHECKOUT:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=left_out)
        else:
            shutil.copy2(source, folder / name)
    (folder / "README.md").touch()
    return folder


def build_wheel(checkout: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    code = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    command = [sys.executable, "-c", code, str(folder)]
    # Neither torch nor CUDA can be found during this build.
    environment = os.environ | {"CUDA_HOME": "/nonexistent", "PYTHONPATH": str(_without_torch(checkout))}
    return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)


def _without_torch(checkout: Path) -> Path:
    folder = checkout.parent / "no_torch"
    folder.mkdir(exist_ok=True)
    for name in ("torch", "numpy", "jinja2"):
        (folder / f"{name}.py").write_text(f"raise ImportError('{name} is not for builds')\n")
    return folder


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One copy for all worker processes of the session, with a wheel in the folder next to it."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "package"
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "checkout").exists():
            build_quickly_enough(copy_of_checkout(folder / "checkout"), folder / "wheel")
    return folder / "checkout"


def fingerprint(checkout: Path) -> str:
    """The fingerprint that a process in the checkout computes."""
    command = [sys.executable, "-c", "from flashpage.base import paths; print(paths.fingerprint())"]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=True).stdout.strip()


def build_quickly_enough(checkout: Path, folder: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = build_wheel(checkout, folder)
    assert result.returncode == 0, result.stdout + result.stderr
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert used < 60, "the limit is 30 s on two cores"


@pytest.fixture(scope="module")
def wheel(checkout: Path) -> Path:
    (found,) = (checkout.parent / "wheel").glob("*.whl")
    return found


@pytest.mark.rare
def test_one_wheel_for_every_python(checkout: Path, wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        dist_info = next(n for n in names if n.endswith(".dist-info/WHEEL")).rpartition("/")[0]
        assert "Root-Is-Purelib: false" in archive.read(f"{dist_info}/WHEEL").decode()
        metadata = archive.read(f"{dist_info}/METADATA").decode()
        info = json.loads(archive.read("flashpage/_build_info.json"))
    assert "Requires-Python: >=3.10" in metadata
    assert info["fingerprint"] == fingerprint(checkout)
    sources = {
        f"flashpage/{p.relative_to(checkout).as_posix()}"
        for folder in ("include", "templates")
        for p in (checkout / folder).rglob("*")
        if p.is_file()
    }
    modules = {p.relative_to(checkout).as_posix() for p in (checkout / "flashpage").rglob("*.py")}
    built = {"flashpage/lib/libflashpage.so", "flashpage/native/structs.py"}
    assert sources | modules | built | {"flashpage/py.typed", "flashpage/plan/report/plan.html"} <= names
    assert not any(n.startswith(("tests/", "csrc/", "aot/", "flashpage/aot_kernels/")) for n in names)


@pytest.mark.rare
def test_the_tag_says_which_glibc_is_needed(wheel: Path, tmp_path: Path) -> None:
    """An installer of an older system refuses the file, where the library could not be loaded."""
    with zipfile.ZipFile(wheel) as archive:
        library = archive.extract("flashpage/lib/libflashpage.so", tmp_path)
    versions = subprocess.run(["readelf", "-V", library], capture_output=True, text=True, check=True).stdout
    needed = max((int(a), int(b)) for a, b in re.findall(r"Name: GLIBC_(\d+)\.(\d+)", versions))
    major, minor = max(needed, (2, 17))
    assert wheel.name.endswith(f"-py3-none-manylinux_{major}_{minor}_{os.uname().machine}.whl")
    audit = subprocess.run([sys.executable, "-m", "auditwheel", "show", wheel], capture_output=True, text=True)
    assert f'"manylinux_{major}_{minor}_{os.uname().machine}"' in audit.stdout.replace("\n", " "), audit


@pytest.mark.rare
def test_the_library_needs_only_the_c_library(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        library = archive.extract("flashpage/lib/libflashpage.so", tmp_path)
    dynamic = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    needed = {line.split("[")[1].rstrip("]") for line in dynamic.splitlines() if "(NEEDED)" in line}
    assert needed <= {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "ld-linux-x86-64.so.2"}
    symbols = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True).stdout
    assert {line.split()[-1][:3] for line in symbols.splitlines()} == {"fp_"}


@pytest.mark.rare
def test_an_installed_wheel_finds_its_folders(checkout: Path, wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    python = str(tmp_path / "venv" / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(pip, check=True)
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))  # it comes after the wheel's own folder
    code = """
import flashpage
from flashpage import native as host
from flashpage.base import paths
assert (paths.include_dir() / "flashpage" / "params" / "params.h").is_file()
assert paths.include_dir().parent == paths.PACKAGE
assert paths.templates_dir().is_dir() and paths.templates_dir().parent == paths.PACKAGE
assert not paths.aot_dir().exists()
assert host.load().fp_cpu_threads() > 0
print(paths.PACKAGE, paths.fingerprint())
"""
    result = subprocess.run([python, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    package, digest = result.stdout.split()
    assert Path(package) == site / "flashpage"
    assert digest == fingerprint(checkout)


@pytest.mark.rare
def test_a_wheel_with_kernels_runs_without_a_compiler(checkout: Path, wheel: Path, tmp_path: Path) -> None:
    """Built with --aot after the other one, whose objects are used again; the README's lines run, with PATH empty."""
    decode = Options("paged", 32, 8, 128, 128, 16, *[DType.FLOAT32] * 3, uniform_q_len=1)
    spec, manifest = choose(Problem(decode, 4), torch.device("cpu")).spec, tmp_path / "used.json"
    assert spec in specs.cpu_specs()
    jit.write_manifest(manifest, [(spec, jit.Target("cpu", "avx2"))])
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    command += [f"--config-settings=--build-option=--aot={manifest}"]  # pip of Python 3.10 does not know -C
    subprocess.run([*command, "-w", str(tmp_path), str(checkout)], check=True, timeout=300)
    (with_kernels,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(with_kernels) as archive:
        archive.extractall(tmp_path / "installed")
    example = re.search(r"```python\n(.*?)```\s*```text\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert example
    code = f"""{example[1]}
import sys
assert flashpage.__file__.startswith({str(tmp_path / "installed")!r})
assert "jinja2" not in sys.modules
"""
    environment = {
        "PATH": "",
        "PYTHONPATH": str(tmp_path / "installed"),
        "FLASHPAGE_CACHE_DIR": str(tmp_path / "cache"),
    }
    out = programs.run(["-c", code], env=environment, cwd=tmp_path)
    assert (out.stdout, out.returncode) == (example[2], 0), out.stderr
    assert not (tmp_path / "cache").exists()


def test_an_old_setuptools_is_named(tmp_path: Path) -> None:
    """In one sentence, as without build isolation the environment's own setuptools builds."""
    code = "import sys; sys.modules['setuptools.command.bdist_wheel'] = None; import runpy; runpy.run_path(sys.argv[1])"
    result = subprocess.run(
        [sys.executable, "-c", code, ROOT / "setup.py"], cwd=tmp_path, capture_output=True, text=True
    )
    expected = "building flashpage needs setuptools 77 or newer: pip install 'setuptools>=77'\n"
    assert (result.returncode, result.stderr) == (1, expected)


def test_a_missing_compiler_is_named(tmp_path: Path) -> None:
    checkout = copy_of_checkout(tmp_path / "checkout")
    environment = os.environ | {"FLASHPAGE_CXX": "/nonexistent/g++"}
    command = [sys.executable, "setup.py", "-q", "build_host"]
    result = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    assert result.returncode != 0 and "/nonexistent/g++ is missing: install g++" in result.stderr


def test_a_clone_next_to_a_script_does_not_hide_the_package(tmp_path: Path) -> None:
    """A user's script lies next to a clone, whose folder is named flashpage and has no __init__.py."""
    (tmp_path / "flashpage").mkdir()
    script = tmp_path / "mine.py"
    script.write_text("import importlib.util\nprint(importlib.util.find_spec('flashpage').origin)\n")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    found = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, check=True).stdout.strip()
    assert found.endswith("flashpage/__init__.py"), found
