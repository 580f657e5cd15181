"""flashpage under FlashInfer's names: modules, small functions, and names that are refused."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import pickle
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import flashpage
from flashpage import CapabilityError, FlashpageError, RunError, compat, utils

NAMES = [
    "BatchAttention",
    "BatchAttentionWithAttentionSinkWrapper",
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
    "BatchMLAPagedAttentionWrapper",
    "BatchPODWithPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
    "BlockSparseAttentionWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper",
    "PODWithPagedKVCacheWrapper",
    "VariableBlockSparseAttentionWrapper",
    "append_paged_kv_cache",
    "append_paged_mla_kv_cache",
    "fast_decode_plan",
    "get_batch_indices_positions",
    "get_seq_lens",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "packbits",
    "segment_packbits",
    "single_decode_with_kv_cache",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
    "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
]
IMPORTS = """
from flashinfer import (BatchAttentionWithAttentionSinkWrapper, BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper, fast_decode_plan, get_seq_lens,
    nvfp4_quantize_append_paged_kv_cache_with_slot_mapping)
from flashinfer.cascade import MultiLevelCascadeAttentionWrapper, merge_state
from flashinfer.decode import (CUDAGraphBatchDecodeWithPagedKVCacheWrapper, trtllm_batch_decode_with_kv_cache,
    trtllm_batch_decode_with_kv_cache_mla, _grouped_size_compiled_for_decode_kernels)
from flashinfer.prefill import trtllm_batch_context_with_kv_cache
from flashinfer.mla import BatchMLAPagedAttentionWrapper
from flashinfer.page import append_paged_kv_cache
from flashinfer.quantization import segment_packbits
from flashinfer.utils import FP4Tensor, get_device_sm_count, get_trtllm_gen_multi_ctas_kv_counter_bytes
import flashinfer.decode, flashinfer.sparse as sparse, flashinfer
"""


@pytest.fixture
def flashinfer() -> Iterator[types.ModuleType]:
    yield compat.install()
    compat.uninstall()


def test_imports_of_engines(flashinfer: types.ModuleType) -> None:
    found: dict[str, Any] = {}
    exec(IMPORTS, found)
    assert found["fast_decode_plan"] is flashpage.fast_decode_plan
    assert found["merge_state"] is flashpage.merge_state
    assert found["sparse"] is flashpage.sparse
    assert found["flashinfer"] is flashinfer and flashinfer.decode is flashpage.decode
    assert importlib.util.find_spec("flashinfer") is flashinfer.__spec__
    assert flashinfer.__version__ == compat.FLASHINFER_VERSION
    assert set(NAMES) <= set(dir(flashinfer)) and set(compat.SUBMODULES) <= set(dir(flashinfer))


@pytest.mark.parametrize("name", NAMES)
def test_names(name: str, flashinfer: types.ModuleType) -> None:
    """Names of the package, registered or not: `import flashpage as flashinfer`."""
    assert getattr(flashinfer, name) is getattr(flashpage, name)
    assert name in flashpage.__all__


def test_what_is_not_attention_is_missing(flashinfer: types.ModuleType) -> None:
    """Modules and names that flashpage lacks raise ImportError, so programs with a fallback go on."""
    with pytest.raises(ModuleNotFoundError, match=r"flashinfer\.sampling"):
        importlib.import_module("flashinfer.sampling")
    with pytest.raises(ModuleNotFoundError, match=r"flashinfer\.jit"):  # flashpage's own is not imported again
        importlib.import_module("flashinfer.jit")
    assert importlib.util.find_spec("flashinfer.fused_moe") is None
    with pytest.raises(ImportError, match="top_k_top_p_sampling_from_probs"):
        exec("from flashinfer import top_k_top_p_sampling_from_probs")
    with pytest.raises(AttributeError, match="'rmsnorm': flashpage stands in its place"):
        flashinfer.rmsnorm  # noqa: B018


def test_install_twice(flashinfer: types.ModuleType) -> None:
    assert compat.install() is flashinfer
    compat.uninstall()
    assert "flashinfer" not in sys.modules and "flashinfer.decode" not in sys.modules
    compat.uninstall()


def test_another_flashinfer_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    other = types.ModuleType("flashinfer")
    monkeypatch.setitem(sys.modules, "flashinfer", other)
    with pytest.raises(FlashpageError, match="flashinfer is already imported"):
        compat.install()
    compat.uninstall()
    assert sys.modules["flashinfer"] is other


def test_importing_compat_does_nothing() -> None:
    program = "import sys, flashpage.compat; assert not {'flashinfer', 'torch'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------- next to an installed FlashInfer

INSTALLED = {  # a FlashInfer of a few lines: attention, other names in the same modules, and other modules
    "__init__": """
