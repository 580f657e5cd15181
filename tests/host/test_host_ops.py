"""The CPU's operations compared with numpy: merging a plan's partials, merging states, appending to a paged cache."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from native_build import shared_library

from flashpage import native
from flashpage.native import records

# (element type of the C ABI, bytes, relative error of one rounding)
FP32, FP16, BF16 = (0, 4, 2.0**-23), (1, 2, 2.0**-11), (2, 2, 2.0**-8)
ELEMENTS = pytest.mark.parametrize("element", [FP32, FP16, BF16], ids=["fp32", "fp16", "bf16"])


def encode(values: np.ndarray, element: tuple[int, int, float]) -> np.ndarray:
    """fp32 values as the element's bits, rounded to nearest even."""
    values = np.ascontiguousarray(values, np.float32)
    if element is FP32:
        return values
    if element is FP16:
        with np.errstate(over="ignore"):
            return values.astype(np.float16).view(np.uint16)
    bits = values.view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def decode(stored: np.ndarray, element: tuple[int, int, float]) -> np.ndarray:
    if element is FP32:
        return stored
    if element is FP16:
        return stored.view(np.float16).astype(np.float32)
    return (stored.astype(np.uint32) << 16).view(np.float32)


def combine(values: np.ndarray, lse: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """fp64 reference: values [n, ..., d], lse [n, ...] in base 2; a state with lse -inf does not count."""
    values, lse = values.astype(np.float64), lse.astype(np.float64)
    highest = np.max(lse, axis=0)
    nothing = np.isneginf(highest)
    weights = np.where(np.isneginf(lse), 0.0, np.exp2(lse - np.where(nothing, 0.0, highest)))
    total = weights.sum(axis=0)
    used = np.where(weights[..., None] == 0, 0.0, values)
    out = (used * weights[..., None]).sum(axis=0) / np.where(total == 0, 1, total)[..., None]
    with np.errstate(divide="ignore"):
        return out, np.where(nothing, -np.inf, highest + np.log2(total))


def assert_close(found: np.ndarray, expected: np.ndarray, element: tuple[int, int, float]) -> None:
    np.testing.assert_allclose(found, expected, rtol=2 * element[2], atol=2e-6)


class Partials:
    """A plan that only merges: requests x KV heads, each cut into a different number of pieces."""

    group, num_kv_heads, head_dim = 3, 2, 200
    pieces = (2, 5, 1, 40)  # of each request
    q_lens = (4, 1, 7, 2)

    def __init__(self, rng: np.random.Generator) -> None:
        items, chunks = [], []
        row = 0
        for request, (count, q_len) in enumerate(zip(self.pieces, self.q_lens, strict=True)):
            q_begin = sum(self.q_lens[:request])
            for kv_head in range(self.num_kv_heads):
                rows = q_len * self.group
                for first in range(0, rows, 8):
                    items.append((request, q_begin, first, min(8, rows - first), kv_head, row + first, rows, count))
                chunks.append((request, kv_head, row, rows, count))
                row += rows * count
        self.out = rng.standard_normal((row, self.head_dim), np.float32)
        self.lse = rng.standard_normal(row).astype(np.float32) * 20
        self.chunks = chunks
        self.set_merges(np.array(items, dtype=records.MERGE_ITEM))

    def set_merges(self, merges: np.ndarray) -> None:
        header = np.zeros(1, records.PLAN_HEADER)
        header["num_merges"], header["merges_offset"] = len(merges), header.nbytes
        self.plan = np.frombuffer(header.tobytes() + merges.tobytes(), np.uint8)
        self.num_merges = len(merges)

    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        out = np.zeros((sum(self.q_lens), self.num_kv_heads, self.group, self.head_dim))
        lse = np.zeros(out.shape[:3])
        for request, kv_head, row, rows, count in self.chunks:
            begin = sum(self.q_lens[:request])
            where = slice(begin, begin + self.q_lens[request])
            values = self.out[row : row + rows * count].reshape(count, -1, self.group, self.head_dim)
            out[where, kv_head], lse[where, kv_head] = combine(
                values, self.lse[row : row + rows * count].reshape(count, -1, self.group)
            )
        return out.reshape(out.shape[0], -1, self.head_dim), lse.reshape(lse.shape[0], -1)

    def run(self, element: tuple[int, int, float], row_padding: int = 0) -> tuple[np.ndarray, np.ndarray]:
        rows, heads = sum(self.q_lens), self.num_kv_heads * self.group
        kind = np.float32 if element is FP32 else np.uint16
        stored = np.full((rows, heads + row_padding, self.head_dim), 77, kind)
        lse = np.full((rows, heads), np.nan, np.float32)
        merge = native.MergeParams(
            plan=self.plan.ctypes.data,
            partial_out=self.out.ctypes.data,
            partial_lse=self.lse.ctypes.data,
            out=stored.ctypes.data,
            lse=lse.ctypes.data,
            out_row_stride=stored.strides[0] // stored.itemsize,
            out_head_stride=self.head_dim,
            head_dim_vo=self.head_dim,
            num_q_heads=heads,
            group=native.make_fast_div(self.group),
        )
        args = native.RunArgs(count=1)
        kernel = native.check_handle(native.load().fp_cpu_merge_kernel(element[0]))
        args.launches[0] = native.RunLaunch(kernel, ctypes.addressof(merge), grid=1)
        native.check(native.load().fp_run(ctypes.byref(args)))
        assert (stored[:, heads:] == 77).all(), "wrote beyond its heads"
        return decode(stored[:, :heads], element), lse


@ELEMENTS
@pytest.mark.parametrize("row_padding", [0, 3])
def test_a_plans_partials(element: tuple[int, int, float], row_padding: int) -> None:
    partials = Partials(np.random.default_rng(1))
    out, lse = partials.run(element, row_padding)
    expected_out, expected_lse = partials.expected()
    assert_close(out, expected_out, element)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6, atol=1e-5)
    again, _ = partials.run(element, row_padding)
    np.testing.assert_array_equal(out, again)


