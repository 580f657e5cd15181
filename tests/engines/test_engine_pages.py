"""Page numbers in tables, and padded requests, as engines pass them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from api_batch import PAGE, Batch
from engine_plans import (
    DTYPE,
    FIRST,
    ONE_ROW,
    OTHER,
    SHAPE,
    Lengths,
    decode,
    engine_prefill_plan,
    outputs,
    plan,
    prefill,
)

from flashpage import PlanError


@pytest.fixture(scope="module")
def batch() -> Batch:
    return Batch()


def tables_of(lengths: Lengths, width: int = 9) -> torch.Tensor:
    """Page tables whose unused entries are no valid page numbers."""
    tables = torch.full((lengths.batch_size, width), -1, dtype=torch.int32)
    for i in range(lengths.batch_size):
        begin, end = int(lengths.kv_indptr[i]), int(lengths.kv_indptr[i + 1])
        tables[i, : end - begin] = lengths.indices[begin:end]
    return tables


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_block_tables_in_place_of_indices(batch: Batch, graph: bool) -> None:
    usual, wrapper = decode(), decode(graph)
    usual.plan(*ONE_ROW.pages(), *SHAPE, q_data_type=DTYPE)
    expected = outputs(usual, ONE_ROW, batch)
    wide = torch.full((6, 22), -1, dtype=torch.int64)
    wide[:4, ::2][:, :9] = tables_of(ONE_ROW)
    for tables in (tables_of(ONE_ROW), wide[:, ::2]):
        for indices in (None, ONE_ROW.indices):
            pages = (ONE_ROW.kv_indptr, indices, ONE_ROW.last_page_len)
            wrapper.plan(*pages, *SHAPE, q_data_type=DTYPE, block_tables=tables)
            assert wrapper._block_tables is tables
            assert torch.equal(outputs(wrapper, ONE_ROW, batch), expected)
    offset = (ONE_ROW.kv_indptr + 3, None, ONE_ROW.last_page_len)
    wrapper.plan(*offset, *SHAPE, q_data_type=DTYPE, block_tables=tables)
    assert torch.equal(outputs(wrapper, ONE_ROW, batch), expected)
    wrapper.plan(*ONE_ROW.pages(), *SHAPE, q_data_type=DTYPE)
    assert wrapper._block_tables is None


def test_block_tables_of_prefill(batch: Batch) -> None:
    usual, wrapper = prefill(), prefill()
    plan(usual, FIRST)
    options = {"q_data_type": DTYPE, "block_tables": tables_of(FIRST)}
    wrapper.plan(FIRST.qo_indptr, FIRST.kv_indptr, None, FIRST.last_page_len, *SHAPE, **options)
    assert torch.equal(outputs(wrapper, FIRST, batch), outputs(usual, FIRST, batch))
    engine_prefill_plan(wrapper, OTHER, written={"_block_tables": tables_of(OTHER)})
    plan(usual, OTHER)
    assert torch.equal(outputs(wrapper, OTHER, batch), outputs(usual, OTHER, batch))


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        (tables_of(ONE_ROW) + 1, r"block_tables has page 14 where indices\[0\]=13"),
        (tables_of(ONE_ROW, 8)[:, :7], "block_tables has 7 pages a request but request 1 has 8"),
        (tables_of(ONE_ROW)[:3], r"block_tables has shape \(3, 9\)"),
        (tables_of(ONE_ROW).float(), "float32"),
        ([[1]], "list"),
    ],
)
def test_block_tables_that_differ_are_refused(tables: Any, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        decode().plan(*ONE_ROW.pages(), *SHAPE, q_data_type=DTYPE, block_tables=tables)
    with pytest.raises(PlanError, match="indices=None"):
        decode().plan(ONE_ROW.kv_indptr, None, ONE_ROW.last_page_len, *SHAPE, q_data_type=DTYPE)


@pytest.mark.parametrize("padding", [0, 1, PAGE])
def test_a_request_without_pages_may_have_any_last_page_len(batch: Batch, padding: int) -> None:
    """Engines pad batches with last_page_len 1."""
    wrapper, last = decode(), ONE_ROW.last_page_len.clone()
    assert last[2] == 0
    last[2] = padding
    wrapper.plan(ONE_ROW.kv_indptr, ONE_ROW.indices, last, *SHAPE, q_data_type=DTYPE)
    out, lse = wrapper.run_return_lse(ONE_ROW.q, batch.cache)
    assert not bool(out[2].any()) and bool((lse[2] == float("-inf")).all())
    usual = decode()
    usual.plan(*ONE_ROW.pages(), *SHAPE, q_data_type=DTYPE)
    assert torch.equal(out, usual.run(ONE_ROW.q, batch.cache))
    for wrong in (-1, PAGE + 1):
        last[2] = wrong
        with pytest.raises(PlanError, match=rf"last_page_len\[2\]={wrong}"):
            wrapper.plan(ONE_ROW.kv_indptr, ONE_ROW.indices, last, *SHAPE, q_data_type=DTYPE)
