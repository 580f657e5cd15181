"""Makes the files of a release, and tries each where nothing else is installed: `make release`.

The committed tree is packed as an sdist, and wheels for x86_64 and aarch64 are made from it, with the CPU kernels of
aot/specs.py inside. zig compiles the host library against an old glibc, and everything of aarch64. A file passes if
twine accepts its metadata, if auditwheel finds that it runs on manylinux_2_28 or older, and if it works after
`pip install` in an empty environment with an empty HOME, neither g++ nor nvcc on PATH: the README's ten lines, the demo
and a model of transformers. The files are in build/release/dist; the table at the end says what was tried.

`--cuda` adds flashpage_kernels, a wheel with the kernels of common cards (aot/wheel.py), for which nvcc needs some
fifteen minutes on two cores at first. All of them are then found where the wheel of x86_64 was tried.

FLASHPAGE_ARM_PYTHON is a command that starts an aarch64 Python with torch, for instance in qemu-aarch64; without it the
wheel of aarch64 is made but not tried.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from attempts import ROOT, Attempts, Row, found

sys.path.insert(0, str(ROOT))
from aot import CPU_TARGETS

OUT = ROOT / "build" / "release"
DIST = OUT / "dist"
GLIBC = (2, 28)
TOOLS = ("auditwheel", "mypy", "pyright", "twine", "ziglang")


class Release(Attempts):
    def __init__(self, only: str | None) -> None:
        super().__init__()
        self.only = only
        self.tools = Path(sys.executable)  # until they are installed

    # ------------------------------------------------------------ making

    def check_version(self, is_draft: bool) -> None:
        """One version in all places, a heading for it in the changelog, and nothing that is not committed."""
        version = found(r'^version = "(.*)"', "pyproject.toml")
        others = {
            "flashpage/base/version.py": found(r'^VERSION = "(.*)"', "flashpage/base/version.py"),
            "CITATION.cff": found(r"^version: (.*)", "CITATION.cff"),
        }
        self.note("one version", "".join(f" {name} has {v}" for name, v in others.items() if v != version))
        if is_draft:
            return
        changes = (ROOT / "CHANGELOG.md").read_text()
        open_changes = re.search(r"^## Unreleased\n+(?!## )\S", changes, re.MULTILINE)
        has_heading = re.search(rf"^## {re.escape(version)}\b", changes, re.MULTILINE)
        self.note("CHANGELOG.md", "" if has_heading and not open_changes else f"put all changes under ## {version}")
        tags = subprocess.run(["git", "tag", "--list", f"v{version}"], cwd=ROOT, capture_output=True, text=True).stdout
        self.note("the tag is new", f"v{version} exists: raise the version" if tags else "")
        changed = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True).stdout
        self.note("all is committed", f"{len(changed.splitlines())} files are not" if changed else "")

    def install_tools(self) -> None:
        self.tools = self.environment("tools", OUT / "tools")
        self.install("tools", self.tools, "-c", ROOT / "constraints.txt", *TOOLS)

    def make_sdist(self) -> Path:
        """The sdist of the last commit; returns the folder that it unpacks to."""
        tree = OUT / "tree"
        tree.mkdir()
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
        subprocess.run(["tar", "-x", "-C", str(tree)], input=archive, check=True)
        self.step("sdist", sys.executable, "-m", "build", "-q", "--sdist", "--no-isolation", "-o", DIST, ".", cwd=tree)
        (sdist,) = DIST.glob("*.tar.gz")
        with tarfile.open(sdist) as packed:
            packed.extractall(OUT / "unpacked", filter="data")
        (unpacked,) = (OUT / "unpacked").iterdir()
        self.step("sdist: make help", "make", "help", cwd=unpacked, expected="make demo")
        return unpacked

    def make_wheel(self, machine: str, unpacked: Path) -> Path | None:
        """g++ compiles the kernels of this machine, because its code is what the tests run."""
        tree = OUT / machine
        shutil.copytree(unpacked, tree)
        zig = f"{self.tools} -m ziglang c++ -target {machine}-linux-gnu.{GLIBC[0]}.{GLIBC[1]} -s"
        variable = "CXX" if machine == os.uname().machine else "FLASHPAGE_CXX"
        environment = {k: v for k, v in os.environ.items() if k not in ("CXX", "FLASHPAGE_CXX")} | {variable: zig}
        option = f"--config-settings=--build-option=--aot={','.join(CPU_TARGETS[machine])}"
        pip = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", option)
        self.step(f"{machine}: wheel", *pip, "-w", DIST, tree, env=environment)
        wheel = next(DIST.glob(f"*{machine}.whl"), None)
        if wheel is not None:
            self.audit(wheel)
        return wheel

    def audit(self, wheel: Path) -> None:
        """auditwheel's own tag is old enough, and the file has it in its name."""
        name = f"{wheel.name} ({wheel.stat().st_size / 1e6:.2f} MB)"
        shown = self.step(f"auditwheel show {name}", self.tools, "-m", "auditwheel", "show", wheel)
        tags = [(int(a), int(b)) for a, b in re.findall(r'manylinux_(\d+)_(\d+)_\w+"', shown)]
        problem = "" if tags and max(tags) <= GLIBC else f"auditwheel says {tags}"
        named = re.search(r"manylinux_(\d+)_(\d+)_", wheel.name)
        if not problem and (named is None or (int(named[1]), int(named[2])) > GLIBC):
            problem = "its name says something else"
        self.note(f"{wheel.name} runs on manylinux_{GLIBC[0]}_{GLIBC[1]}", problem)

    def make_kernels_wheel(self, targets: str) -> Path | None:
        """Built in the tree of the x86_64 wheel: sources that differ would not find the kernels."""
        options = [f"--target={target}" for target in targets.split(",") if target]
        command = (sys.executable, "-m", "aot.wheel", *options, "--output", DIST, "--kernels", OUT / "kernels")
        environment = dict(os.environ) | {"PYTHONPATH": str(OUT / "x86_64")}
        self.step(f"kernels: {targets or 'the usual targets'}", *command, env=environment, cwd=OUT / "x86_64")
        wheel = next(DIST.glob("flashpage_kernels-*.whl"), None)
        size = f" ({wheel.stat().st_size / 1e6:.2f} MB)" if wheel else ""
        self.note(f"kernels: wheel{size}", "" if wheel else "there is none")
        return wheel

    # ------------------------------------------------------------ trying

    def try_in_an_empty_environment(self, file: Path) -> None:
        """Installs a wheel, or the sdist, with all that it depends on; then runs programs without compilers."""
        folder = OUT / f"try-{file.name}"
        home = folder / "home"
        home.mkdir(parents=True)
        kind = "sdist" if file.suffix == ".gz" else "wheel"
        python = self.environment(kind, folder / "venv")
        building = {"HOME": str(home), "PATH": os.environ["PATH"] if kind == "sdist" else "/nonexistent"}
        kept = ("PIP_", "SSL_", "REQUESTS_", "http", "HTTP")
        building |= {name: value for name, value in os.environ.items() if name.startswith(kept)}
        self.install(kind, python, f"{file}[hf]", env=building)
        environment = {"HOME": str(home), "PATH": os.environ["PATH"] if kind == "sdist" else "/nonexistent"}
        self.try_programs(kind, [str(python)], environment, folder)

        if kind == "wheel":
            mypy = (self.tools, "-m", "mypy", "--strict", f"--python-executable={python}")
            self.step("wheel: mypy --strict of the ten lines", *mypy, "ten_lines.py", cwd=folder)
            pyright = (self.tools, "-m", "pyright", f"--pythonpath={python}")
            self.step("wheel: pyright of the ten lines", *pyright, "ten_lines.py", cwd=folder)

    def try_kernels(self, kernels: Path, wheel: Path) -> None:
        """Adds the kernels to the environment in which the wheel was tried."""
        folder = OUT / f"try-{wheel.name}"
        python, kept = folder / "venv" / "bin" / "python", {"HOME": str(folder / "home"), "PATH": "/nonexistent"}
        self.install("kernels", python, "--no-index", kernels, env=kept)
        script = ROOT / ".ci" / "shipped_kernels.py"
        shown = self.step("kernels: found by their specs", python, script, env=kept, cwd=folder, expected="for sm_")
        if shown:
            self.rows.append(Row(shown.strip(), 0, "passed"))

    def try_on_arm(self, wheel: Path) -> None:
        command = os.environ.get("FLASHPAGE_ARM_PYTHON")
        if not command:
            self.rows.append(Row("aarch64: programs", 0, "not tried: FLASHPAGE_ARM_PYTHON is not set"))
            return
        folder = OUT / f"try-{wheel.name}"
        (folder / "home").mkdir(parents=True)
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder / "installed")
        environment = {"HOME": str(folder / "home"), "PATH": "/usr/bin:/bin", "PYTHONPATH": str(folder / "installed")}
        self.try_programs("aarch64", shlex.split(command), environment | {"FLASHPAGE_JIT": "off"}, folder)

    def try_programs(self, kind: str, python: list[str], environment: dict[str, str], folder: Path) -> None:
        self.readme_and_demo(kind, python, environment, folder)
        for what, command, expected in (
            ("flashpage info", ["-m", "flashpage", "info"], ""),
            ("a model of transformers", [ROOT / "examples" / "transformers_generate.py"], ""),
            ("every CPU kernel against torch", [ROOT / ".ci" / "small_table.py"], "all agree"),
        ):
            if kind == "aarch64" and "transformers" in what:
                continue
            self.step(f"{kind}: {what}", *python, *command, env=environment, cwd=folder, expected=expected)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--draft", action="store_true", help="allow open changes in CHANGELOG.md and uncommitted files")
    parser.add_argument("--cuda", action="store_true", help="also the wheel with kernels of cards; needs nvcc")
    parser.add_argument("--targets", default="", help="of --cuda, with commas between (default: those of aot/wheel.py)")
    parser.add_argument("--only", choices=sorted(CPU_TARGETS), help="one machine's wheel")
    given = parser.parse_args()
    for old in OUT.glob("*") if OUT.exists() else ():
        if old.name not in ("tools", "kernels"):  # kernels are found by a hash of their sources: old ones do no harm
            shutil.rmtree(old)
    DIST.mkdir(parents=True)
    release = Release(given.only)
    release.check_version(given.draft)
    release.install_tools()
    unpacked = release.make_sdist()
    machines = [given.only] if given.only else sorted(CPU_TARGETS)
    wheels = {machine: release.make_wheel(machine, unpacked) for machine in machines}
    kernels = release.make_kernels_wheel(given.targets) if given.cuda and "x86_64" in wheels else None
    release.step("twine check --strict", release.tools, "-m", "twine", "check", "--strict", *sorted(DIST.iterdir()))
    for machine, wheel in wheels.items():
        if wheel is not None and machine == os.uname().machine:
            release.try_in_an_empty_environment(wheel)
            if kernels is not None:
                release.try_kernels(kernels, wheel)
        elif wheel is not None:
            release.try_on_arm(wheel)
    release.try_in_an_empty_environment(next(DIST.glob("*.tar.gz")))
    return release.show()


if __name__ == "__main__":
    sys.exit(main())
