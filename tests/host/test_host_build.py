"""`setup.py build_host` rebuilds files that include a changed file, and no others."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from flashpage.base import paths
from flashpage.native.library import _newer_source

ROOT = Path(__file__).resolve().parents[2]
WORDS = """
#include "flashpage/tile/mask/lane_bits.h"
extern "C" __attribute__((visibility("default"))) int fp_bytes(int tile_kv) {
  return flashpage::lane_word_bytes(tile_kv);
}
"""
PYPROJECT = '[project]\nname = "small"\nversion = "1"\n[tool.setuptools]\npackages = []\n'
ONE = 'extern "C" __attribute__((visibility("default"))) int fp_one() { return 1; }\n'


class Tree:
    """A checkout with two small sources in place of the host library's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(ROOT / "include", folder / "include")
        (folder / "csrc" / "inner").mkdir(parents=True)
        for name in ("base", "native"):
            (folder / "flashpage" / name).mkdir(parents=True)
        for name in (
            "setup.py",
            "csrc/exports.map",
            "csrc/abi_structs.py",
            "csrc/flashpage.h",
            "csrc/plan_call.h",
            "flashpage/base/paths.py",
        ):
            shutil.copy2(ROOT / name, folder / name)
        self.write("pyproject.toml", PYPROJECT)
        self.write("csrc/inner/words.cpp", WORDS)
        self.write("csrc/one.cpp", ONE)

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def edit(self, name: str, old: str, new: str) -> None:
        text = (self.folder / name).read_text()
        assert old in text, f"{name} has changed: let this test edit another line"
        self.write(name, text.replace(old, new))

    def build(self, **environment: str) -> set[str]:
        """Builds; returns the objects that were compiled."""
        before = self.objects()
        command = [sys.executable, "setup.py", "-q", "build_host"]
        result = subprocess.run(
            command, cwd=self.folder, env=os.environ | environment, capture_output=True, text=True, timeout=300
        )
        assert result.returncode == 0, result.stderr
        return {name for name, time in self.objects().items() if before.get(name) != time}

    def objects(self) -> dict[str, int]:
        objects = self.folder / "build" / "host"
        return {p.relative_to(objects).as_posix(): p.stat().st_mtime_ns for p in objects.rglob("*.o")}

    def library(self) -> ctypes.CDLL:
        """Loads the library under a new name, as a process loads each name once."""
        built = self.folder / "flashpage" / "lib" / "libflashpage.so"
        copy = built.with_name(f"{uuid.uuid4()}.so")
        shutil.copy2(built, copy)
        return ctypes.CDLL(str(copy))

    def fingerprint(self) -> str:
        function = self.library().fp_abi_fingerprint
        function.restype = ctypes.c_char_p
        return function().decode()


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    made = Tree(tmp_path / "someone's $checkout #1")  # make and shells quote each of these
    assert made.build() == {"one.o", "inner/words.o"}
    return made


def test_an_edit_after_the_build_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call into a library that is older than its sources warns; an unrelated header is none of them."""
    tree = Tree(tmp_path)
    tree.build()
    monkeypatch.setattr(paths, "PACKAGE", tmp_path / "flashpage")
    library = tmp_path / "flashpage" / "lib" / "libflashpage.so"
    assert _newer_source(library) is None
    (tmp_path / "include" / "flashpage" / "cpu" / "lanes.h").touch()
    assert _newer_source(library) is None
    (tmp_path / "include" / "flashpage" / "tile" / "mask" / "lane_bits.h").touch()
    assert _newer_source(library) == "include/flashpage/tile/mask/lane_bits.h"
    tree.build()
    assert _newer_source(library) is None


def test_only_files_that_read_a_changed_header_are_compiled_again(tree: Tree) -> None:
    assert tree.build() == set()
    assert tree.library().fp_bytes(64) == 4
    tree.edit("include/flashpage/plan/mask_cells.h", "tile_kv > 128 ? 8 : 4", "tile_kv > 128 ? 8 : 2")
    assert tree.build() == {"inner/words.o"}
    assert tree.library().fp_bytes(64) == 2
    lane_bits = (tree.folder / "include/flashpage/tile/mask/lane_bits.h").read_text()
    doubled = "namespace flashpage {\nconstexpr int doubled(int tile_kv) { return 2 * lane_word_bytes(tile_kv); }\n}\n"
    tree.write("include/flashpage/tile/mask/lane_bits.h", lane_bits + doubled)
    assert tree.build() == {"inner/words.o"}
    tree.edit("csrc/inner/words.cpp", "lane_word_bytes", "doubled")
    assert tree.build() == {"inner/words.o"}
    assert tree.library().fp_bytes(64) == 4


def test_another_command_compiles_everything_again(tree: Tree) -> None:
    assert tree.build(FLASHPAGE_CXX="g++ -DNDEBUG") == {"one.o", "inner/words.o"}
    assert tree.build(FLASHPAGE_CXX="g++ -DNDEBUG") == set()


def test_a_field_changes_the_python_module_with_the_library(tree: Tree) -> None:
    shutil.copy2(ROOT / "csrc" / "abi.cpp", tree.folder / "csrc")
    assert tree.build() == {"abi.o"}
    module, fingerprint = tree.folder / "flashpage" / "native" / "structs.py", tree.fingerprint()
    assert f'FINGERPRINT = "{fingerprint}"' in module.read_text() and '("added",' not in module.read_text()
    tree.edit("csrc/flashpage.h", "struct fp_problem {", "struct fp_problem {\n  int64_t added;")
    assert tree.build() == {"abi.o"}
    assert f'FINGERPRINT = "{tree.fingerprint()}"' in module.read_text() and '("added",' in module.read_text()
    assert tree.fingerprint() != fingerprint


def test_a_layout_that_python_does_not_see_fails_the_build(tree: Tree) -> None:
    shutil.copy2(ROOT / "csrc" / "abi.cpp", tree.folder / "csrc")
    module = (tree.folder / "flashpage" / "native" / "structs.py").read_text()
    tree.edit("csrc/flashpage.h", "struct fp_tables {", "struct alignas(128) fp_tables {")
    with pytest.raises(AssertionError, match=r"(?s)static assertion failed.*fp_tables.*did not build"):
        tree.build()
    assert (tree.folder / "flashpage" / "native" / "structs.py").read_text() == module
    tree.edit("csrc/flashpage.h", "alignas(128) fp_tables {", "fp_tables : fp_problem {")
    with pytest.raises(AssertionError, match=r"csrc/flashpage.h:\d+: `struct fp_tables : fp_problem {` is no plain"):
        tree.build()


def test_a_removed_source_leaves_the_library(tree: Tree) -> None:
    assert tree.library().fp_one() == 1
    (tree.folder / "csrc" / "one.cpp").unlink()
    assert tree.build() == set()
    assert not hasattr(tree.library(), "fp_one")


def test_a_library_that_did_not_link_is_linked_by_the_next_build(tree: Tree) -> None:
    tree.write("csrc/one.cpp", "int absent();\n" + ONE.replace("return 1", "return absent()"))
    with pytest.raises(AssertionError, match="did not build"):
        tree.build()
    tree.write("csrc/absent.cpp", "int absent() { return 2; }\n")
    assert tree.build() == {"absent.o"}
    assert tree.library().fp_one() == 2
    tree.edit("csrc/exports.map", "fp_*", "fp_b*")
    tree.build()
    assert not hasattr(tree.library(), "fp_one")
