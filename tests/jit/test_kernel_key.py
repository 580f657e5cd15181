"""A kernel's key covers everything that is compiled, and a process that finds the kernel does not render it."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jit_sandbox import Sandbox, toy

from aot import build as aot_build
from flashpage import jit, kernels
from flashpage.base import paths
from flashpage.base.dtypes import DType
from flashpage.jit import build, cache, compilers, job, source
from flashpage.jit.render import include_dirs, render
from flashpage.kernels import wgmma_source
from flashpage.kernels.spec import KernelSpec
from flashpage.variants import source as variant_source

LISTED = aot_build.listed(["sm_80", "sm_90a", "avx2"])
ONE_OF_EACH = {spec.kernel: (spec, target) for spec, target in LISTED}


@pytest.fixture
def sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    sandbox = Sandbox.create(tmp_path)
    sandbox.enter(monkeypatch)
    return sandbox


@pytest.mark.parametrize(
    ("kernel", "owner", "name", "changed"),
    [
        ("cpu_attention", variant_source, "logit_loads_by_token", lambda _: True),
        ("merge", DType, "cpp", property(lambda dtype: "double")),
        ("attention_sm80", DType, "widened", property(lambda dtype: DType.FLOAT32)),
        ("append", KernelSpec, "entry", property(lambda spec: "flashpage_renamed")),
        ("prefill_sm90", wgmma_source, "product_dtype", lambda spec: DType.FLOAT16),
    ],
)
def test_what_python_writes_changes_the_key(
    monkeypatch: pytest.MonkeyPatch, kernel: str, owner: Any, name: str, changed: Any
) -> None:
    spec, target = ONE_OF_EACH[kernel]
    before = source.key_of(spec, target)
    monkeypatch.setattr(owner, name, changed)
    assert source.key_of(spec, target) != before


@pytest.mark.parametrize(
    "header", ["kernels/helpers/append.h", "tile/rope/rope.h", "ptx/wgmma.h", "cpu/softmax.h", "params/params.h"]
)
def test_a_header_changes_the_keys_of_kernels_that_include_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, header: str
) -> None:
    before = keys_in_a_copy(tmp_path / "same", monkeypatch)
    changed = keys_in_a_copy(tmp_path / "changed", monkeypatch, header)
    assert before == {kernel: source.key_of(*pair) for kernel, pair in ONE_OF_EACH.items()}, (
        "a key must not depend on paths"
    )
    including = {
        kernel for kernel, (spec, _) in ONE_OF_EACH.items() if f"flashpage/{header}" in source.included(render(spec))
    }
    assert including and {kernel for kernel in before if before[kernel] != changed[kernel]} == including
    if header == "kernels/helpers/append.h":
        assert including == {"append"}


def keys_in_a_copy(folder: Path, monkeypatch: pytest.MonkeyPatch, header: str = "") -> dict[str, str]:
    """Keys over a copy of the include folder in which one header has one more line."""
    original = paths.include_dir()
    shutil.copytree(original, folder)
    if header:
        with open(folder / "flashpage" / header, "a") as file:
            file.write("// edited\n")
    with monkeypatch.context() as patch:
        patch.setattr(paths, "include_dir", lambda: folder)
        return {kernel: source.key_of(*pair) for kernel, pair in ONE_OF_EACH.items()}


@pytest.mark.parametrize("kernel", ONE_OF_EACH)
def test_headers_are_those_that_a_compiler_reads(kernel: str, tmp_path: Path) -> None:
    """Keys of CPU kernels also cover headers of branches for the card, because only a preprocessor skips these."""
    is_cpu, text = kernel.startswith("cpu_"), render(ONE_OF_EACH[kernel][0])
    (tmp_path / "kernel.cpp").write_text(text)
    of_cpu = compilers.fixed_flags(jit.Target.parse("avx2"))["g++"]
    flags = of_cpu if is_cpu else ["-std=c++20", "-D__CUDACC__", "-D__CUDA_ARCH__=900"]
    command = ["g++", "-x", "c++", "-M", *flags, f"-I{paths.include_dir()}", str(tmp_path / "kernel.cpp")]
    rule = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    files = {Path(name) for name in rule.replace("\\\n", " ").split() if name.startswith(str(paths.include_dir()))}
    read = {str(file.relative_to(paths.include_dir())) for file in files}
    known = set(source.included(text))
    assert read and read <= known
    assert is_cpu or read == known


def test_names_are_resolved_as_a_compiler_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quotes search the including file's folder first; brackets search the include folder only."""
    for name, text in {
        "a/first.h": '#include "second.h"\n  #  include <third.h>\n#include <vector>\n',
        "a/second.h": '#include "a/first.h"\n// #include "absent.h"\n',
        "a/third.h": "",
        "second.h": "",
        "third.h": '#include "a/second.h"',
        "unused.h": "",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(paths, "include_dir", lambda: tmp_path)
    assert set(source.included('int x;\n#include "a/first.h"\n')) == {"a/first.h", "a/second.h", "third.h"}
    assert set(source.included("#include <second.h>\n")) == {"second.h"}


def test_headers_of_two_folders(tmp_path: Path) -> None:
    """One name in two folders, a header outside of both, bytes that are not UTF-8: every header counts."""
    for name, content in {
        "package/a.h": b"",
        "own/a.h": b"",
        "own/k/kernel.h": b'#include <a.h>\n#include "../a.h"\n#include "../../outside.h"\n',
        "outside.h": b"// caf\xe9\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    folders, text = [tmp_path / "package", tmp_path / "own"], '#include "k/kernel.h"\n'
    found = [source.included(text, folders)]
    assert set(found[0]) == {"a.h", "k/kernel.h", "../outside.h"}
    for name in ("package/a.h", "own/a.h", "outside.h", "own/k/kernel.h"):
        with open(tmp_path / name, "a") as file:
            file.write("// edited\n")
        found.append(source.included(text, folders))
    assert all(before != after for before, after in itertools.pairwise(found))


@pytest.mark.parametrize("include", ["own", "x/../own"])
def test_an_include_folder_of_any_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, include: str) -> None:
    """ninja runs compilers in another folder; headers are identified by their path below the include folder."""
    own = dataclasses.replace(kernels.find("merge"), name="own", include=Path(include))
    (tmp_path / "x").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(kernels, "OTHERS", (own,))
    assert include_dirs(KernelSpec("own"))[1] == tmp_path / "own"


def test_a_header_edited_while_a_process_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an edit before the compile the key is the new header's; after one during it, nothing is kept."""
    folder, target = tmp_path / "include", jit.Target.parse("avx2")
    shutil.copytree(paths.include_dir(), folder)
    monkeypatch.setattr(paths, "include_dir", lambda: folder)
    spec, header = ONE_OF_EACH["cpu_attention"][0], folder / "flashpage" / "cpu" / "softmax.h"
    before, original = source.key_of(spec, target), header.read_text()
    header.write_text(original + "// edited\n")
    edited = source.key_of(spec, target)
    assert edited != before
    compiler = job.Job.running

    @contextlib.contextmanager
    def edit_meanwhile(of_job: job.Job) -> Iterator[None]:
        with compiler(of_job):
            yield
        header.write_text(original)

    monkeypatch.setattr(job.Job, "running", edit_meanwhile)
    store = cache.Store(tmp_path / "store")
    with pytest.warns(RuntimeWarning, match="its sources changed while it was compiled"):
        entry, is_new = build.obtain(spec, target, store)
    assert is_new and not entry.is_kept and store.read(edited) is None
    shutil.rmtree(entry.folder)


@pytest.mark.parametrize(("target", "compiler"), [("avx2", "g++"), ("sm_90a", "nvcc"), ("sm_90a", "nvrtc")])
def test_our_flags_change_the_key(monkeypatch: pytest.MonkeyPatch, target: str, compiler: str) -> None:
    spec, known = ONE_OF_EACH["cpu_attention" if compiler == "g++" else "merge"]
    assert known.name == target
    before, flags = source.key_of(spec, known), compilers.Compiler.flags
    monkeypatch.setenv("FLASHPAGE_CXX", "another-compiler -fsome-flag")
    assert source.key_of(spec, known) == before
    extra = {compiler: ["-fanother"]}
    monkeypatch.setattr(
        compilers.Compiler, "flags", lambda self, target: flags(self, target) + extra.get(self.name, [])
    )
    assert source.key_of(spec, known) != before


def memo() -> Path:
    """The remembered key of the toy kernel."""
    return cache.jit_store()._memo(toy(), jit.host_target())


def recall() -> cache.Entry | None:
    return cache.jit_store().recall(toy(), jit.host_target())


def test_a_process_renders_where_nothing_is_remembered(sandbox: Sandbox) -> None:
    """The first process renders the kernel; the next one does not."""
    build.obtain(toy(), jit.host_target(), cache.jit_store())
    cache.jit_store().forget()
    code = "import sys; get(toy()); print('jinja2' in sys.modules)"
    assert [sandbox.run(code, FLASHPAGE_CXX="/nowhere/g++") for _ in range(2)] == ["True\n", "False\n"]


def _key_of_another_entry(text: str) -> str:
    other, _ = build.obtain(toy(7), jit.host_target(), cache.jit_store())
    return f"{text.split()[0]} {other.folder.name}\n"


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: text[:-5],
        lambda text: "\0" * len(text),
        lambda text: f"{text.split()[0]} {'0' * 40}\n",
        lambda text: f"{text.split()[0]} ../{text.split()[1]}\n",
        lambda text: f"of-other-sources {text.split()[1]}\n",
        _key_of_another_entry,
    ],
    ids=["empty", "half", "cut key", "zeros", "no such entry", "path", "other sources", "another kernel"],
)
def test_a_wrong_memo_costs_a_rendering(sandbox: Sandbox, damage: Callable[[str], str]) -> None:
    build.obtain(toy(), jit.host_target(), cache.jit_store())
    text = memo().read_text()
    assert recall() is not None
    memo().write_text(damage(text))
    assert recall() is None
    compiles = sandbox.num_compiles()
    assert jit.get_kernel(toy()).spec == toy()
    assert sandbox.num_compiles() == compiles
    assert memo().read_text() == text
    assert sorted(path.name for path in sandbox.cache.iterdir() if path.name.startswith(".")) == [".keys", ".locks"]