from .attention import BatchAttention, RangesWrapper
from .decode import BatchDecodeWithPagedKVCacheWrapper, theirs_alone
from .mla import xqa_mla
from .prefill import single_prefill_with_kv_cache
from .quantization import mxfp8_quantize, segment_packbits
__version__ = "0.0.fake"
""",
    "decode": """
from .utils import round_up
class BatchDecodeWithPagedKVCacheWrapper: is_theirs = True
class BatchDecodeMlaWithPagedKVCacheWrapper: is_theirs = True
def trtllm_batch_decode_with_kv_cache(): return "theirs"
def theirs_alone(): return round_up(5, 4)
""",
    "prefill": """
from .decode import BatchDecodeWithPagedKVCacheWrapper
def single_prefill_with_kv_cache(): return "theirs"
def helper(): return BatchDecodeWithPagedKVCacheWrapper
class BatchPrefillWithPagedKVCacheWrapper: is_theirs = True
""",
    "attention/__init__": "from ._core import BatchAttention, RangesWrapper",
    "attention/_core": """
from ..prefill import BatchPrefillWithPagedKVCacheWrapper
class BatchAttention: pass
class RangesWrapper(BatchPrefillWithPagedKVCacheWrapper): pass
""",
    "mla": "def xqa_mla(): return 'theirs'",
    "quantization": """
def mxfp8_quantize(): return "theirs"
def segment_packbits(): return "theirs"
""",
    "utils": """
def round_up(x, y): return "theirs"
def _get_range_buf(): return "theirs"
""",
    "sampling": "from .utils import _get_range_buf as top_k_top_p_sampling_from_probs",
    "comm/__init__": "from . import mnnvl",
    "comm/mnnvl": "import flashinfer.sampling\nclass TorchDistBackend: pass",
}


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    for name, text in INSTALLED.items():
        path = tmp_path / "flashinfer" / f"{name}.py"
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield compat.install()
    compat.uninstall()
    assert "flashinfer" not in sys.modules


def test_attention_is_flashpages(installed: types.ModuleType) -> None:
    found: dict[str, Any] = {}
    exec(
        "from flashinfer import BatchDecodeWithPagedKVCacheWrapper as top, single_prefill_with_kv_cache as prefill\n"
        "from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper as inner, fast_decode_plan as plan\n"
        "from flashinfer.decode import trtllm_batch_decode_with_kv_cache as table\n"
        "from flashinfer.prefill import helper",
        found,
    )
    assert found["top"] is found["inner"] is found["helper"]() is flashpage.BatchDecodeWithPagedKVCacheWrapper
    assert found["prefill"] is flashpage.single_prefill_with_kv_cache
    assert found["plan"] is flashpage.fast_decode_plan
    assert found["table"] is flashpage.decode.trtllm_batch_decode_with_kv_cache
    assert installed.segment_packbits is flashpage.segment_packbits


def test_everything_else_is_flashinfers(installed: types.ModuleType) -> None:
    """Names that flashpage refuses or lacks, and whole modules; FlashInfer's modules use their own helpers."""
    found: dict[str, Any] = {}
    exec(
        "from flashinfer import mxfp8_quantize, theirs_alone, xqa_mla as mla\n"
        "from flashinfer.decode import BatchDecodeMlaWithPagedKVCacheWrapper as old_mla\n"
        "from flashinfer.sampling import top_k_top_p_sampling_from_probs as sample\n"
        "from flashinfer.comm.mnnvl import TorchDistBackend\nimport flashinfer.comm.mnnvl",
        found,
    )
    assert found["mxfp8_quantize"]() == found["theirs_alone"]() == found["sample"]() == "theirs"
    assert found["mla"]() == "theirs" and found["old_mla"].is_theirs
    assert installed.__version__ == "0.0.fake"
    with pytest.raises(ModuleNotFoundError, match=r"flashinfer\.gemm"):
        importlib.import_module("flashinfer.gemm")
    spec = importlib.util.find_spec("flashinfer")
    assert spec is not None and spec.origin is not None and spec.origin.endswith("flashinfer/__init__.py")
    assert "theirs_alone" in inspect.getsource(sys.modules["flashinfer.decode"])


def test_a_class_keeps_its_base(installed: types.ModuleType) -> None:
    """FlashInfer's classes that flashpage lacks are built on FlashInfer's others."""
    assert installed.BatchAttention is flashpage.BatchAttention and installed.RangesWrapper.is_theirs
    prefill = importlib.import_module("flashinfer.prefill")
    assert prefill.BatchPrefillWithPagedKVCacheWrapper is flashpage.BatchPrefillWithPagedKVCacheWrapper
    assert importlib.reload(prefill).single_prefill_with_kv_cache is flashpage.single_prefill_with_kv_cache


