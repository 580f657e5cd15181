"""The kernel that gathers rows, on the host, and its launch; tests/planner/test_gathered.py tests when plans use it."""

from __future__ import annotations

import ctypes
import dataclasses

import pytest
import torch
from caches import FORMS, Cache, Shape, poison
from fake_driver import with_fake_driver
from native_build import gather_rows

from flashpage import native
from flashpage.base import kv_view
from flashpage.base.dtypes import DType
from flashpage.kernels.options import Options
from flashpage.plan import gather_rows as gathered

OPTIONS = Options(
    kv_source="paged",
    num_q_heads=32,
    num_kv_heads=8,
    head_dim_qk=128,
    head_dim_vo=128,
    page_size=1,
    q_dtype=DType.BFLOAT16,
    kv_dtype=DType.BFLOAT16,
    out_dtype=DType.BFLOAT16,
    causal=True,
)
ONE_TOKEN_FORMS = [form for form in FORMS if form != "indexed"]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("form", ONE_TOKEN_FORMS)
@pytest.mark.parametrize(("heads", "dims"), [(1, (64, 64)), (3, (80, 80)), (2, (192, 128)), (2, (16, 256))], ids=str)
def test_rows_are_those_of_the_pages(form: str, layout: str, heads: int, dims: tuple[int, int]) -> None:
    if form.startswith("fused") and dims[0] != dims[1]:
        pytest.skip("one tensor has one head dim")
    if form.startswith("odd") and heads > 1 and (form == "odd_head") == (layout == "NHD"):
        pytest.skip("the dimension has more than one entry")
    count, first = 37, 5
    cache = Cache.make(form, Shape(41, 1, heads, *dims), layout, torch.float16)
    k, v = cache.rows()
    torch.manual_seed(0)
    indices = torch.randint(0, 41, (first + count,), dtype=torch.int32)
    for memory in (k, v):
        memory[indices[first:].unique().long()] = torch.randn(memory[0].shape).half()
    indices[:first] = 2**30
    options = dataclasses.replace(
        OPTIONS, num_kv_heads=heads, num_q_heads=heads, head_dim_qk=dims[0], head_dim_vo=dims[1]
    )
    workspace = poison(torch.empty(1 << 20, dtype=torch.uint8))
    before, limit = workspace.clone(), workspace.data_ptr() + 900_001
    rows = gathered.Rows.below(limit, first, first + count, options)
    params = native.GatherRowsParams()
    given = cache.argument("cpu")
    views = kv_view.paged_views(given, layout)
    attention = native.AttentionParams(kv_indices=indices.data_ptr())
    rows.bind(params, dict(zip("KV", views, strict=True)), options, attention)
    tensors = given if isinstance(given, tuple) else (given, given)
    params.k.data = tensors[0].data_ptr()
    params.v.data = tensors[1].data_ptr() + 2 * views[1].offset
    gather_rows()(ctypes.byref(params), 3)
    assert rows.k % 128 == rows.v % 128 == 0
    end = rows.v + (first + count) * heads * dims[1] * 2
    assert limit - 128 < end <= limit and rows.v - rows.k >= (first + count) * heads * dims[0] * 2
    for address, memory, dim in ((rows.k, k, dims[0]), (rows.v, v, dims[1])):
        offset = address - workspace.data_ptr()
        found = workspace[offset:][: (first + count) * heads * dim * 2].view(torch.float16).view(-1, heads, dim)
        assert torch.equal(found[first:], memory[indices[first:].long(), 0])
        found[first:].view(torch.int16).fill_(-1)
    assert torch.equal(workspace, before), "nothing else is written"


def test_rows_are_gathered_before_they_are_read() -> None:
    with_fake_driver("""
attention, gather = kernel(b"boxes"), kernel(b"gather_rows")
form = host.BoxForm(2, (64, 16, 1, 1), (128, 100, 8, 1), (2048, 256, 256))
boxes, gathered = host.KvBoxes(form, form), host.GatherRowsParams()
params.k.data, params.v.data, gathered.k.data = 1 << 20, 1 << 21, 1 << 22
values = dict(ahead=[(gather, gathered)], boxes=addressof(boxes))
record()
host.check(run(attention, enable_pdl=1, **values))
shape = "block=384 shared=100000 stream=7 attribute6=1"
launches = [line.split(" ctx=")[0] for line in record() if line.startswith("launch")]
assert launches == [
    f"launch gather_rows grid=232 {shape} first={1 << 22}",  # all that are resident
    f"launch boxes grid=132 {shape} first=4242 maps={1 << 20},{1 << 21}",
], launches
fake.fake_fail_launches(1)
assert run(attention, **values) == host.CUDA_ERROR
assert host.last_error().startswith("launching gather_rows: ")
assert sum(line.startswith("launch") for line in record()) == 1
""")