def test_a_memo_that_cannot_be_read(sandbox: Sandbox) -> None:
    build.obtain(toy(), jit.host_target(), cache.jit_store())
    memo().unlink()
    memo().mkdir()
    assert jit.get_kernel(toy()).spec == toy()
    assert sandbox.num_compiles() == 1


def test_what_other_sources_remember_is_not_used(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry is intact, but it was built from the old sources."""
    build.obtain(toy(), jit.host_target(), cache.jit_store())
    template = sandbox.templates / "kernel.cpp.jinja"
    template.write_text(template.read_text() + "// edited\n")
    monkeypatch.setattr(paths, "fingerprint", lambda: "edited")
    assert recall() is None
    jit.get_kernel(toy())
    assert sandbox.num_compiles() == 2
    assert recall() is not None


def test_nothing_is_remembered_while_sources_change(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the fingerprint could be of the new sources while the key is of the old ones."""
    monkeypatch.setattr(paths, "is_settled", lambda: False)
    assert jit.get_kernel(toy()).spec == toy()
    assert not memo().exists()


def test_settled_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "_loading_since", time.time() + 60)
    assert paths.is_settled()
    monkeypatch.setattr(paths, "_loading_since", time.time() - 1)
    (tmp_path / "new.h").touch()
    for folder in ("include_dir", "templates_dir"):
        with monkeypatch.context() as patch:
            patch.setattr(paths, folder, lambda: tmp_path)
            assert not paths.is_settled()


