"""flash-attn's and FlashMLA's functions under their own module names; FlashInfer's are in tests/api/test_compat.py."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from flashpage import compat, flash_attn, flash_mla


class Package(NamedTuple):
    name: str
    inner: str  # the module that has the functions
    install: Callable[[], ModuleType]
    uninstall: Callable[[], None]
    served: ModuleType
    absent: str  # a function that flashpage does not have
    kept: frozenset[str]  # names that an installed package keeps


FLASH_ATTN = Package(
    "flash_attn",
    "flash_attn_interface",
    compat.install_flash_attn,
    compat.uninstall_flash_attn,
    flash_attn,
    "flash_attn_func",
    frozenset(),
)
FLASH_MLA = Package(
    "flash_mla",
    "flash_mla_interface",
    compat.install_flash_mla,
    compat.uninstall_flash_mla,
    flash_mla,
    "flash_attn_varlen_qkvpacked_func",
    frozenset({"flash_attn_varlen_func", "has_legacy"}),
)


@pytest.fixture(params=(FLASH_ATTN, FLASH_MLA), ids=lambda package: package.name)
def package(request: pytest.FixtureRequest) -> Iterator[Package]:
    yield request.param
    request.param.uninstall()
    assert not [name for name in sys.modules if name.partition(".")[0] == request.param.name]


def imported(module: str, *names: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    exec(f"from {module} import {', '.join(names)}", found)
    return found


def test_without_the_package(package: Package) -> None:
    assert package.install() is package.install()
    names = package.served.__all__
    for module in (package.name, f"{package.name}.{package.inner}"):
        found = imported(module, *names)
        assert all(found[name] is getattr(package.served, name) for name in names)
    with pytest.raises(ImportError, match=package.absent):
        imported(package.name, package.absent)
    with pytest.raises(ModuleNotFoundError, match="helpers"):
        imported(f"{package.name}.helpers", "anything")


def test_an_installed_package_keeps_the_rest(package: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / package.name
    folder.mkdir()
    names = *package.served.__all__, package.absent
    (folder / f"{package.inner}.py").write_text("\n".join(f"def {name}(): return 'theirs'" for name in names))
    (folder / "__init__.py").write_text(f"__version__ = 'x'\nfrom .{package.inner} import {', '.join(names)}")
    (folder / "helpers.py").write_text("def unpad(): return 'theirs'")
    monkeypatch.syspath_prepend(tmp_path)
    module = package.install()
    found = imported(package.name, *names)
    assert found[package.absent]() == imported(f"{package.name}.helpers", "unpad")["unpad"]() == "theirs"
    for name in package.served.__all__:
        assert (found[name] is getattr(package.served, name)) == (name not in package.kept)
    assert module.__version__ == "x"
