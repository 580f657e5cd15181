"""Functions over latent rows that plan themselves: FlashMLA's and FlashInfer's, compared with the fp64 reference."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from reference import Options, attention
from signatures import shown

from flashpage import FlashpageError, RunError, decode, flash_mla, mla, prefill
from flashpage.wrappers import function_plans
from flashpage.wrappers.base import Attention

pytestmark = pytest.mark.usefixtures("quick_kernels")

HEADS, CKV, KPE, PAGE, SCALE = 6, 128, 32, 16, 0.13
LENGTHS = (40, 17, 5, 0)
WORKSPACE = torch.zeros(16, dtype=torch.uint8)
MLA = (
    "query kv_cache workspace_buffer qk_nope_head_dim kv_lora_rank qk_rope_head_dim block_tables seq_lens max_seq_len "
)
SIGNATURES: dict[Any, str] = {
    flash_mla.get_mla_metadata: "",
    flash_mla.flash_mla_with_kvcache: (
        "q k_cache block_table cache_seqlens head_dim_v tile_scheduler_metadata num_splits=None softmax_scale=None "
        "causal=False is_fp8_kvcache=None indices=None attn_sink=None extra_k_cache=None "
        "extra_indices_in_kvcache=None topk_length=None extra_topk_length=None enable_batch_invariant=False "
        "use_legacy=False kv_format=None descale_q=None descale_k=None"
    ),
    flash_mla.flash_mla_sparse_fwd: (
        "q kv indices sm_scale d_v=512 attn_sink=None topk_length=None use_legacy=False return_log2_lse=None "
        "indexer_topk=0"
    ),
    flash_mla.get_mla_decoding_metadata: (
        "seqlens_k num_q_tokens_per_head_k h_k h_q=None is_fp8_kvcache=False topk=None use_legacy=False"
    ),
    flash_mla.flash_attn_varlen_func: (
        "q k v cu_seqlens_qo cu_seqlens_kv max_seqlen_qo max_seqlen_kv dropout_p=0.0 softmax_scale=None causal=False "
        "deterministic=False is_varlen=True"
    ),
    flash_mla.has_legacy: "",
    decode.trtllm_batch_decode_with_kv_cache_mla: (
        MLA + "sparse_mla_top_k=0 out=None bmm1_scale=1.0 bmm2_scale=1.0 sinks=None "
        "skip_softmax_threshold_scale_factor=None enable_pdl=None backend='auto' is_var_seq=True "
        "uses_shared_paged_kv_idx=True lse=None return_lse=False cute_dsl_impl='auto' kv_scale_format='auto' "
        "cum_seq_lens_q=None max_q_len=None multi_ctas_kv_counter_buffer=None sparse_mla_top_k_lens=None "
        "enable_dcp=False cp_world=1 cp_rank=0 causal_seqlens_kv_global=None use_fp16_softmax=None "
        "return_lse_base=None"
    ),
    mla.xqa_batch_decode_with_kv_cache_mla: (MLA + "out=None bmm1_scale=1.0 bmm2_scale=1.0 sinks=None enable_pdl=None"),
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: function.__name__)
def test_parameters(function: Any) -> None:
    """Names, order and defaults of sgl-flash-mla 1.0.0 and of FlashInfer 0.7.2."""
    parameters = inspect.signature(function).parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    assert [text.replace(" ", "") for text in shown(named)] == SIGNATURES[function].split()


class Batch:
    """Requests of `rows` query rows each, in pages whose other tokens are NaN."""

    def __init__(self, rows: int, device: str = "cpu") -> None:
        generator = torch.Generator().manual_seed(rows)
        self.rows, dtype = rows, torch.float32 if device == "cpu" else torch.bfloat16
        self.q = torch.randn(len(LENGTHS), rows, HEADS, CKV + KPE, generator=generator)
        self.lengths = torch.tensor(LENGTHS, dtype=torch.int32)
        self.tables = torch.full((len(LENGTHS), 3), 10**6, dtype=torch.int32)
        pages = [-(-n // PAGE) for n in LENGTHS]
        order = torch.randperm(sum(pages) + 2, generator=generator).int()
        self.cache = torch.full((len(order), PAGE, CKV + KPE), math.nan)
        self.tokens = []
        for i, (length, count) in enumerate(zip(LENGTHS, pages, strict=True)):
            self.tables[i, :count] = order[sum(pages[:i]) :][:count]
            self.tokens.append(torch.randn(length, 1, CKV + KPE, generator=generator).to(dtype))
            at = torch.arange(length)
            self.cache[self.tables[i, at // PAGE].long(), at % PAGE] = self.tokens[i][:, 0].float()
        self.q, self.cache = self.q.to(device, dtype), self.cache.to(device, dtype)
        self.lengths, self.tables = self.lengths.to(device), self.tables.to(device)

    def expected(self, causal: bool = True, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs [batch, rows, heads, CKV] and LSEs [batch, rows, heads], base 2."""
        given = Options(**({"sm_scale": SCALE, "causal": causal} | options))
        states = [attention(q, k, k[..., :CKV], given) for q, k in zip(self.q.cpu(), self.tokens, strict=True)]
        return torch.stack([state.out for state in states]), torch.stack([state.lse for state in states])

    def flash_mla(self, meta: Any = None, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = flash_mla.get_mla_metadata(self.lengths, self.rows * HEADS, num_heads_k=1)
        given: dict[str, Any] = {
            "q": self.q,
            "k_cache": self.cache.unsqueeze(2),
            "block_table": self.tables,
            "cache_seqlens": self.lengths,
            "head_dim_v": CKV,
            "tile_scheduler_metadata": first if meta is None else meta,
            "num_splits": second,
            "softmax_scale": SCALE,
        }
        return flash_mla.flash_mla_with_kvcache(**(given | options))

    def flashinfer(self, **options: Any) -> Any:
        given: dict[str, Any] = {
            "query": self.q,
            "kv_cache": self.cache,
            "workspace_buffer": WORKSPACE,
            "qk_nope_head_dim": 32,
            "kv_lora_rank": CKV,
            "qk_rope_head_dim": KPE,
            "block_tables": self.tables,
            "seq_lens": self.lengths,
            "max_seq_len": 64,
            "bmm1_scale": SCALE,
        }
        return decode.trtllm_batch_decode_with_kv_cache_mla(**(given | options))


def check(found: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    near = {"rtol": 1e-5, "atol": 1e-5} if found[0].is_cpu else {"rtol": 2e-2, "atol": 2e-2}
    for tensor, whole in zip(found, expected, strict=True):
        torch.testing.assert_close(tensor.cpu().double(), whole.reshape(tensor.shape), **near)


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The lengths of each plan from here on."""
    made, original = [], Attention.plan_on_device

    def plan(self: Attention, tables: Any, *args: Any) -> None:
        made.append(tables)
        original(self, tables, *args)

    monkeypatch.setattr(Attention, "plan_on_device", plan)
    return made


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("rows", [1, 3])
def test_flash_mla(rows: int, causal: bool, device: str) -> None:
    batch = Batch(rows, device)
    out, lse = batch.flash_mla(causal=causal)
    expected, expected_lse = batch.expected(causal=causal)
    check((out, lse.transpose(1, 2)), (expected, expected_lse * math.log(2)))
    assert lse.shape == (len(LENGTHS), HEADS, rows) and lse.is_contiguous()
    assert torch.equal(batch.flash_mla(causal=causal, is_fp8_kvcache=None)[0], out)
    scaled = batch.flash_mla(softmax_scale=None, causal=causal)[0]
    torch.testing.assert_close(scaled, batch.flash_mla(softmax_scale=(CKV + KPE) ** -0.5, causal=causal)[0])


def test_calls_of_one_step_share_a_plan(plans: list[Any]) -> None:
    batch = Batch(1)
    meta, _ = flash_mla.get_mla_metadata()
    for _ in range(3):
        batch.flash_mla(meta)
    assert len(plans) == 1
    batch.tables = batch.tables.flip(0).contiguous()  # other pages of equally long requests
    batch.lengths, batch.q, batch.tokens = batch.lengths.flip(0), batch.q.flip(0), batch.tokens[::-1]
    check(batch.flash_mla(meta)[:1], batch.expected()[:1])
    batch.lengths[3] = 7  # written in place
    batch.tokens[3] = batch.tokens[3][:7]
    check(batch.flash_mla(meta)[:1], batch.expected()[:1])
    with torch.inference_mode():
        batch.lengths, batch.tables = batch.lengths.clone(), batch.tables.clone()
        meta, _ = flash_mla.get_mla_metadata()
        batch.flash_mla(meta)
        batch.lengths[3] = 6
        batch.tokens[3] = batch.tokens[3][:6]
        check(batch.flash_mla(meta)[:1], batch.expected()[:1])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"attn_sink": torch.zeros(HEADS)}, "attn_sink"),
        ({"topk_length": 3}, "topk_length=3"),
        ({"is_fp8_kvcache": True}, "is_fp8_kvcache=True"),
        ({"tile_scheduler_metadata": torch.zeros(1)}, "tile_scheduler_metadata="),
        ({"num_splits": torch.zeros(1)}, "num_splits"),
        ({"block_table": None}, "block_table"),
        ({"cache_seqlens": None}, "cache_seqlens"),
        ({"cache_seqlens": torch.zeros(3).int()}, "q is for 4 requests but cache_seqlens has 3"),
        ({"block_table": torch.zeros(2, 1).int()}, "block_table has shape"),
        ({"k_cache": torch.zeros(9, PAGE, 2, CKV + KPE)}, "k_cache has 2 heads"),
        ({"k_cache": torch.zeros(9, PAGE, CKV + KPE)}, "k_cache has shape"),
        ({"k_cache": torch.zeros(9, PAGE, 1, CKV)}, "q has 160 columns but k_cache has 128"),
        ({"k_cache": torch.zeros(9, PAGE, 1, CKV + KPE).half()}, "k_cache has dtype torch.float16 but q has"),
        ({"head_dim_v": 256}, "head_dim of q less head_dim_v"),
        ({"q": torch.zeros(4, HEADS, CKV + KPE)}, "q has shape"),
        ({"q": torch.zeros(4, 0, HEADS, CKV + KPE)}, "q has 0 rows"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_flash_mla_refuses(change: dict[str, Any], says: str) -> None:
    with pytest.raises(FlashpageError, match=says):
        Batch(1).flash_mla(**change)


@pytest.mark.cuda
def test_graphs_plan_at_every_replay() -> None:
    """Layers of a graph share a plan; replays read lengths and page numbers that were written in between."""
    batch = Batch(1, "cuda:0")
    batch.flash_mla(), batch.flashinfer()
    graph, meta = torch.cuda.CUDAGraph(), flash_mla.get_mla_metadata()[0]
    batch.flash_mla(meta)  # a plan outside of the graph is none of the graph
    with torch.cuda.graph(graph):
        outputs = [batch.flash_mla(meta)[0], batch.flash_mla(meta)[0], batch.flashinfer()]
    batch.lengths[0], batch.tokens[0] = 21, batch.tokens[0][:21]
    graph.replay()
    for out in outputs:
        check((out,), batch.expected()[:1])


def test_flash_mla_metadata_belongs_to_one_step() -> None:
    meta, _ = flash_mla.get_mla_metadata()
    Batch(1).flash_mla(meta)
    assert meta.have_initialized
    with pytest.raises(RunError, match="first used with s_q=1, now s_q is 3"):
        Batch(3).flash_mla(meta)
    meta, _ = flash_mla.get_mla_metadata()
    meta.tile_scheduler_metadata = torch.zeros(1, 8)  # as batch-invariant engines write it
    with pytest.raises(RunError, match="was written"):
        Batch(1).flash_mla(meta)


@pytest.mark.parametrize("rows", [1, 3])
def test_flashinfer(rows: int, device: str) -> None:
    batch = Batch(rows, device)
    expected = batch.expected()
    out, lse = batch.flashinfer(return_lse=True)
    assert out.shape == (len(LENGTHS), rows, HEADS, CKV) and lse.shape == (len(LENGTHS) * rows, HEADS)
    check((out, lse), expected)
    given = {"out": torch.empty_like(out), "lse": torch.empty(len(LENGTHS), rows, HEADS, device=device)}
    found = batch.flashinfer(kv_cache=batch.cache.unsqueeze(1), return_lse=True, return_lse_base="basee", **given)
    assert found[0] is given["out"] and found[1] is given["lse"]
    check(found, (expected[0], expected[1] * math.log(2)))
    sinks = torch.randn(HEADS)
    scales = {"bmm1_scale": torch.full((1,), SCALE, device=device), "bmm2_scale": 0.5}
    found = batch.flashinfer(**scales, sinks=[sinks.to(device)])
    check((found,), (batch.expected(sinks=sinks)[0] * 0.5,))
    found = batch.flashinfer(**scales | {"bmm2_scale": torch.full((1,), 0.5, device=device)}, sinks=[sinks.to(device)])
    check((found,), (batch.expected(sinks=sinks)[0] * 0.5,))
    plain = batch.flashinfer()
    arguments = (batch.q, batch.cache, WORKSPACE, 32, CKV, KPE, batch.tables, batch.lengths, 64)
    assert torch.equal(mla.xqa_batch_decode_with_kv_cache_mla(*arguments, bmm1_scale=SCALE), plain)
    assert torch.equal(prefill.trtllm_prefill_with_kv_cache_mla(*arguments, bmm1_scale=SCALE), plain)


def test_flashinfer_rows_of_different_numbers() -> None:
    batch = Batch(3)
    begins = torch.tensor([0, 3, 4, 5, 5], dtype=torch.int32)
    query = torch.cat([batch.q[0], batch.q[1, 2:], batch.q[2, 2:], torch.full((1, HEADS, CKV + KPE), math.nan)])
    out, lse = batch.flashinfer(query=query, cum_seq_lens_q=begins, max_q_len=3, return_lse=True)
    expected = batch.expected()[0]
    check((out[:5],), (torch.cat([expected[0], expected[1, 2:], expected[2, 2:]]),))
    assert not out[5].any() and lse[5].isneginf().all()  # a row of no request


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"sparse_mla_top_k": 2048}, "sparse_mla_top_k=2048"),
        ({"enable_dcp": True}, "enable_dcp=True"),
        ({"cp_world": 2}, "cp_world=2"),
        ({"backend": "sparse"}, "backend='sparse'"),
        ({"use_fp16_softmax": True}, "use_fp16_softmax=True"),
        ({"return_lse_base": "base10"}, "base10"),
        ({"query": torch.zeros(4, HEADS, CKV + KPE)}, "query has shape"),
        ({"query": torch.zeros(3, 1, HEADS, CKV + KPE)}, "query is for 3 requests but seq_lens has 4"),
        ({"kv_lora_rank": 32}, r"query has 160 columns but kv_lora_rank \+ qk_rope_head_dim is 64"),
        ({"kv_cache": torch.zeros(9, PAGE, 3, CKV + KPE)}, "kv_cache has shape"),
        ({"kv_cache": torch.zeros(9, PAGE, CKV + KPE, dtype=torch.uint8)}, "kv_cache has dtype torch.uint8 but query"),
        ({"out": torch.zeros(4, HEADS, CKV)}, "out has shape"),
        ({"out": torch.zeros(8, 1, HEADS, CKV)[::2]}, None),
        ({"seq_lens": None}, "seq_lens"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_flashinfer_refuses(change: dict[str, Any], says: str | None) -> None:
    if says is None:  # one row a request: any stride between requests
        assert torch.equal(Batch(1).flashinfer(**change), Batch(1).flashinfer())
        return
    with pytest.raises(FlashpageError, match=says):
        Batch(1).flashinfer(**change)


def test_threads_keep_few_plans() -> None:
    """Plans are found again by their options, so layers with other scales share one."""
    batch = Batch(1)
    batch.flashinfer()
    before = len(function_plans._local.plans)
    batch.flashinfer(bmm1_scale=0.5)
    batch.flash_mla(softmax_scale=0.7)
    assert len(function_plans._local.plans) == before
