"""BatchMLAPagedAttentionWrapper: the ways to plan a batch, FlashInfer's names, masks, graphs, and refusals."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from latent_batches import CKV, HEADS, OPTIONS, PAGE, SIZES, TOKENS, Batch, close, indptr, wrapper_of

import flashpage
from flashpage import CapabilityError, MLAPlanMetadata, PlanError, RunError
from flashpage.wrappers import latent

pytestmark = pytest.mark.usefixtures("quick_kernels")


@pytest.mark.parametrize("form", ["csr", "dense", "dense-bounded", "dual", "keywords", "positions"])
def test_ways_to_plan(form: str) -> None:
    batch, wrapper = Batch(), wrapper_of()
    arrays = (batch.q_indptr, batch.kv_indptr, batch.indices, batch.lens)
    if form == "positions":
        options = OPTIONS["causal"], OPTIONS["sm_scale"], torch.float32, torch.float32
        with pytest.warns(DeprecationWarning, match="metadata="):
            wrapper.plan(*arrays, *SIZES.values(), *options)
    elif form == "keywords":
        wrapper.plan(**batch.csr_arrays(), **SIZES, **OPTIONS)
    else:
        most = 3 if form == "dense-bounded" else None
        metadata = {
            "csr": batch.csr(),
            "dual": MLAPlanMetadata.dual(*arrays, **batch.dense_arrays()),
        }.get(form, MLAPlanMetadata.dense(batch.q_indptr, batch.tables, batch.lens, most))
        wrapper.plan(metadata=metadata, **SIZES, **OPTIONS)
    close(wrapper.run(*batch.parts()), batch.out)


def test_a_table_on_the_device_is_planned_there() -> None:
    """On the CPU the same function is called."""
    batch, wrapper = Batch(), wrapper_of()
    wrapper.plan(metadata=batch.csr(), **SIZES, **OPTIONS)
    wrapper._plan_tables(MLAPlanMetadata.dense(batch.q_indptr, batch.tables, batch.lens, 2))
    q = torch.cat([batch.q, torch.full_like(batch.q[:1], math.nan)])  # max_q_len bounds the rows: 3 requests of 2
    out = wrapper.run(query=q, kv_cache=batch.cache)
    close(out[:5], batch.out)
    close(wrapper.run(query=batch.q, kv_cache=batch.cache), batch.out)
    with pytest.raises(RunError, match="query has 4 rows"):
        wrapper.run(query=batch.q[:4], kv_cache=batch.cache)


def test_arrays_as_keywords(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both forms are deprecated, which is said once."""
    batch, wrapper = Batch(), wrapper_of()
    monkeypatch.setattr(flashpage.BatchMLAPagedAttentionWrapper, "_has_warned", False)
    with pytest.warns(DeprecationWarning, match=r"pass metadata=MLAPlanMetadata\.dense\(") as warned:
        wrapper.plan(**batch.dense_arrays(), max_q_len=3, **SIZES, **OPTIONS)
        close(wrapper.run(*batch.parts()), batch.out)
        wrapper.plan(**batch.csr_arrays(), **SIZES, **OPTIONS)
    assert len(warned) == 1
    close(wrapper.run(*batch.parts()), batch.out)


def test_errors_have_the_names_of_the_form() -> None:
    batch, wrapper = Batch(), wrapper_of()
    for change, says in (
        ({"seq_lens": batch.lens[:2]}, r"^seq_lens has shape \(2,\) but cum_seq_lens_q has 3 requests"),
        ({"seq_lens": -batch.lens}, r"^seq_lens\[0\]=-40 is negative"),
        ({"cum_seq_lens_q": batch.q_indptr.flip(0)}, r"^cum_seq_lens_q\[\d\]=.* never decreases"),
        ({"block_tables": batch.tables[:, :1]}, "^block_tables has 1 pages a request but request 0 has 3"),
        ({"block_tables": -batch.tables}, "^block_tables"),
        ({"block_tables": None}, "^block_tables=None is not a tensor"),
    ):
        with pytest.raises(PlanError, match=says):
            wrapper.plan(metadata=MLAPlanMetadata.dense(**(batch.dense_arrays() | change)), **SIZES, **OPTIONS)
    wrapper.plan(metadata=MLAPlanMetadata.dense(**batch.dense_arrays()), **SIZES, **OPTIONS)
    with pytest.raises(RunError, match="query has 2 rows but the plan is for 5 by cum_seq_lens_q"):
        wrapper.run(query=batch.q[:2], kv_cache=batch.cache)
    with pytest.raises(RunError, match="kv_cache has 2 pages but the plan's block_tables reach"):
        wrapper.run(query=batch.q, kv_cache=batch.cache[:2])
    for change, says in (
        ({"seq_lens": batch.lens + 1}, "^seq_lens differs from kv_len_arr"),
        ({"cum_seq_lens_q": batch.q_indptr[:3]}, "^cum_seq_lens_q differs from qo_indptr"),
        ({"block_tables": batch.tables + 1}, r"^block_tables has page \d+ where kv_indices\[0\]"),
    ):
        both = batch.csr_arrays() | batch.dense_arrays() | change
        with pytest.raises(PlanError, match=says):
            wrapper.plan(metadata=MLAPlanMetadata.dual(**both), **SIZES, **OPTIONS)