def test_specs_can_be_copied(installed: types.ModuleType) -> None:
    spec = importlib.import_module("flashinfer.decode").__spec__
    assert spec is not None and copy.deepcopy(spec).origin == spec.origin == pickle.loads(pickle.dumps(spec)).origin


def test_uninstall_gives_flashinfer_back(installed: types.ModuleType) -> None:
    assert compat.install() is installed
    compat.uninstall()
    again = importlib.import_module("flashinfer")
    assert again is not installed and again.BatchDecodeWithPagedKVCacheWrapper.is_theirs
    with pytest.raises(FlashpageError, match="flashinfer is already imported from"):
        compat.install()
    del sys.modules["flashinfer"]
    again = compat.install()
    assert again.BatchDecodeWithPagedKVCacheWrapper is flashpage.BatchDecodeWithPagedKVCacheWrapper


def test_a_flashinfer_that_fails_is_no_flashinfer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own error comes out, and nothing is left over."""
    (tmp_path / "flashinfer").mkdir()
    (tmp_path / "flashinfer" / "__init__.py").write_text("import a_module_that_is_missing")
    monkeypatch.syspath_prepend(tmp_path)
    before = list(sys.meta_path)
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_missing"):
        compat.install()
    assert sys.meta_path == before and "flashinfer" not in sys.modules


# ---------------------------------------------------------------- refused backends

WORKSPACE = torch.empty(1 << 20, dtype=torch.uint8)


@pytest.mark.parametrize("backend", ["cutlass", "trtllm-gen", "cute-dsl", "cudnn", "xqa"])
@pytest.mark.parametrize(
    "wrapper",
    [name for name in NAMES if name.startswith(("BatchDecodeWithPaged", "BatchPrefillWith", "BlockSp", "Variable"))
     and "Shared" not in name],
)  # fmt: skip
def test_backends_are_refused(wrapper: str, backend: str) -> None:
    with pytest.raises(CapabilityError, match=f"backend='{backend}' is not part of flashpage"):
        getattr(flashpage, wrapper)(WORKSPACE, backend=backend)


# ---------------------------------------------------------------- a variant in place of a compiled module


@pytest.mark.parametrize("causal", [False, True])
def test_jit_modules(causal: bool) -> None:
    generator = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(9, heads, 64, generator=generator) for heads in (4, 2, 2))
    bias = torch.randn(9, generator=generator)
    variant = flashpage.Variant(logit="score + bias[kv_idx]", tensors={"bias": bias})
    mask_mode = utils.MaskMode.CAUSAL.value if causal else utils.MaskMode.NON_CAUSAL.value
    expected = flashpage.single_prefill_with_kv_cache(q, k, v, causal=causal, variant=variant, return_lse=True)
    given = {"mask_mode": mask_mode, "return_lse": True}
    found = flashpage.single_prefill_with_kv_cache_with_jit_module(variant, q, k, v, **given)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    expected = flashpage.single_decode_with_kv_cache(q[0], k, v, window_left=4, variant=variant)
    found = flashpage.single_decode_with_kv_cache_with_jit_module(variant, q[0], k, v, window_left=4)
    assert torch.equal(found, expected)


def test_jit_modules_that_are_none() -> None:
    q, variant = torch.randn(3, 2, 64), flashpage.Variant(logit="score * 2.0")
    for function, query in (
        (flashpage.single_decode_with_kv_cache_with_jit_module, q[0]),
        (flashpage.single_prefill_with_kv_cache_with_jit_module, q),
    ):
        with pytest.raises(CapabilityError, match=r"jit_module=.* pass a flashpage\.Variant"):
            function(types.SimpleNamespace(run=None), query, q, q)
        with pytest.raises(RunError, match="1 values after v"):
            function(variant, query, q, q, 0.5)
    with pytest.raises(CapabilityError, match="mask_mode=2 is not supported"):
        flashpage.single_prefill_with_kv_cache_with_jit_module(variant, q, q, q, mask_mode=2)


# ---------------------------------------------------------------- MLA's pages


def test_append_mla(device: str) -> None:
    """Latents and rotated keys are written to strided views of one cache."""
    lens, before, page = torch.tensor([20, 3, 0, 33]), torch.tensor([4, 0, 0, 32]), 16
    counts = (lens + page - 1) // page
    indptr = torch.cat([torch.zeros(1), counts.cumsum(0)]).int()
    indices = torch.randperm(9, generator=torch.Generator().manual_seed(2))[: int(indptr[-1])].int()
    append_indptr = torch.cat([torch.zeros(1), (lens - before).cumsum(0)]).int()
    nnz = int(append_indptr[-1])
    requests, positions = flashpage.get_batch_indices_positions(append_indptr, lens, nnz)
    ckv, kpe = torch.randn(nnz, 512).to(torch.bfloat16), torch.randn(nnz, 64).to(torch.bfloat16)
    cache = torch.zeros(9, page, 576, dtype=torch.bfloat16, device=device)
    last = (lens - 1).clamp(min=0) % page + 1
    where = [t.to(device) for t in (requests, positions)]
    pages = [t.to(device) for t in (indices, indptr, last.int())]
    new = (ckv.to(device), kpe.to(device))
    flashpage.append_paged_mla_kv_cache(*new, *where, cache[..., :512], cache[..., 512:], *pages)
    expected = torch.zeros_like(cache, device="cpu")
    for row, (request, position) in enumerate(zip(requests.tolist(), positions.tolist(), strict=True)):
        slot = int(indices[int(indptr[request]) + position // page]), position % page
        expected[slot] = torch.cat([ckv[row], kpe[row]])
    assert torch.equal(cache.cpu(), expected)


def test_errors_of_append_mla() -> None:
    numbers, new = (torch.zeros(1, dtype=torch.int32),) * 2, torch.zeros(1, 64)
    cache, pages = torch.zeros(1, 4, 64), [torch.tensor(n, dtype=torch.int32) for n in ([0], [0, 1], [1])]
    with pytest.raises(RunError, match=r"append_ckv has shape \(1, 1, 64\): pass \[nnz, dim\]"):
        flashpage.append_paged_mla_kv_cache(new[None], new, *numbers, cache, cache, *pages)
    with pytest.raises(RunError, match=r"kpe_cache has shape \(4, 64\): pass \[pages, page_size, dim\]"):
        flashpage.append_paged_mla_kv_cache(new, new, *numbers, cache, cache[0], *pages)
    with pytest.raises(RunError, match="ckv_cache=None"):
        flashpage.append_paged_mla_kv_cache(new, new, *numbers, None, cache, *pages)


# ---------------------------------------------------------------- flashinfer.utils


def test_arithmetic_of_utils() -> None:
    assert [utils.next_positive_power_of_2(n) for n in (-1, 0, 1, 2, 3, 64, 65)] == [1, 1, 1, 2, 4, 64, 128]
    assert [utils.last_positive_power_of_2(n) for n in (1, 2, 3, 64, 65)] == [1, 2, 2, 64, 64]
    assert (utils.ceil_div(7, 3), utils.ceil_div(6, 3), utils.round_up(7, 3), utils.round_up(6, 3)) == (3, 2, 9, 6)


def test_types_of_utils() -> None:
    assert utils.canonicalize_torch_dtype("bfloat16") is utils.canonicalize_torch_dtype(torch.bfloat16)
    with pytest.raises(RunError, match="dtype='randn' is no torch dtype"):
        utils.canonicalize_torch_dtype("randn")
    assert utils.is_float8(torch.zeros(1).to(torch.float8_e5m2)) and not utils.is_float8(torch.zeros(1))
    slopes = utils.get_alibi_slopes(4)
    assert slopes.tolist() == [0.25, 0.0625, 0.015625, 0.00390625]
    modes = [
        (kind.__name__, entry.name, entry.value) for kind in (utils.MaskMode, utils.TensorLayout) for entry in kind
    ]
    assert modes == [
        ("MaskMode", "NON_CAUSAL", 0),
        ("MaskMode", "CAUSAL", 1),
        ("MaskMode", "CUSTOM", 2),
        ("MaskMode", "MULTIITEMSCORING", 3),
        ("TensorLayout", "NHD", 0),
        ("TensorLayout", "HND", 1),
    ]


def test_questions_about_the_cpu() -> None:
    cpu = torch.device("cpu")
    assert not utils.device_support_pdl(cpu) and not utils.is_sm90a_supported(cpu)
    with pytest.raises(RunError, match="device=cpu is no CUDA device"):
        utils.get_compute_capability(cpu)
    assert utils.determine_attention_backend(cpu, 0, False, False, torch.float16, torch.float16) == "fa2"


@pytest.mark.cuda
def test_questions_about_a_card() -> None:
    card = torch.device("cuda:0")
    major, minor = torch.cuda.get_device_capability(card)
    assert utils.get_compute_capability(card) == (major, minor)
    assert utils.is_sm90a_supported(card) == (major == 9) and utils.device_support_pdl(card) == (major >= 9)
    assert utils.get_device_sm_count(card) == torch.cuda.get_device_properties(card).multi_processor_count