def test_every_source_counts_in_the_fingerprint(tmp_path: Path) -> None:
    for name in ("package/a.py", "package/inner/b.py", "include/c.h", "templates/d.jinja"):
        (tmp_path / "x" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "x" / name).write_text("before")
    before = hash_of(tmp_path / "x")
    shutil.copytree(tmp_path / "x", tmp_path / "elsewhere")
    assert hash_of(tmp_path / "elsewhere") == before
    (tmp_path / "x" / "package" / "notes.txt").touch()
    (tmp_path / "x" / "package" / ".#a.py").symlink_to("an editor's lock")
    assert hash_of(tmp_path / "x") == before
    seen = {before}
    for file in sorted(path for path in (tmp_path / "elsewhere").rglob("*") if path.is_file()):
        file.write_text("edited")
        seen.add(hash_of(tmp_path / "elsewhere"))
        file.rename(file.with_stem("renamed"))
        seen.add(hash_of(tmp_path / "elsewhere"))
    assert len(seen) == 9


def hash_of(folder: Path) -> str:
    return paths.hash_sources(folder / "package", folder / "include", folder / "templates")


def test_the_spec_is_in_the_key(sandbox: Sandbox) -> None:
    """An entry records one spec, while the toy's source shows only some of its fields."""
    texts = {source.source_of(spec, jit.host_target()).text for spec in (toy(), dataclasses.replace(toy(), trace=True))}
    keys = {source.key_of(spec, jit.host_target()) for spec in (toy(), dataclasses.replace(toy(), trace=True))}
    assert (len(texts), len(keys)) == (1, 2)
    assert source.key_of(toy(logit="-score"), jit.host_target()) not in keys
