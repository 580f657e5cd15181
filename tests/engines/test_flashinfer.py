"""flashpage.compat next to real FlashInfers, in processes of their own: names of attention are flashpage's, and
everything else is what a process without flashpage.compat has.

Needs the folders that `python tests/support/get_flashinfer.py` makes below build/engines; `make test-engines` calls it.
Files of vLLM and SGLang say what engines import, where get_vllm.py and get_sglang.py have brought them.
"""

from __future__ import annotations

import ast
import functools
import json
import os
from collections.abc import Iterator
from typing import Any

import get_flashinfer
import programs
import pytest
from entry_points import ROOT
from flashinfer_program import PICKLED

from flashpage.engines.flashinfer.facade import PACKAGE, SUBMODULES

SUPPORT = ROOT / "tests" / "support"
# Imports of vLLM 0.26.0 and SGLang 0.5.15.post1 on the way to a first step, with attention and without.
IMPORTED = """
from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper, bmm_fp8, fp4_quantize
from flashinfer import BatchPrefillWithRaggedKVCacheWrapper, MultiLevelCascadeAttentionWrapper, fused_moe, sampling
from flashinfer import fast_decode_plan, mxfp8_quantize, nvfp4_block_scale_interleave, trtllm_fp4_block_scale_moe
from flashinfer.autotuner import AutoTuner, autotune
from flashinfer.cascade import merge_state
from flashinfer.comm import Mapping
from flashinfer.comm.mnnvl import CommBackend, TorchDistBackend
from flashinfer.decode import trtllm_batch_decode_with_kv_cache, trtllm_batch_decode_with_kv_cache_mla
from flashinfer.fused_moe.core import ActivationType
from flashinfer.gemm import fp8_blockscale_gemm_sm90
from flashinfer.jit import env
from flashinfer.mla import BatchMLAPagedAttentionWrapper
from flashinfer.norm import gemma_fused_add_rmsnorm, gemma_rmsnorm
from flashinfer.prefill import cudnn_batch_prefill_with_kv_cache, trtllm_batch_context_with_kv_cache
from flashinfer.rope import apply_rope_with_cos_sin_cache_inplace
from flashinfer.sampling import min_p_sampling_from_probs, top_k_top_p_sampling_from_probs
from flashinfer.utils import FP4Tensor
import flashinfer.mamba, flashinfer.quantization
"""
# Parameters in other places, by the version. No engine passes this one by position.
PLACES = {"0.6": {"fast_decode_plan(global_override_indptr_cpu) at 20"}, "0.7": set[str]()}

SERVED = {name for submodule in SUBMODULES for name in PACKAGE.served(submodule)}
HOLDERS = {"flashinfer", *(f"flashinfer.{submodule}" for submodule in SUBMODULES if submodule not in PACKAGE.kept)}

pytestmark = pytest.mark.slow


def imported_names(text: str) -> Iterator[tuple[str, str]]:
    """The modules of FlashInfer with names that a program imports, or asks of the package or by a pair of strings."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and not node.level and node.module:
            found = [(node.module, each.name) for each in node.names]
        elif isinstance(node, ast.Import):
            found = [(each.name, "") for each in node.names]
        elif isinstance(node, ast.Call):
            strings = [each.value if isinstance(each, ast.Constant) else None for each in node.args[:2]]
            is_pair = len(strings) == 2 and all(isinstance(each, str) for each in strings)
            found = [(str(strings[0]), str(strings[1]))] if is_pair else []
        elif isinstance(node, ast.Attribute):
            text = chain(node)
            found = [("flashinfer", text.partition(".")[2])] if text.startswith("flashinfer.") else []
        else:
            continue
        yield from ((module, name) for module, name in found if module.partition(".")[0] == "flashinfer")


def chain(node: ast.expr) -> str:
    """`a.b.c`, or nothing if it begins with anything but a name."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(names)]) if isinstance(node, ast.Name) else ""


@functools.cache
def asked_names() -> list[tuple[str, str]]:
    names = set(imported_names(IMPORTED))
    for engine in ("vllm", "sglang"):
        for path in get_flashinfer.ENGINES.glob(f"{engine}-[0-9]*/{engine}/**/*.py"):
            text = path.read_text(errors="replace")
            if "flashinfer" in text:
                names |= set(imported_names(text))
    return sorted((module, name) for module, name in names if not name or name.replace(".", "_").isidentifier())


