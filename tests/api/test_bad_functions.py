"""Odd tensors and values as arguments of functions: appending, merging, packing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from odd_tensors import ODD
from wrong_arguments import DIM, HEADS, KV_HEADS, PAGE, PAGES, ints

import flashpage
from flashpage import RunError


def append_arguments(**changed: Any) -> dict[str, Any]:
    arguments = {
        "append_key": torch.randn(3, KV_HEADS, DIM),
        "append_value": torch.randn(3, KV_HEADS, DIM),
        "batch_indices": ints(0, 0, 1),
        "positions": ints(0, 1, 2),
        "paged_kv_cache": torch.zeros(PAGES, 2, PAGE, KV_HEADS, DIM),
        "kv_indices": ints(0, 1, 2),
        "kv_indptr": ints(0, 1, 2),
        "kv_last_page_len": ints(2, 3),
    }
    return arguments | changed


@pytest.mark.parametrize("name", ["batch_indices", "positions", "kv_indices", "kv_indptr"])
@pytest.mark.parametrize("beyond", [2**32, -(2**32), 2**31, 2**63 - 1])
def test_append_does_not_cut_numbers_off(name: str, beyond: int) -> None:
    arguments = append_arguments()
    numbers = arguments[name].long()
    numbers[0] = beyond
    with pytest.raises(RunError, match=rf"{name}\[0\]={beyond}"):
        flashpage.append_paged_kv_cache(**(arguments | {name: numbers}))
    assert not arguments["paged_kv_cache"].any()


@pytest.mark.parametrize("name", ["append_key", "append_value", "paged_kv_cache"])
@pytest.mark.parametrize("kind", ["freed", "negative", "grad", "sparse", "meta", "wrapped", "list"])
def test_append_refuses_odd_tensors(kind: str, name: str) -> None:
    arguments = append_arguments()
    make, says = ODD[kind]
    with pytest.raises(RunError, match=says):
        flashpage.append_paged_kv_cache(**(arguments | {name: make(arguments[name])}))


def test_append_counts_its_writes_and_refuses_shared_memory() -> None:
    arguments = append_arguments()
    before = arguments["paged_kv_cache"]._version
    flashpage.append_paged_kv_cache(**arguments)
    assert arguments["paged_kv_cache"]._version > before and arguments["paged_kv_cache"][0].any()
    shared = torch.zeros(2, PAGE, KV_HEADS, DIM).expand(PAGES, 2, PAGE, KV_HEADS, DIM)
    with pytest.raises(RunError, match="paged_kv_cache has strides"):
        flashpage.append_paged_kv_cache(**append_arguments(paged_kv_cache=shared))
    with pytest.raises(RunError, match="pass two caches"):
        flashpage.append_paged_kv_cache(**append_arguments(paged_kv_cache=(arguments["paged_kv_cache"][0],) * 2))


@pytest.mark.parametrize(("begin", "position"), [(-3, 0), (-(2**31), 2), (1, 2**31 - 1)])
def test_appends_write_within_their_pages(begin: int, position: int) -> None:
    """A request that begins before the page numbers, and a place that 32 bits do not hold."""
    cache, new, one = torch.zeros(12, 2, 2, 64), torch.randn(1, 2, 64), torch.zeros(1, dtype=torch.int32)
    indptr = torch.tensor([begin, 5], dtype=torch.int32)
    with pytest.raises(RunError, match=f"positions: {position} of request 0 lies outside the pages"):
        flashpage.append_paged_kv_cache(new, new, one, one + position, cache, torch.arange(10).int(), indptr, one + 1)
    assert not cache.any()


def test_indptr_of_appends_never_falls() -> None:
    with pytest.raises(RunError, match=r"append_indptr\[2\]=3 is smaller"):
        flashpage.get_batch_indices_positions(ints(0, 5, 3), ints(5, 5), 5)
    for nnz in (2.5, -1, "3", True):
        with pytest.raises(RunError, match="nnz"):
            flashpage.get_batch_indices_positions(ints(0, 5), ints(5), nnz)


@pytest.mark.parametrize("kind", ["plain", "int8_token", "latent", "latent e4m3"])
def test_rows_of_no_request_are_not_appended(kind: str) -> None:
    """Requests have rows 2 to 5 of a step, as a plan's qo_indptr may say; two rows come before them, and one after."""
    requests, positions = flashpage.get_batch_indices_positions(ints(2, 5, 5, 6), ints(9, 4, 1), 7)
    assert requests.tolist() == [-1, -1, 0, 0, 0, 2, -1] and positions.tolist() == [-1, -1, 6, 7, 8, 0, -1]
    is_latent, columns = kind.startswith("latent"), 512 if kind.startswith("latent") else DIM
    dtype = {"plain": torch.float32, "int8_token": torch.int8, "latent": torch.float32}.get(kind, torch.float8_e4m3fn)
    new = torch.arange(1, 8).view(7, 1, 1).expand(7, 1, columns).float()
    cache, scales = torch.zeros(4, PAGE, 1, columns).to(dtype), torch.zeros(4, PAGE, 1)
    places = requests, positions
    pages = ints(3, 0, 1), ints(0, 1, 2, 3), ints(9, 4, 1)
    if is_latent:
        flashpage.append_paged_mla_kv_cache(new[:, 0], None, *places, cache[:, :, 0], None, *pages)
    else:
        form = {"kv_format": kind, "kv_cache_sf": (scales, scales.clone())} if kind != "plain" else {}
        flashpage.append_paged_kv_cache(new, new, *places, (cache, cache.clone()), *pages, **form)
    written = cache.float()[..., 0, 0].nonzero().tolist()
    assert written == [[1, 0], [3, 6], [3, 7], [3, 8]]


@pytest.mark.parametrize("argument", range(4))
@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("name", ["merge_state", "merge_state_in_place"])
def test_merges_refuse_odd_tensors(name: str, kind: str, argument: int) -> None:
    arguments: list[Any] = [torch.randn(2, HEADS, DIM), torch.randn(2, HEADS)] * 2
    make, says = ODD[kind]
    arguments = [t.clone() for t in arguments]
    arguments[argument] = make(arguments[argument])
    with pytest.raises(RunError, match=says if kind != "imaginary" else "strides|resolve_neg|contiguous"):
        getattr(flashpage, name)(*arguments)


def test_packing_and_merging_read_values_not_memory() -> None:
    """Functions made of torch's operations resolve lazy values."""
    bits = torch.randint(0, 2, (20,), dtype=torch.uint8)
    assert torch.equal(flashpage.packbits(torch._neg_view(-bits)), flashpage.packbits(bits))


def test_views_between_a_card_s_loads_are_copied() -> None:
    """The merge kernel loads four elements at once (on a card: tests/card/test_card_ops.py)."""
    from flashpage.wrappers.row_launches import vector_rows

    whole = torch.arange(8 * 4 * 130, dtype=torch.float16).view(8, 4, 130)
    aligned, inside = torch.zeros(8, 4, 128).half(), whole[..., 1:129]
    assert vector_rows(aligned) is aligned and vector_rows(whole[..., 4:].contiguous()) is not None
    for view in (inside, whole[..., :128], whole.view(-1)[1:513].view(2, 2, 128)):
        found = vector_rows(view)
        assert found is not view and torch.equal(found, view) and found.data_ptr() % 8 == 0 and found.is_contiguous()
