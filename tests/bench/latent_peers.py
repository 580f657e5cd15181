"""The libraries that gpu.py times over latent rows (MLA): decode and a few rows a request, from the same tensors."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from peers import Call, only_sm80
from torch import Tensor
from workloads import LatentCase, Paged, indptr

SM_SCALE = 192**-0.5  # of DeepSeek V3: 128 + 64 columns before absorption


class LatentBatch:
    """The tensors of one case: q [rows, heads, 576] and one cache [pages, page_size, 576]."""

    def __init__(self, case: LatentCase, device: torch.device) -> None:
        self.case, self.device = case, device
        self.q_lens, self.kv_lens = case.q_lens, case.kv_lens
        self.q_indptr = indptr(self.q_lens)
        self.table = Paged(self.kv_lens, case.page_size, device)
        shapes = (sum(self.q_lens), case.num_q_heads), (self.table.num_pages, case.page_size)
        self.q, self.cache = (
            torch.empty(*shape, case.head_dim, device=device, dtype=torch.bfloat16).normal_() for shape in shapes
        )

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The columns that K and V share, and those that only K has."""
        columns = self.case.head_dim_vo
        return rows[..., :columns], rows[..., columns:]

    def error(self, out: Tensor) -> float:
        """Relative error against fp32 torch, for the first and the last request."""
        out, worst = out.reshape(*self.q.shape[:2], self.case.head_dim_vo), 0.0
        for i in {0, len(self.q_lens) - 1}:
            rows = slice(*self.q_indptr[i : i + 2].tolist())
            expected = self._reference(self.q[rows].float(), i)
            worst = max(worst, ((out[rows].float() - expected).norm() / expected.norm()).item())
        return worst

    def _reference(self, q: Tensor, i: int) -> Tensor:
        pages = self.cache[self.table.indices[slice(*self.table.indptr[i : i + 2].tolist())].long()]
        tokens = pages.flatten(0, 1)[: self.kv_lens[i]].float()
        scores = torch.einsum("qhd,kd->hqk", q, tokens) * SM_SCALE
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(len(tokens) - len(q) + 1)
        return torch.einsum("hqk,kd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), self.split(tokens)[0])


def latent_plan(module_name: str, batch: LatentBatch, **options: object) -> tuple[Any, Call]:
    """A wrapper of flashpage or of FlashInfer, and its plan, with lengths on the host."""
    module, case = importlib.import_module(module_name), batch.case
    workspace = torch.empty(512 << 20, dtype=torch.uint8, device=batch.device)
    wrapper = getattr(module, "mla", module).BatchMLAPagedAttentionWrapper(workspace, **options)
    lengths = torch.tensor(batch.kv_lens, dtype=torch.int32)
    tables = (batch.q_indptr, batch.table.indptr, batch.table.indices, lengths)
    sizes = {"num_heads": case.num_q_heads, "head_dim_ckv": case.head_dim_vo}
    sizes |= {"head_dim_kpe": case.head_dim - case.head_dim_vo, "page_size": case.page_size}
    kinds = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
    rest: dict[str, Any] = {**sizes, "causal": case.q_len > 1, "sm_scale": SM_SCALE, **kinds}
    if module_name == "flashpage":
        return wrapper, lambda: wrapper.plan(metadata=module.MLAPlanMetadata.csr(*tables), **rest)
    return wrapper, lambda: wrapper.plan(*tables, **rest)


def wrapper_call(module_name: str, batch: LatentBatch, **options: object) -> Call:
    """flashpage, and FlashInfer."""
    wrapper, plan = latent_plan(module_name, batch, **options)
    plan()
    ckv, kpe = batch.split(batch.cache)
    if module_name == "flashinfer":  # its own layout: two tensors
        ckv, kpe = ckv.contiguous(), kpe.contiguous()
    parts = (*batch.split(batch.q), ckv, kpe)
    return lambda: wrapper.run(*parts)


def sm80_call(batch: LatentBatch) -> Call:
    """flashpage with the kernel that cards before Hopper get."""
    with only_sm80():
        return wrapper_call("flashpage", batch)


def flashmla_call(batch: LatentBatch) -> Call | None:
    """FlashMLA, which takes pages of 64 tokens; it makes its schedule in the first call."""
    import flash_mla

    case = batch.case
    if case.page_size != 64:
        return None
    q = batch.q.view(case.batch, case.q_len, *batch.q.shape[1:])
    table, lengths = batch.table.rectangular(), torch.tensor(batch.kv_lens, dtype=torch.int32, device=batch.device)
    schedule = flash_mla.get_mla_metadata()[0]
    options = {"softmax_scale": SM_SCALE, "causal": case.q_len > 1, "use_legacy": True}
    arguments = (q, batch.cache.unsqueeze(2), table, lengths, case.head_dim_vo, schedule)
    return lambda: flash_mla.flash_mla_with_kvcache(*arguments, **options)[0]


def fa3_call(batch: LatentBatch) -> Call:
    """FlashAttention-3 with `qv`, scheduled once in advance."""
    import flash_attn_interface as fa3

    case = batch.case
    lengths = torch.tensor(batch.kv_lens, dtype=torch.int32, device=batch.device)
    starts, longest = batch.q_indptr.to(batch.device), max(batch.kv_lens)
    schedule = fa3.get_scheduler_metadata(
        *(case.batch, case.q_len, longest, case.num_q_heads, 1, case.head_dim - case.head_dim_vo, lengths),
        qkv_dtype=torch.bfloat16,
        cu_seqlens_q=starts,
        page_size=case.page_size,
        causal=True,
        headdim_v=case.head_dim_vo,
    )
    (q_nope, q_pe), (ckv, kpe) = batch.split(batch.q), batch.split(batch.cache.unsqueeze(2))
    options: dict[str, Any] = {"cache_seqlens": lengths, "page_table": batch.table.rectangular()}
    options |= {"cu_seqlens_q": starts, "max_seqlen_q": case.q_len, "causal": True, "softmax_scale": SM_SCALE}
    q_pe, q_nope = q_pe.contiguous(), q_nope.contiguous()
    return lambda: fa3.flash_attn_with_kvcache(q_pe, kpe, ckv, qv=q_nope, scheduler_metadata=schedule, **options)


LATENT_PEERS: dict[str, tuple[str, Callable[[LatentBatch], Call | None]]] = {  # as peers.PEERS
    "flashpage": ("flashpage", lambda batch: wrapper_call("flashpage", batch)),
    "flashpage sm80": ("flashpage", sm80_call),
    "flashmla": ("flash_mla", flashmla_call),
    "fa3 scheduled": ("flash_attn_interface", fa3_call),
    "flashinfer fa2": ("flashinfer", lambda batch: wrapper_call("flashinfer", batch, backend="fa2")),
    "flashinfer fa3": ("flashinfer", lambda batch: wrapper_call("flashinfer", batch, backend="fa3")),
}
