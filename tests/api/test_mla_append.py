"""append_paged_mla_kv_cache in fp8: what attention reads of rows that were written, and refusals."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import pytest
import torch
from native_build import shared_library, traits_flags

import flashpage
from flashpage import CapabilityError, RunError, native
from flashpage.base.dtypes import DType
from flashpage.kernels.latent_formats import PACKED
from flashpage.kernels.spec import KernelSpec

pytestmark = pytest.mark.usefixtures("quick_kernels")

PAGE, PAGES, TOKENS = 4, 5, 9
ROWS, CACHE = torch.ones(TOKENS, 512), torch.zeros(PAGES, PAGE, 512, dtype=torch.float8_e4m3fn)
FORMS = ["numbers", "tokens", *PACKED]


class Cache:
    """An empty cache of a format, and new tokens of two requests; entry 4 is padding."""

    def __init__(self, form: str, device: str = "cpu") -> None:
        self.form, self.is_packed = form, form in PACKED
        generator = torch.Generator().manual_seed(5)
        kpe = PACKED[form].head_dims[1] if self.is_packed else 64
        factors = 2.0 ** torch.arange(-4, 5)[:, None]  # rows of other sizes
        self.rows = (torch.randn(TOKENS, 512 + kpe, generator=generator) * factors).bfloat16().to(device)
        self.rows[2] = 0
        if self.is_packed:
            shape = (PAGES, PAGE, PACKED[form].row_bytes)
            self.caches: list[Any] = [torch.full(shape, 255, dtype=torch.uint8, device=device), None]
        else:
            filled = torch.full((PAGES, PAGE, 576), math.nan, device=device).to(torch.float8_e4m3fn)
            self.caches = [filled[..., :512], filled[..., 512:]]
        self.scales: dict[str, Any] = {}
        if form == "numbers":
            self.scales = {"ckv_scale": 0.25, "kpe_scale": 0.5}
        elif form == "tokens":
            array = torch.full((PAGES, PAGE, 4), math.nan, device=device)
            self.scales = {"ckv_scale_arr": array, "kpe_scale": torch.tensor([0.125], device=device)}
        ints = lambda *values: torch.tensor(values, dtype=torch.int32, device=device)
        self.places = (ints(0, 0, 0, 0, -1, 1, 1, 1, 1), ints(2, 3, 4, 5, -1, 0, 1, 2, 3))
        self.lists = (ints(3, 1, 4), ints(0, 2, 3), ints(2, 4))
        self.slots = ints(14, 15, 4, 5, -1, 16, 17, 18, 19)

    def append(self) -> None:
        parts = (self.rows, None) if self.rows.shape[1] == 512 else (self.rows[:, :512], self.rows[:, 512:])
        form = {"kv_row_format": self.form} if self.is_packed else self.scales
        flashpage.append_paged_mla_kv_cache(*parts, *self.places, *self.caches, *self.lists, **form)

    def read(self) -> torch.Tensor:
        """Each row, by attention to one token alone; K's other columns from the scores of unit queries."""
        device, kpe = self.rows.device, self.rows.shape[1] - 512
        wrapper = flashpage.BatchMLASparseAttentionWrapper(torch.empty(4 << 20, dtype=torch.uint8, device=device))
        sizes: dict[str, Any] = {"num_heads": max(1, kpe), "head_dim_ckv": 512, "head_dim_kpe": kpe, "page_size": PAGE}
        form: dict[str, Any] = {"kv_data_type": torch.float8_e4m3fn}
        cache: dict[str, Any] = {"ckv_cache": self.caches[0], "kpe_cache": self.caches[1]}
        if self.is_packed:
            form, cache = {"kv_row_format": self.form}, {"kv_cache": self.caches[0]}
        wrapper.plan(self.slots[:, None], **sizes, **form, sm_scale=1.0, q_data_type=torch.bfloat16)
        query = torch.zeros(TOKENS, max(1, kpe), 512 + kpe, dtype=torch.bfloat16, device=device)
        for i in range(kpe):
            query[:, i, 512 + i] = 1
        out, lse = wrapper.run(query=query, **cache, return_lse=True, **self.scales)
        return torch.cat([out[:, 0].float(), lse * math.log(2)], 1)[:, : 512 + kpe]


@pytest.mark.parametrize("form", FORMS)
def test_rows_are_read_as_they_were_written(form: str, device: str) -> None:
    cache = Cache(form, device)
    cache.append()
    found, given = cache.read(), cache.rows.float()
    is_token = torch.arange(TOKENS, device=device) != 4
    error, most = (found - given)[is_token].abs(), given[is_token].abs().amax(1, keepdim=True)
    least = most * 2.0**-15 if form != "numbers" else 0.5 * 2.0**-10
    rest = slice(PACKED[form].quantised if cache.is_packed else 512, None)
    assert (error <= given[is_token].abs() * 2.0**-4 + least + 0.5 * 2.0**-10).all()
    if cache.is_packed:
        assert (error[:, rest] <= given[is_token][:, rest].abs() * 1e-6 + 1e-6).all()  # a sum's logarithm is added
    memory = cache.caches[0].view(torch.uint8)
    unused = torch.ones(PAGES * PAGE, dtype=torch.bool)
    unused[cache.slots[is_token].cpu().long()] = False
    if form != "deepseek_v4":
        assert (memory.flatten(0, 1).cpu()[unused] >= 127).all()  # NaN


