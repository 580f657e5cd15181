"""The libraries that gpu.py times over latent rows (MLA): decode and a few rows a request, from the same tensors."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from latent_stores import E4M3, LARGEST, ONE_SCALE, Store, stored, to_e4m3
from peers import Call, only_sm80, worst_of
from torch import Tensor
from workloads import LatentCase, Paged, indptr

SM_SCALE = 192**-0.5  # of DeepSeek V3: 128 + 64 columns before absorption


class LatentBatch:
    """The tensors of one case: q [rows, heads, 576] and one cache [pages, page_size, 576, or 656 bytes]."""

    def __init__(self, case: LatentCase, device: torch.device) -> None:
        self.case, self.device = case, device
        self.q_lens, self.kv_lens = case.q_lens, case.kv_lens
        self.q_indptr = indptr(self.q_lens)
        self.table = Paged(self.kv_lens, case.page_size, device)
        shapes = (sum(self.q_lens), case.num_q_heads), (self.table.num_pages, case.page_size)
        self.q, rows = (
            torch.empty(*shape, case.head_dim, device=device, dtype=torch.bfloat16).normal_() for shape in shapes
        )
        self.store: Store = stored(rows, case.row_format, case.head_dim_vo)
        self.cache = self.store.cache

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The columns that K and V share, and those that only K has."""
        columns = self.case.head_dim_vo
        return rows[..., :columns], rows[..., columns:]

    def error(self, out: Tensor) -> float:
        """Relative error against fp64 torch over the rows as they are stored, for the first and the last request."""
        out, errors = out.reshape(*self.q.shape[:2], self.case.head_dim_vo), []
        for i in {0, len(self.q_lens) - 1}:
            rows = slice(*self.q_indptr[i : i + 2].tolist())
            expected = self._reference(self.q[rows].double(), i)
            errors.append(((out[rows].double() - expected).norm() / expected.norm()).item())
        return worst_of(errors)

    def _reference(self, q: Tensor, i: int) -> Tensor:
        pages = self.table.indices[slice(*self.table.indptr[i : i + 2].tolist())].long()
        tokens = self.store.exact(pages)[: self.kv_lens[i]]
        scores = torch.einsum("qhd,kd->hqk", q, tokens) * SM_SCALE
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(len(tokens) - len(q) + 1)
        return torch.einsum("hqk,kd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), self.split(tokens)[0])

    def lists(self) -> Tensor:
        """The slots of the tokens that each row sees, [batch, rows, tokens] int32, of -1 after them; as many as a
        multiple of 64."""
        case, table = self.case, self.table
        longest = -(-max(self.kv_lens) // 64) * 64
        tokens = torch.arange(longest, device=self.device)
        pages = table.rectangular().long()[:, (tokens // case.page_size).clamp(max=int(table.indptr.diff().max()) - 1)]
        slots = pages * case.page_size + tokens % case.page_size
        lengths = torch.tensor(self.kv_lens, device=self.device)[:, None]
        seen = lengths - case.q_len + 1 + torch.arange(case.q_len, device=self.device)  # tokens of each row
        return slots[:, None].masked_fill(tokens >= seen.unsqueeze(-1), -1).int()


def latent_plan(module_name: str, batch: LatentBatch, **options: object) -> tuple[Any, Call]:
    """A wrapper of flashpage or of FlashInfer, and its plan, with lengths on the host."""
    module, case = importlib.import_module(module_name), batch.case
    workspace = torch.empty(512 << 20, dtype=torch.uint8, device=batch.device)
    wrapper = getattr(module, "mla", module).BatchMLAPagedAttentionWrapper(workspace, **options)
    lengths = torch.tensor(batch.kv_lens, dtype=torch.int32)
    tables = (batch.q_indptr, batch.table.indptr, batch.table.indices, lengths)
    sizes = {"num_heads": case.num_q_heads, "head_dim_ckv": case.head_dim_vo}
    sizes |= {"head_dim_kpe": case.head_dim - case.head_dim_vo, "page_size": case.page_size}
    kinds: dict[str, Any] = {"q_data_type": torch.bfloat16, "kv_data_type": E4M3 if case.row_format else torch.bfloat16}
    if case.row_format == "deepseek_v32":
        kinds |= {"kv_data_type": None, "kv_row_format": case.row_format}
    rest: dict[str, Any] = {**sizes, "causal": case.q_len > 1, "sm_scale": SM_SCALE, **kinds}
    if module_name == "flashpage":
        return wrapper, lambda: wrapper.plan(metadata=module.MLAPlanMetadata.csr(*tables), **rest)
    return wrapper, lambda: wrapper.plan(*tables, **rest)


def wrapper_call(module_name: str, batch: LatentBatch, **options: object) -> Call | None:
    """flashpage, and FlashInfer, whose fa3 alone takes rows in e4m3, and none of 656 bytes."""
    row_format, is_peer = batch.case.row_format, module_name == "flashinfer"
    if is_peer and row_format and (row_format == "deepseek_v32" or options.get("backend") != "fa3"):
        return None
    wrapper, plan = latent_plan(module_name, batch, **options)
    plan()
    if row_format == "deepseek_v32":
        return lambda: wrapper.run(query=batch.q, kv_cache=batch.cache)
    ckv, kpe = batch.split(batch.cache)
    if is_peer:  # its own layout: two tensors
        ckv, kpe = ckv.contiguous(), kpe.contiguous()
    parts, scales = (*batch.split(batch.q), ckv, kpe), batch.store.run_arguments()
    return lambda: wrapper.run(*parts, **scales)


def sm80_call(batch: LatentBatch) -> Call | None:
    """flashpage with the kernel that cards before Hopper get."""
    with only_sm80():
        return wrapper_call("flashpage", batch)


def flashmla_call(batch: LatentBatch) -> Call | None:
    """FlashMLA, which takes pages of 64 tokens; it makes its schedule in the first call. Rows of 656 bytes it reads by
    lists, here of all tokens. Over one scale its queries are in e4m3, which adds to its error."""
    import flash_mla

    case = batch.case
    if case.page_size != 64 or case.row_format == "tokens" or case.head_dim == case.head_dim_vo:
        return None
    if case.row_format == "deepseek_v32":
        return flashmla_by_lists(batch)
    q = batch.q.view(case.batch, case.q_len, *batch.q.shape[1:])
    more: dict[str, Any] = {}
    if case.row_format == "tensor":
        q_scale = q.abs().amax().float().reshape(1) / LARGEST
        q = to_e4m3(q / q_scale)
        more = {"descale_q": q_scale, "descale_k": torch.full_like(q_scale, ONE_SCALE), "is_fp8_kvcache": True}
    table, lengths = batch.table.rectangular(), torch.tensor(batch.kv_lens, dtype=torch.int32, device=batch.device)
    schedule = flash_mla.get_mla_metadata()[0]
    options: dict[str, Any] = {"softmax_scale": SM_SCALE, "causal": case.q_len > 1, "use_legacy": True, **more}
    arguments = (q, batch.cache.unsqueeze(2), table, lengths, case.head_dim_vo, schedule)
    return lambda: flash_mla.flash_mla_with_kvcache(*arguments, **options)[0]


def flashmla_by_lists(batch: LatentBatch) -> Call:
    """FlashMLA over rows of 656 bytes. It takes 64 and 128 heads; fewer are padded, as engines do."""
    import flash_mla

    case, heads = batch.case, 64 if batch.case.num_q_heads <= 64 else 128
    q = batch.q.new_zeros(case.batch, case.q_len, heads, case.head_dim)
    q[:, :, : case.num_q_heads] = batch.q.unflatten(0, (case.batch, case.q_len))
    given = (q, batch.cache.unsqueeze(2), None, None, case.head_dim_vo, flash_mla.get_mla_metadata()[0])
    options = {"indices": batch.lists(), "is_fp8_kvcache": True, "softmax_scale": SM_SCALE, "use_legacy": True}
    return lambda: flash_mla.flash_mla_with_kvcache(*given, **options)[0][:, :, : case.num_q_heads]


def fa3_call(batch: LatentBatch) -> Call | None:
    """FlashAttention-3 with `qv`, scheduled once in advance; it takes 16 bits alone."""
    import flash_attn_interface as fa3

    case = batch.case
    if case.row_format:
        return None
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
