"""The contents of tensor maps: they address every element where the tensor has it, and boxes stay within a page."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from api_batch import DIM, HEADS, KV_HEADS, PAGE, Batch

import flashpage
from flashpage import jit, native
from flashpage.base import kv_view
from flashpage.errors import RunError
from flashpage.jit import LoadedKernel
from flashpage.kernels import tensor_maps
from flashpage.kernels.options import Options

PAGES, SIZE, KV, WIDTH = 5, 16, 3, 64


class Layout(NamedTuple):
    """A cache with its K and V as [pages, tokens, heads, columns]; a ragged cache is one page."""

    cache: Any
    kv_layout: str
    k: torch.Tensor
    v: torch.Tensor


def pair(k: torch.Tensor, v: torch.Tensor, kv_layout: str) -> Layout:
    order = (0, 2, 1, 3) if kv_layout == "HND" else (0, 1, 2, 3)
    return Layout((k, v), kv_layout, k.permute(order), v.permute(order))


def fused(cache: torch.Tensor, kv_layout: str) -> Layout:
    return pair(cache[:, 0], cache[:, 1], kv_layout)._replace(cache=cache)


def ragged(k: torch.Tensor, v: torch.Tensor, kv_layout: str) -> Layout:
    order = (1, 0, 2) if kv_layout == "HND" else (0, 1, 2)
    return Layout((k, v), kv_layout, k.permute(order)[None], v.permute(order)[None])


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


FP8 = torch.float8_e4m3fn
PAGED: dict[str, Callable[[], Layout]] = {
    "NHD": lambda: pair(empty(PAGES, SIZE, KV, WIDTH), empty(PAGES, SIZE, KV, WIDTH), "NHD"),
    "HND": lambda: pair(empty(PAGES, KV, SIZE, WIDTH), empty(PAGES, KV, SIZE, WIDTH), "HND"),
    "V is wider": lambda: pair(empty(PAGES, SIZE, KV, WIDTH), empty(PAGES, SIZE, KV, 128), "NHD"),
    "fused NHD": lambda: fused(empty(PAGES, 2, SIZE, KV, WIDTH), "NHD"),
    "fused HND": lambda: fused(empty(PAGES, 2, KV, SIZE, WIDTH), "HND"),
    "halves of one tensor": lambda: pair(*empty(2, PAGES, SIZE, KV, WIDTH).unbind(0), "NHD"),
    "strided halves": lambda: pair(*empty(PAGES, 2, SIZE, KV, WIDTH).unbind(1), "NHD"),
    "HND seen as NHD": lambda: fused(empty(PAGES, 2, KV, SIZE, WIDTH).permute(0, 1, 3, 2, 4), "NHD"),
    "K and V in one row": lambda: pair(*empty(PAGES, SIZE, KV, 2 * WIDTH).split(WIDTH, 3), "NHD"),
    "fp8, pages of 64": lambda: fused(empty(PAGES, 2, 64, KV, WIDTH, dtype=FP8), "NHD"),
    "pages of 8": lambda: fused(empty(PAGES, 2, 8, KV, WIDTH), "NHD"),
    "pages of 48": lambda: fused(empty(PAGES, 2, 48, KV, WIDTH), "HND"),
    "one head": lambda: fused(empty(PAGES, 2, SIZE, 1, WIDTH), "HND"),
    "one head of odd stride": lambda: pair(*[empty(PAGES, SIZE, WIDTH + 8).as_strided(
        (PAGES, SIZE, 1, WIDTH), (SIZE * (WIDTH + 8), WIDTH + 8, 3, 1))] * 2, "NHD"),
    "one page": lambda: fused(empty(1, 2, SIZE, KV, WIDTH), "NHD"),
}  # fmt: skip
RAGGED: dict[str, Callable[[], Layout]] = {
    "ragged NHD": lambda: ragged(empty(100, KV, WIDTH), empty(100, KV, WIDTH), "NHD"),
    "ragged HND": lambda: ragged(empty(KV, 100, WIDTH), empty(KV, 100, WIDTH), "HND"),
    "ragged, V is narrower": lambda: ragged(empty(100, KV, WIDTH), empty(100, KV, 32), "NHD"),
    "ragged, of one projection": lambda: ragged(*empty(100, 2 * KV, WIDTH).split(KV, 1), "NHD"),
    "ragged, one token": lambda: ragged(empty(1, KV, WIDTH), empty(1, KV, WIDTH), "NHD"),
}


def forms(layout: Layout, is_paged: bool, tokens: int = 8) -> list[tuple[native.BoxForm, torch.Tensor, int]]:
    """Each tensor map form with its tensor and the address of its first element."""
    if is_paged:
        views = kv_view.paged_views(layout.cache, layout.kv_layout)
    else:
        k, v = layout.cache
        views = kv_view.ragged_view(k, layout.kv_layout, "k"), kv_view.ragged_view(v, layout.kv_layout, "v")
    found = []
    for name, view, tensor in zip("KV", views, (layout.k, layout.v), strict=True):
        size = tensor.element_size()
        form = tensor_maps.box_form(view, name, element_bytes=size, tokens=tokens, is_paged=is_paged, line=128)
        base = layout.cache if isinstance(layout.cache, torch.Tensor) else layout.cache["KV".index(name)]
        found.append((form, tensor, base.data_ptr() + view.offset * size))
    return found


@pytest.mark.parametrize("name", [*PAGED, *RAGGED])
def test_every_element_lies_where_the_tensor_has_it(name: str) -> None:
    layout = (PAGED | RAGGED)[name]()
    for form, tensor, address in forms(layout, name in PAGED):
        pages, tokens, heads, columns = tensor.shape
        assert tuple(form.dims) == (columns, tokens, heads, pages)
        assert form.element_bytes == tensor.element_size() and form.box[0] * form.element_bytes == 128
        assert tuple(form.box)[1:] == (8, 1, 1)
        assert all(stride > 0 and stride % 16 == 0 for stride in form.strides)
        ends = [sorted({0, count // 2, count - 1}) for count in tensor.shape]
        for page, token, head, column in itertools.product(*ends):
            steps = sum(i * s for i, s in zip((token, head, page), form.strides, strict=True))
            offset = steps + column * form.element_bytes
            assert address + offset == tensor[page, token, head, column].data_ptr()


def test_narrow_lines_are_half_as_wide() -> None:
    view, _ = kv_view.paged_views(empty(PAGES, 2, SIZE, KV, 64, dtype=FP8), "NHD")
    wide, narrow = (
        tensor_maps.box_form(view, "K", element_bytes=1, tokens=8, is_paged=True, line=line) for line in (128, 64)
    )
    assert (tuple(wide.box), tuple(narrow.box)) == ((128, 8, 1, 1), (64, 8, 1, 1))
    assert tuple(wide.dims) == tuple(narrow.dims) and tuple(wide.strides) == tuple(narrow.strides)


@pytest.mark.parametrize(
    ("page_size", "tile_kv", "tokens"),
    [(8, 64, 8), (16, 64, 16), (48, 64, 16), (64, 64, 64), (128, 64, 64), (16, 32, 16), (64, 96, 32), (24, 32, 8)],
)
def test_boxes_divide_pages_and_tiles(page_size: int, tile_kv: int, tokens: int) -> None:
    assert tensor_maps.box_tokens(page_size, tile_kv) == tokens


def test_ragged_boxes_are_tiles() -> None:
    assert [tensor_maps.box_tokens(0, tile_kv) for tile_kv in (32, 64, 128)] == [32, 64, 128]


@pytest.mark.parametrize(
    ("page_size", "tile_kv", "row_bytes", "tokens"),
    [
        (16, 128, 128, 16),
        (128, 128, 128, 32),
        (0, 128, 64, 32),
        (16, 96, 128, 8),
        (0, 80, 128, 8),
        (16, 48, 192, 16),
        (1, 128, 128, 0),
        (12, 128, 128, 0),
        (16, 128, 72, 0),
    ],
)
def test_a_warp_that_converts_takes_boxes_of_its_rows(
    page_size: int, tile_kv: int, row_bytes: int, tokens: int
) -> None:
    assert tensor_maps.loader_tokens("converted", page_size, tile_kv, 128, row_bytes) == tokens
    assert tensor_maps.loader_tokens("rows", page_size, tile_kv, 128, row_bytes) == 0


def test_a_cache_without_pages_has_a_map() -> None:
    for form, _, _ in forms(fused(empty(0, 2, SIZE, KV, WIDTH), "NHD"), True):
        assert form.dims[3] == 1


def test_strides_that_no_map_can_have_are_reported() -> None:
    view = kv_view.View(PAGES, SIZE, KV, 64, SIZE * KV * 64, KV * 64, 64)
    for changed, message in (
        ({"head_stride": 68}, "V has 136 bytes from head to head: .* multiple of 16"),
        ({"page_stride": 1 << 39}, r"V has 1099511627776 bytes from page to page: .* below 2\^40"),
    ):
        with pytest.raises(RunError, match=message):
            tensor_maps.box_form(view._replace(**changed), "V", element_bytes=2, tokens=8, is_paged=True, line=128)


QUERY = {"element_bytes": 2, "group_size": 4, "unit_rows": 128}


def test_a_box_of_queries_has_a_tiles_packed_rows_in_order() -> None:
    q = torch.empty(100, 12, 2 * 64, dtype=torch.float16)[..., :64]
    form = tensor_maps.rows_form(12, 64, **QUERY, strides=q.stride()[:2])
    assert form is not None and tuple(form.box) == (64, 4, 32, 1) and tuple(form.dims) == (64, 12, 1, 1)
    first_row, kv_head = 32, 1
    for packed in (0, 1, 5, 127):
        head, row = packed % form.box[1] + 4 * kv_head, packed // form.box[1] + first_row
        offset = head * form.strides[0] + row * form.strides[1]
        assert q.data_ptr() + offset == q[first_row + packed // 4, 4 * kv_head + packed % 4].data_ptr()


@pytest.mark.parametrize(
    "changed",
    [{"group_size": 5}, *({"strides": s} for s in ((12 * 64 + 4, 64), (1 << 39, 64), (12 * 64, 0), (0, 64)))],
)
def test_queries_that_no_box_can_have_are_copied_by_rows(changed: dict[str, Any]) -> None:
    assert tensor_maps.rows_form(12, 64, **{**QUERY, "strides": (12 * 64, 64), **changed}) is None


@pytest.fixture
def bound() -> Any:
    """The structs of a thread after a decode on the CPU, with its wrapper and batch."""
    batch = Batch()
    wrapper = flashpage.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8))
    wrapper.plan(*batch.pages(), HEADS, KV_HEADS, DIM, PAGE, q_data_type=torch.float32)
    wrapper.run(batch.q_decode, batch.cache)
    return SimpleNamespace(structs=wrapper._attention._local.bound, batch=batch)


def test_structs_follow_the_kernels_loader_and_the_caches_pages(bound: Any) -> None:
    structs, batch = bound.structs, bound.batch
    part, prepared = structs.parts[0], structs.option_plan.prepared
    assert part.boxes is None and structs.launches.attentions[0].boxes is None and structs.params.box_tokens == 0
    choice = dataclasses.replace(prepared.choice, spec=dataclasses.replace(prepared.choice.spec, loader="boxes"))

    def bind(options: Options = prepared.attention_options, **changed: Any) -> None:
        changes = dataclasses.replace(choice, **changed)
        part.bind_boxes(
            SimpleNamespace(choice=changes, schedule=prepared.schedule, attention_options=options), structs.views
        )

    bind()
    read = part.boxes
    assert structs.params.box_tokens == read.k.box[1] == tensor_maps.box_tokens(PAGE, choice.spec.tile.tile_kv)
    assert structs.params.query_box_rows == read.q.element_bytes == 0
    assert structs.params.out_box_rows == read.out.element_bytes == 0
    for cache in (batch.cache, torch.cat([batch.cache, batch.cache])):
        structs.resize(batch.q_decode, cache)
        assert read.k.dims[3] == read.v.dims[3] == cache.shape[0]
    capability = dataclasses.replace(choice.kernel, row_boxes=True)
    bind(kernel=capability)
    structs.resize(batch.q_decode, batch.cache)
    read = part.boxes
    assert structs.params.query_box_rows == read.q.box[2] == choice.spec.tile.tile_q // (HEADS // KV_HEADS)
    assert tuple(read.q.dims) == tuple(read.out.dims) == (DIM, HEADS, len(batch.q_decode), 1)
    assert structs.params.out_box_rows == read.out.box[2] == read.q.box[2]
    spec = dataclasses.replace(choice.spec, loader="transposed")
    bind(kernel=capability, spec=spec)
    read = part.boxes
    assert structs.params.query_box_rows > 0 and structs.params.out_box_rows == read.out.element_bytes == 0
    spec = dataclasses.replace(choice.spec, loader="rows")
    bind(kernel=capability, spec=spec)
    read = part.boxes
    assert structs.params.box_tokens == read.k.element_bytes == read.v.element_bytes == 0  # these are sizes of q alone
    assert structs.params.query_box_rows == structs.params.out_box_rows == read.q.box[2] > 0
    spec = dataclasses.replace(choice.spec, loader="converted")
    bind(kernel=capability, spec=spec)
    assert part.boxes is None and structs.params.box_tokens == 0  # loaded by rows: these pages are too small for boxes
    bind(dataclasses.replace(prepared.attention_options, page_size=16), kernel=capability, spec=spec)
    read = part.boxes
    assert structs.params.box_tokens == read.v.box[1] == 16
    assert structs.params.query_box_rows == read.q.element_bytes == 0  # the kernel converts q, so it loads it by rows
    assert structs.params.out_box_rows == read.out.element_bytes == 0
    part.bind_boxes(prepared, structs.views)
    assert part.boxes is None and structs.params.box_tokens == structs.params.query_box_rows == 0


def test_a_trace_lasts_until_it_is_taken_off(bound: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    structs, requested = bound.structs, []
    plain = structs.launches.attentions[0].kernel

    def get_kernel(spec: Any, device: Any) -> LoadedKernel:
        requested.append(spec)
        return SimpleNamespace(handle=4711)  # type: ignore[return-value]

    monkeypatch.setattr(jit, "get_kernel", get_kernel)
    stamps = torch.zeros(4, 8, dtype=torch.int64)
    structs.set_trace([stamps])
    assert (structs.launches.attentions[0].kernel, structs.params.trace) == (4711, stamps.data_ptr())
    assert requested == [dataclasses.replace(structs.option_plan.prepared.choice.spec, trace=True)]
    structs.set_trace([])
    assert (structs.launches.attentions[0].kernel, structs.params.trace) == (plain, None)