@ELEMENTS
def test_a_partial_that_saw_no_token_has_no_say(element: tuple[int, int, float]) -> None:
    partials = Partials(np.random.default_rng(2))
    unseen = np.random.default_rng(3).random(len(partials.lse)) < 0.6
    partials.lse[unseen] = -np.inf
    partials.out[unseen] = np.nan
    out, lse = partials.run(element)
    expected_out, expected_lse = partials.expected()
    assert np.isneginf(lse).any() and (out[np.isneginf(lse)] == 0).all()
    assert_close(out, expected_out, element)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6, atol=1e-5)


def merge_states(
    v: np.ndarray, s: np.ndarray, element: tuple[int, int, float], **other: int
) -> tuple[np.ndarray, np.ndarray]:
    """v [num_states, rows, heads, dim] as floats, s the same without dim; returns decoded (v, s)."""
    stored = encode(v, element)
    num_states, rows, heads, dim = v.shape
    out = np.full((rows, heads, dim), 77, stored.dtype)
    lse = np.full((rows, heads), 55, np.float32)
    params = native.MergeStatesParams(
        v=stored.ctypes.data,
        s=s.ctypes.data,
        out=out.ctypes.data,
        lse=lse.ctypes.data,
        v_state_stride=rows * heads * dim,
        v_row_stride=heads * dim,
        v_head_stride=dim,
        s_state_stride=rows * heads,
        s_row_stride=heads,
        num_states=num_states,
        rows=rows,
        num_heads=heads,
        head_dim=dim,
        **other,
    )
    native.check(native.load().fp_cpu_merge_states(ctypes.byref(params), element[0]))
    return decode(out, element), lse