def test_most_rows_of_a_request() -> None:
    batch, wrapper = Batch(), wrapper_of()
    for make in (MLAPlanMetadata.dense, lambda **given: MLAPlanMetadata.dual(**batch.csr_arrays(), **given)):
        for most, says in ((2, "^max_q_len=2 but request 1 has 3 rows: pass at least 3"), (True, "^max_q_len=True")):
            with pytest.raises(PlanError, match=says):
                wrapper.plan(metadata=make(**batch.dense_arrays(), max_q_len=most), **SIZES, **OPTIONS)
        wrapper.plan(metadata=make(**batch.dense_arrays(), max_q_len=3), **SIZES, **OPTIONS)
        close(wrapper.run(*batch.parts()), batch.out)
    with pytest.raises(PlanError, match="^max_q_len=3 without cum_seq_lens_q: pass both, or leave it None"):
        wrapper.plan(metadata=MLAPlanMetadata(**batch.csr_arrays(), max_q_len=3), **SIZES, **OPTIONS)


def test_refused_positions() -> None:
    batch, wrapper = Batch(), wrapper_of()
    with pytest.raises(PlanError, match="^metadata was given by position: pass metadata=.$"):
        wrapper.plan(batch.csr(), **SIZES, **OPTIONS)
    arrays = tuple(batch.csr_arrays().values())
    with pytest.warns(DeprecationWarning), pytest.raises(PlanError, match="^num_heads is given by position and by"):
        wrapper.plan(*arrays, HEADS, num_heads=8)
    options = (True, 0.1, torch.float32, torch.float32, True)
    with pytest.warns(DeprecationWarning), pytest.raises(PlanError, match="^use_profiler is given by position"):
        wrapper.plan(*arrays, *SIZES.values(), *options, use_profiler=True)


def test_scales_of_flashinfers_mode() -> None:
    batch, wrapper = Batch(), wrapper_of()
    types = {"q_data_type": torch.bfloat16, "kv_data_type": torch.float8_e4m3fn}
    found = []
    for mode in ("default", "kv-per-tensor"):
        wrapper.plan(metadata=batch.csr(), **(SIZES | OPTIONS | types), scale_mode=mode)
        cache = batch.cache.to(torch.float8_e4m3fn)
        found.append(wrapper.run(query=batch.q.bfloat16(), kv_cache=cache, ckv_scale=0.5, kpe_scale=2.0))
    assert torch.equal(*found)
    with pytest.raises(PlanError, match="kv-per-tensor"):
        wrapper.plan(metadata=batch.csr(), **SIZES, **OPTIONS, kv_row_format="deepseek_v32", scale_mode="kv-per-tensor")


@pytest.mark.parametrize("form", ["csr", "dense"])
@pytest.mark.parametrize("is_packed", [False, True])
def test_masks(form: str, is_packed: bool) -> None:
    """Trees of guesses: a row sees the context and its own ancestors."""
    rows, tokens = (4, 1, 3), (40, 33, 5)
    batch, wrapper = Batch(rows, tokens), wrapper_of()
    generator = torch.Generator().manual_seed(2)
    masks = [torch.rand(count, n, generator=generator) < 0.7 for count, n in zip(rows, tokens, strict=True)]
    mask = torch.cat([part.flatten() for part in masks])
    given = {"custom_mask": mask}
    if is_packed:
        ends = indptr(tuple(part.numel() for part in masks))
        given = {"packed_custom_mask": flashpage.segment_packbits(mask, ends, bitorder="little")[0]}
    metadata = batch.csr() if form == "csr" else MLAPlanMetadata.dense(**batch.dense_arrays())
    wrapper.plan(metadata=metadata, **SIZES, **OPTIONS, **given)
    out = wrapper.run(query=batch.q, kv_cache=batch.cache)
    for i, seen in enumerate(masks):
        q = batch.q[batch.q_indptr[i] : batch.q_indptr[i + 1]].double()
        row = batch.cache[batch.tables[i].long()].flatten(0, 1)[: tokens[i]].double()
        scores = torch.einsum("rhd,td->rht", q, row) * OPTIONS["sm_scale"]
        weights = scores.masked_fill(~seen[:, None], -math.inf).softmax(-1).nan_to_num(0.0)
        close(
            out[batch.q_indptr[i] : batch.q_indptr[i + 1]], torch.einsum("rht,td->rhd", weights, row[:, :CKV]).float()
        )
    wrapper.plan(metadata=batch.csr(), **SIZES, **OPTIONS)
    close(wrapper.run(query=batch.q, kv_cache=batch.cache), batch.out)
    with pytest.raises(PlanError, match="custom_mask"):
        wrapper.plan(metadata=batch.csr(), **SIZES, **OPTIONS, custom_mask=mask[1:])
    with pytest.raises(PlanError, match="pass one of them"):
        wrapper.plan(metadata=batch.csr(), **SIZES, **OPTIONS, custom_mask=mask, packed_custom_mask=mask)