@pytest.fixture(scope="module", params=get_flashinfer.VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    for folder in (get_flashinfer.PACKAGES, get_flashinfer.ENGINES / f"flashinfer-python-{request.param}"):
        if not folder.is_dir():
            pytest.skip(f"{folder.relative_to(ROOT)} is missing: run `python tests/support/get_flashinfer.py`")
    return request.param


@pytest.fixture(scope="module")
def processes(version: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """Descriptions by a process with flashpage.compat, and then by one without."""
    folder = tmp_path_factory.mktemp("flashinfer")
    tree = get_flashinfer.ENGINES / f"flashinfer-python-{version}"
    paths = tree, get_flashinfer.PACKAGES, ROOT, SUPPORT, SUPPORT / "flashinfer_tree"
    given = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "FLASHINFER_WORKSPACE_BASE": str(folder)}
    job, out = folder / "job.json", folder / "out.json"
    pickled = folder / "pickled"
    found = []
    for with_compat in (True, False):
        fields = {"compat": with_compat, "names": asked_names(), "pickled": str(pickled), "out": str(out)}
        job.write_text(json.dumps(fields))
        program = programs.run([SUPPORT / "flashinfer_program.py", job], env=given, cwd=folder, timeout=300)
        assert program.returncode == 0, program.stderr[-4000:]
        found.append(json.loads(out.read_text()))
    return found[0], found[1]


def test_every_other_name_is_flashinfers(processes: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """In all modules that can be imported without a card. Importing others fails in the same way."""
    ours, theirs = (each["modules"] for each in processes)
    assert list(ours) == list(theirs) and len(theirs) > 150
    changed = 0
    for module, names in theirs.items():
        if isinstance(names, list):
            assert ours[module] == names
            continue
        for name in {*names, *ours[module]}:
            if names.get(name) != ours[module].get(name):
                assert module in HOLDERS and name in SERVED, f"{module}.{name}: {ours[module].get(name)}"
                assert "flashpage." in ours[module][name][1]
                changed += 1
    assert changed > 70


def test_attention_is_flashpages(processes: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """The objects are, also after `importlib.reload`."""
    assert processes[0]["not ours"] == []


def test_what_engines_import(processes: tuple[dict[str, Any], dict[str, Any]], version: str) -> None:
    ours, theirs = (each["asked"] for each in processes)
    listed = {f"{module}:{name}" for module, name in imported_names(IMPORTED)}
    for key, value in theirs.items():
        name = key.rpartition(":")[2].rpartition(".")[2]
        if value != ours[key]:
            assert name in SERVED and "flashpage." in ours[key][1], f"{key}: {ours[key]}"
        elif value[0] == "error":  # 0.6.12 wants the CUDA runtime there
            assert key not in listed or (version == "0.6.12" and "flashinfer.comm" in key), f"{key}: {value}"
        else:
            assert name not in SERVED or "._" in key, f"{key}: {value}"


def test_parameters(processes: tuple[dict[str, Any], dict[str, Any]], version: str) -> None:
    """Programs for FlashInfer find every parameter and method, and pass the same arguments by position."""
    assert set(processes[1]["parameters"]) == PLACES[version[:3]]


def test_import_machinery(processes: tuple[dict[str, Any], dict[str, Any]], version: str) -> None:
    """Specs, versions, sources and files are those of a process without flashpage.compat."""
    ours, theirs = (each["asked of import"] for each in processes)
    assert ours == theirs
    assert ours["origins"] == ["__init__.py", "decode.py", "sampling.py", "fused_moe/core.py", None]
    assert ours["versions"] == [version, version]
    assert ours["source"] and ours["files"]


def test_pickled_objects(processes: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """A process without flashpage.compat reads what one with it has written, names of attention as flashpage's."""
    read = dict(zip(PICKLED, processes[1]["unpickled"], strict=True))
    assert read["BatchDecodeWithPagedKVCacheWrapper"][1].startswith("flashpage.")
    assert read["merge_state"][1].startswith("flashpage.")
    assert processes[1]["unpickled others"]


def test_flashinfer_imported_first(processes: tuple[dict[str, Any], dict[str, Any]], version: str) -> None:
    refused = processes[1]["refused"]
    assert f"flashinfer-python-{version}/flashinfer/__init__.py. Call install() before anything imports it." in refused
    assert refused.startswith("flashinfer is already imported from ") and "\n" not in refused