@pytest.mark.parametrize("form", FORMS)
def test_the_kernel_on_the_host(form: str) -> None:
    """It writes the bytes that the CPU writes."""
    expected, cache = Cache(form), Cache(form)
    expected.append()
    name = form if cache.is_packed else "scaled"
    dims = (cache.rows.shape[1], 512)
    spec = KernelSpec("append_latent", q_dtype=DType.BFLOAT16, head_dim_qk=dims[0], head_dim_vo=512, latent_format=name)
    first, second = cache.caches
    params = native.AppendLatentParams(
        ckv=cache.rows.data_ptr(),
        ckv_row_stride=cache.rows.stride(0),
        kpe=cache.rows[:, 512:].data_ptr(),
        kpe_row_stride=cache.rows.stride(0),
        k=native.KvView(first.data_ptr(), first.stride(0), first.stride(1), 0),
        batch_indices=cache.places[0].data_ptr(),
        positions=cache.places[1].data_ptr(),
        kv_indices=cache.lists[0].data_ptr(),
        kv_indptr=cache.lists[1].data_ptr(),
        nnz=TOKENS,
        shared_scale=0.25 if form == "numbers" else 1.0,
        tail_scale=0.5 if form == "numbers" else 1.0,
        page=native.make_fast_div(PAGE),
    )
    if second is not None:
        params.v = native.KvView(second.data_ptr(), second.stride(0), second.stride(1), 0)
    if form == "tokens":
        params.k_scale, params.k_scale_stride = cache.scales["ckv_scale_arr"].data_ptr(), 1
        params.v_scale = cache.scales["kpe_scale"].data_ptr()
    library = shared_library("append_latent.cpp", first_include="hopper", flags=traits_flags(spec))
    ctypes.CDLL(str(library)).append_latent(ctypes.byref(params))
    for found, right in zip(cache.caches, expected.caches, strict=True):
        assert found is None or torch.equal(found.view(torch.uint8), right.view(torch.uint8))
    if form == "tokens":
        both = (cache.scales["ckv_scale_arr"], expected.scales["ckv_scale_arr"])
        assert torch.equal(*(array.view(torch.int32) for array in both))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"ckv_scale": 0.0}, "ckv_scale=0.0: pass a positive number"),
        ({"ckv_scale": 1.0, "ckv_scale_arr": torch.ones(PAGES, PAGE, 4)}, "both given"),
        ({"ckv_scale_arr": torch.ones(PAGES, PAGE, 3)}, "ckv_scale_arr has shape"),
        (
            {
                "append_ckv": torch.ones(TOKENS, 448),
                "append_kpe": torch.ones(TOKENS, 64),
                "ckv_cache": torch.zeros(PAGES, PAGE, 448, dtype=torch.float8_e4m3fn),
                "ckv_scale_arr": torch.ones(PAGES, PAGE, 3),
            },
            "ckv_scale_arr with 448 columns",
        ),
        (
            {
                "append_kpe": None,
                "kpe_cache": None,
                "ckv_cache": torch.zeros(PAGES, PAGE, 592, dtype=torch.uint8)[..., :584],
                "kv_row_format": "deepseek_v4",
            },
            "ckv_cache has tokens 592 bytes apart",
        ),
        ({"kv_row_format": "deepseek_v32"}, "with 656 columns"),
        (dict.fromkeys(("append_ckv", "append_kpe"), ROWS) | dict.fromkeys(("ckv_cache", "kpe_cache"), CACHE), "two"),
        ({"append_ckv": torch.ones(TOKENS, 512, dtype=torch.float64)}, "float64"),
        ({"append_kpe": None}, "with 512 columns"),
        ({"ckv_cache": CACHE.to(torch.float8_e5m2)}, "latent rows are quantised to float8_e4m3fn alone"),
        ({"ckv_cache": CACHE.float(), "ckv_scale": 0.0}, "ckv_scale=0.0 is not supported"),
        ({"kv_last_page_len": torch.tensor([2])}, "kv_last_page_len has 1 entries"),
        ({"positions": torch.tensor([2, 3, 4, 5, 0, 0, 1, 2, 9])}, "lies outside the pages"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_refused(change: dict[str, Any], says: str) -> None:
    cache = Cache("numbers")
    names = ("append_ckv", "append_kpe", "batch_indices", "positions", "ckv_cache", "kpe_cache", "kv_indices")
    values = (cache.rows[:, :512], cache.rows[:, 512:], *cache.places, *cache.caches, *cache.lists)
    given = dict(zip((*names, "kv_indptr", "kv_last_page_len"), values, strict=True))
    with pytest.raises((RunError, CapabilityError), match=says):
        flashpage.append_paged_mla_kv_cache(**(given | change))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("none", [True, False], ids=("None", "no columns"))
def test_rows_without_a_tail(dtype: torch.dtype, none: bool) -> None:
    """None and a tensor without columns say the same."""
    rows, places = torch.randn(3, 512).to(torch.bfloat16), torch.arange(3, dtype=torch.int32)
    cache = torch.zeros(2, 2, 512).to(dtype)
    lists = (torch.tensor([1, 0], dtype=torch.int32), torch.tensor([0, 2], dtype=torch.int32))
    tails = (None, None) if none else (rows[:, :0], cache[..., :0])
    flashpage.append_paged_mla_kv_cache(
        rows, tails[0], torch.zeros_like(places), places, cache, tails[1], *lists, torch.tensor([1], dtype=torch.int32)
    )
    assert torch.equal(cache[[1, 1, 0], [0, 1, 0]].float(), rows.to(dtype).float())