def test_masks_of_captured_runs() -> None:
    batch = Batch(rows=(2, 2, 2))
    arrays = {"qo_indptr": 4, "kv_indptr": 4, "kv_indices": 64, "kv_len_arr": 3}
    buffers = {name: torch.zeros(size, dtype=torch.int32) for name, size in arrays.items()}
    mask = torch.cat([torch.ones(2 * n, dtype=torch.bool) for n in TOKENS])
    wrapper = wrapper_of(use_cuda_graph=True, **buffers)
    with pytest.raises(PlanError, match="needs custom_mask_buf"):
        wrapper.plan(metadata=batch.csr(), **SIZES, **OPTIONS, custom_mask=mask)
    held = torch.zeros(64, dtype=torch.uint8)
    wrapper = wrapper_of(use_cuda_graph=True, **buffers, custom_mask_buf=held)
    wrapper.plan(metadata=batch.csr(), **SIZES, **(OPTIONS | {"causal": False}), custom_mask=mask)
    masked = wrapper.run(query=batch.q, kv_cache=batch.cache)
    assert held.any() and wrapper._custom_mask_buf is held
    wrapper = wrapper_of()
    wrapper.plan(metadata=batch.csr(), **SIZES, **(OPTIONS | {"causal": False}))
    close(masked, wrapper.run(query=batch.q, kv_cache=batch.cache))


def test_lengths_that_change_later_do_not_matter() -> None:
    batch, wrapper = Batch(), wrapper_of()
    wrapper.plan(metadata=batch.csr(), **SIZES, **OPTIONS)
    for array in (batch.q_indptr, batch.kv_indptr, batch.indices, batch.lens):
        array.fill_(7)
    close(wrapper.run(*batch.parts()), batch.out)