@ELEMENTS
@pytest.mark.parametrize("num_states", [0, 1, 2, 9])
@pytest.mark.parametrize(("rows", "dim"), [(1, 8), (33, 136), (700, 128)])
def test_merge_states(element: tuple[int, int, float], num_states: int, rows: int, dim: int) -> None:
    rng = np.random.default_rng(4)
    v = decode(encode(rng.standard_normal((num_states, rows, 5, dim), np.float32), element), element)
    s = rng.standard_normal((num_states, rows, 5)).astype(np.float32) * 10
    s[rng.random(s.shape) < 0.3] = -np.inf
    v[np.isneginf(s)] = np.nan
    out, lse = merge_states(v, s, element)
    if num_states == 0:
        assert (out == 0).all() and np.isneginf(lse).all()
        return
    expected_out, expected_lse = combine(v, s)
    assert_close(out, expected_out, element)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6, atol=1e-5)


@ELEMENTS
def test_merge_state_in_place_leaves_rows_outside_its_mask_alone(element: tuple[int, int, float]) -> None:
    rng = np.random.default_rng(5)
    rows, heads, dim = 50, 4, 64
    v_a, v_b = (encode(rng.standard_normal((rows, heads, dim), np.float32), element) for _ in range(2))
    s_a, s_b = (rng.standard_normal((rows, heads)).astype(np.float32) for _ in range(2))
    mask = (rng.random(rows) < 0.5).astype(np.uint8)
    v_b[mask == 0] = encode(np.full(1, np.nan), element)[0]
    s_b[mask == 0] = np.nan
    before_v, before_s = v_a.copy(), s_a.copy()
    expected_v, expected_s = combine(
        np.stack([decode(before_v, element), decode(v_b, element)]), np.stack([before_s, s_b])
    )
    params = native.MergeStatesParams(
        v=v_a.ctypes.data,
        s=s_a.ctypes.data,
        v_other=v_b.ctypes.data,
        s_other=s_b.ctypes.data,
        mask=mask.ctypes.data,
        out=v_a.ctypes.data,
        lse=s_a.ctypes.data,
        v_row_stride=heads * dim,
        v_head_stride=dim,
        s_row_stride=heads,
        num_states=2,
        rows=rows,
        num_heads=heads,
        head_dim=dim,
    )
    native.check(native.load().fp_cpu_merge_states(ctypes.byref(params), element[0]))
    chosen = mask == 1
    np.testing.assert_array_equal(v_a[~chosen], before_v[~chosen])
    np.testing.assert_array_equal(s_a[~chosen], before_s[~chosen])
    assert_close(decode(v_a, element)[chosen], expected_v[chosen], element)
    np.testing.assert_allclose(s_a[chosen], expected_s[chosen], rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("element", [FP16, BF16], ids=["fp16", "bf16"])
def test_rounding_is_that_of_numpy_for_every_kind_of_value(element: tuple[int, int, float]) -> None:
    """A merge of one state only converts it: denormals, ties, overflow, infinities, NaN; all 16-bit values return."""
    every = np.arange(2**16, dtype=np.uint16)
    out, _ = merge_states(decode(every, element).reshape(1, -1, 1, 128), np.zeros((1, 512, 1), np.float32), element)
    np.testing.assert_array_equal(out.ravel(), decode(every, element))

    bits = np.random.default_rng(6).integers(0, 2**32, 200_000, dtype=np.uint64).astype(np.uint32)
    small = np.float32(2.0**-25) * np.arange(1, 4000, dtype=np.float32)  # half's denormals and their ties
    special = np.array([0.0, -0.0, 65504, 65519.996, 65520, np.inf, -np.inf, np.nan, 2.0**-24, 2.0**-25], np.float32)
    values = np.concatenate([bits.view(np.float32), small, -small, special])
    partials = Partials(np.random.default_rng(7))
    partials.pieces, partials.q_lens, partials.num_kv_heads, partials.group = (1,), (-(-len(values) // 200),), 1, 1
    rows = partials.q_lens[0]
    partials.out = np.resize(values, (rows, 200)).astype(np.float32)
    partials.lse = np.zeros(rows, np.float32)
    item = np.array([(0, 0, 0, rows, 0, 0, rows, 1)], records.MERGE_ITEM)
    partials.set_merges(item)
    found, _ = partials.run(element)
    np.testing.assert_array_equal(found[:, 0], decode(encode(partials.out, element), element))


def test_every_form_of_the_row_loops_agrees() -> None:
    """The forms for older machines: plain x86-64, AVX2, AVX2 with half conversions."""
    differences = ctypes.CDLL(str(shared_library("row_ops_check.cpp"))).count_differences()
    if differences < 0:
        pytest.skip("this machine has no AVX2")
    assert differences == 0


def test_features_are_those_that_the_compiler_finds() -> None:
    """The library reads the processor itself, so that compilers without such a run time can build it."""
    assert ctypes.CDLL(str(shared_library("row_ops_check.cpp"))).count_wrong_features() == 0


@pytest.mark.parametrize("element_type", [-1, 3])
def test_an_unknown_element_type_is_reported(element_type: int) -> None:
    status = native.load().fp_cpu_merge_states(ctypes.byref(native.MergeStatesParams()), element_type)
    with pytest.raises(native.DeviceError, match=f"element type {element_type} is none of"):
        native.check(status)


@pytest.mark.parametrize("bytes_", [1, 2, 4])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 5, 16])
@pytest.mark.parametrize("nnz", [0, 3, 900])
def test_append(bytes_: int, layout: str, page_size: int, nnz: int) -> None:
    rng = np.random.default_rng(8)
    heads, dim_k, dim_v, batch, pages_each = 3, 24, 40, 4, 60
    kind = {1: np.uint8, 2: np.uint16, 4: np.uint32}[bytes_]

    def numbers(*shape: int) -> np.ndarray:
        return rng.integers(0, 2 ** (8 * bytes_), shape, dtype=kind)

    indptr = (np.arange(batch + 1) * pages_each).astype(np.int32)
    indices = rng.permutation(batch * pages_each).astype(np.int32)
    slots = rng.permutation(batch * pages_each * page_size)[:nnz]
    requests, positions = np.divmod(slots.astype(np.int32), np.int32(pages_each * page_size))
    key, value = numbers(len(slots), heads + 1, dim_k)[:, :heads], numbers(len(slots), heads, dim_v)
    shape = (page_size, heads) if layout == "NHD" else (heads, page_size)
    k_cache, v_cache = (numbers(batch * pages_each, *shape, d) for d in (dim_k, dim_v))
    expected = [k_cache.copy(), v_cache.copy()]
    for i in range(len(slots)):
        page, token = indices[indptr[requests[i]] + positions[i] // page_size], positions[i] % page_size
        for cache, new in zip(expected, (key, value), strict=True):
            cache[(page, token) if layout == "NHD" else (page, slice(None), token)] = new[i]

    def view(cache: np.ndarray) -> native.KvView:
        page, a, b, _ = (s // cache.itemsize for s in cache.strides)
        return native.KvView(cache.ctypes.data, page, *((a, b) if layout == "NHD" else (b, a)))

    params = native.AppendParams(
        append_key=key.ctypes.data,
        append_value=value.ctypes.data,
        key_row_stride=key.strides[0] // bytes_,
        key_head_stride=key.strides[1] // bytes_,
        value_row_stride=value.strides[0] // bytes_,
        value_head_stride=value.strides[1] // bytes_,
        k=view(k_cache),
        v=view(v_cache),
        batch_indices=requests.ctypes.data,
        positions=positions.ctypes.data,
        kv_indptr=indptr.ctypes.data,
        kv_indices=indices.ctypes.data,
        nnz=len(slots),
        num_kv_heads=heads,
        head_dim_qk=dim_k,
        head_dim_vo=dim_v,
        page=native.make_fast_div(page_size),
    )
    native.check(native.load().fp_cpu_append(ctypes.byref(params), bytes_))
    np.testing.assert_array_equal(k_cache, expected[0])
    np.testing.assert_array_equal(v_cache, expected[1])