def test_planning_as_sglang_does() -> None:
    """Its graph runner writes page numbers to the buffer and calls _cached_module.plan with arrays of the host."""
    batch = Batch(rows=(1, 1, 1))
    buffers = {
        "qo_indptr": torch.zeros(4, dtype=torch.int32),
        "kv_indptr": torch.zeros(4, dtype=torch.int32),
        "kv_indices": torch.zeros(64, dtype=torch.int32),
        "kv_len_arr": torch.zeros(3, dtype=torch.int32),
    }
    wrapper = wrapper_of(use_cuda_graph=True, **buffers)
    assert wrapper._cached_module is None
    first = Batch(rows=(1, 1, 1), tokens=(3, 4, 5))
    wrapper.plan(metadata=first.csr(), **SIZES, **OPTIONS)
    close(wrapper.run(*first.parts()), first.out)
    buffers["kv_indices"][: len(batch.indices)] = batch.indices
    memory = (wrapper._float_workspace_buffer, wrapper._int_workspace_buffer, wrapper._pin_memory_int_workspace_buffer)
    wrapper._cached_module.plan(*memory, batch.q_indptr, batch.kv_indptr, batch.lens, HEADS, CKV, True)
    close(wrapper.run(*batch.parts()), batch.out)
    wrapper._page_size = PAGE // 2
    with pytest.raises(PlanError, match=r"kv_len_arr\[\d\]=\d+ exceeds the"):
        wrapper._cached_module.plan(*memory, batch.q_indptr, batch.kv_indptr, batch.lens, HEADS, CKV, True)
    assert wrapper._kv_len_arr_buf is buffers["kv_len_arr"] and wrapper._kv_indices_buf is buffers["kv_indices"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"sm_scale": None}, "sm_scale=None"),
        ({"num_heads": 0}, "^num_heads=0"),
        ({"head_dim_ckv": None}, "head_dim_ckv"),
        ({"lse_mode": "base10"}, "lse_mode"),
        ({"query_layout": "joined"}, "query_layout"),
        ({"scale_mode": "bmm-scalar"}, "scale_mode='bmm-scalar' is not supported: it belongs to Blackwell kernels"),
        ({"scale_mode": "kv-per-tensor"}, "is for rows of kv_data_type float8_e4m3fn"),
        ({"metadata": (1, 2)}, "metadata="),
        ({"metadata": None}, "^metadata=None: pass MLAPlanMetadata.csr, dense or dual, or the four arrays of csr"),
        ({"metadata": MLAPlanMetadata.dense(torch.ones(3).int(), *torch.ones(2, 2, 1).int())}, "^seq_lens has shape"),
        ({"seq_lens": torch.zeros(2)}, "both give the batch"),
        ({"metadata": None, "seq_lens": 1, "qo_indptr": 2}, "qo_indptr and seq_lens belong to two forms of a batch"),
        ({"kv_indptr": torch.zeros(2)}, "both give the batch"),
        ({"use_profiler": 3}, "use_profiler"),
        ({"skip_softmax": True}, "skip_softmax"),
        ({"kv_row_format": "deepseek"}, "kv_row_format"),
        ({"kv_row_format": "deepseek_v4"}, "other rows than head_dim_ckv=512 and head_dim_kpe=64: pass 512 and 0"),
        ({"kv_row_format": "deepseek_v32", "kv_data_type": torch.bfloat16}, "leave kv_data_type None"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_refused_plans(change: dict[str, Any], says: str) -> None:
    batch, wrapper = Batch(), wrapper_of()
    with pytest.raises((PlanError, CapabilityError), match=says):
        wrapper.plan(**({"metadata": batch.csr()} | SIZES | OPTIONS | change))


# Of FlashInfer 0.7.2.
FIELDS = "qo_indptr kv_indptr kv_indices kv_len_arr cum_seq_lens_q block_tables seq_lens max_q_len"
PLAN = (
    "metadata num_heads head_dim_ckv head_dim_kpe page_size causal sm_scale q_data_type kv_data_type use_profiler "
    "query_layout kv_cache_layout lse_mode output_dtype output_scale scale_mode skip_softmax enable_pdl use_sinks"
)
RUN = (
    "q_nope q_pe ckv_cache kpe_cache out lse return_lse profiler_buffer kv_len page_table return_lse_base_on_e o_scale"
)
RUN_KEYWORDS = (
    "query kv_cache ckv_scale ckv_scale_arr kpe_scale sinks skip_softmax_threshold_scale_factor bmm1_scale bmm2_scale"
)


def names_of(function: Any, *kinds: Any) -> list[str]:
    return [p.name for p in inspect.signature(function).parameters.values() if p.kind in kinds and p.name != "self"]


def test_names_of_flashinfer() -> None:
    by_position, by_keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    assert list(MLAPlanMetadata._fields) == FIELDS.split()
    assert names_of(MLAPlanMetadata.csr, by_position) == FIELDS.split()[:4]
    dense = ["cum_seq_lens_q", "block_tables", "seq_lens", "max_q_len"]
    assert names_of(MLAPlanMetadata.dense, by_position) == names_of(MLAPlanMetadata.dual, by_keyword) == dense
    assert names_of(MLAPlanMetadata.dual, by_position) == FIELDS.split()[:4]
    wrapper = flashpage.BatchMLAPagedAttentionWrapper
    assert set(f"{PLAN} {FIELDS}".split()) <= set(names_of(wrapper.plan, by_keyword))
    assert names_of(wrapper.run, by_position) == RUN.split()
    assert set(RUN_KEYWORDS.split()) == set(names_of(wrapper.run, by_keyword))


def test_equal_keywords_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step with the last plan's keywords skips their checks; others, and plans that were refused, do not."""
    batch, wrapper = Batch(), wrapper_of()
    checked: list[str] = []
    choice = latent.checks.choice
    monkeypatch.setattr(latent.checks, "choice", lambda name, *rest: checked.append(name) or choice(name, *rest))

    def planned(**changed: Any) -> bool:
        """Whether the plan's keywords were checked."""
        checked.clear()
        wrapper.plan(metadata=batch.csr(), **(SIZES | OPTIONS | changed))
        return bool(checked)

    assert planned() and not planned()
    close(wrapper.run(*batch.parts()), batch.out)
    assert planned(lse_mode="basee") and planned() and not planned()
    with pytest.raises(PlanError, match="lse_mode"):
        planned(lse_mode="base3")
    with pytest.raises(PlanError):  # a refused batch of other options, after which the former options are taken again
        wrapper.plan(metadata=batch.csr()._replace(kv_len_arr=batch.lens[:1]), **(SIZES | OPTIONS | {"sm_scale": 1.0}))
    assert planned()
    close(wrapper.run(*batch.parts()), batch.out)
    wrapper._sm_scale = 100.0  # an engine's value holds until the next plan
    assert not planned()
    close(wrapper.run(*batch.parts()), batch.out)
    mask = torch.ones(sum(r * n for r, n in zip(batch.q_indptr.diff().tolist(), batch.lens.tolist(), strict=True)))
    assert planned(custom_mask=mask.bool(), causal=False) and planned() and not planned()
    close(wrapper.run(*batch.parts()), batch.out)
