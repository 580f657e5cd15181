"""The libraries that gpu.py times. Each makes a call that computes a batch's output, all from the same tensors."""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from cudnn_fp8 import fp8_attention
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from workloads import Case, Paged, indptr

from flashpage.kernels import attention_sm80, choose

Call = Callable[[], Tensor]


class Lengths:
    """The sizes of one case and its page table: a plan needs no more."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.device = case, device
        self.q_lens, self.kv_lens = case.q_lens, case.kv_lens
        self.q_indptr = indptr(self.q_lens)
        self.kv_indptr = indptr(self.kv_lens)  # tokens
        if case.page_size:
            self.table = Paged(self.kv_lens, case.page_size, device)


class Batch(Lengths):
    """The tensors of one case."""

    def __init__(self, case: Case, device: torch.device) -> None:
        super().__init__(case, device)
        self.q = torch.randn(sum(self.q_lens), case.num_q_heads, case.head_dim, device=device, dtype=torch.bfloat16)
        self.q = self.q.to(case.q_dtype)
        self.sinks = torch.randn(case.num_q_heads, device=device) if case.has_sinks else None
        if case.page_size:
            self.cache = self.table.cache(case.num_kv_heads, case.head_dim, case.kv_dtype)
            values = self.cache[:, 1]
        else:
            shape = (sum(self.kv_lens), case.num_kv_heads)
            self.k, self.v = (
                torch.randn(*shape, dim, device=device, dtype=torch.bfloat16).to(case.kv_dtype)
                for dim in (case.head_dim, case.value_dim)
            )
            values = self.v
        if case.has_one_sign:
            values.copy_(values.to(torch.bfloat16).abs())  # fp8 tensors have no abs

    def keys_and_values(self, i: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one request, [kv_len, num_kv_heads, head_dim]."""
        if self.case.page_size:
            return self.table.request(self.cache, i)
        begin, end = self.kv_indptr[i : i + 2].tolist()
        return self.k[begin:end], self.v[begin:end]

    def error(self, out: Tensor) -> float:
        """Relative error against `reference`, for at most the last 64 rows of the first and of the last request."""
        errors = []
        for i in {0, len(self.q_lens) - 1}:
            end = int(self.q_indptr[i + 1])
            begin = max(int(self.q_indptr[i]), end - 64)
            expected = reference(self.q[begin:end], *self.keys_and_values(i), self.case, self.sinks)
            difference = out[begin:end].to(expected.dtype) - expected
            errors.append((difference.norm() / expected.norm()).item())
        return worst_of(errors)


def worst_of(errors: list[float]) -> float:
    """The largest error; an output with NaN or infinity is refused, as max would pass over NaN."""
    if not all(map(math.isfinite, errors)):
        raise RuntimeError("its output is not finite")
    return max(errors)


def reference(q: Tensor, k: Tensor, v: Tensor, case: Case, sinks: Tensor | None = None) -> Tensor:
    """Attention of the last rows of one request, in fp32, or in fp64 over fp8 K and V."""
    group, dtype = q.shape[1] // k.shape[1], torch.float64 if case.kv_dtype.itemsize == 1 else torch.float32
    k, v = (x.to(dtype).repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.to(dtype), k) * q.shape[-1] ** -0.5
    if case.soft_cap:
        scores = case.soft_cap * torch.tanh(scores / case.soft_cap)
    before = torch.arange(len(k) - len(q), len(k), device=q.device)[:, None] - torch.arange(len(k), device=q.device)
    if case.causal:
        scores = scores.masked_fill(before < 0, float("-inf"))
    if case.window_left >= 0:
        scores = scores.masked_fill(before > case.window_left, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(dtype)[:, None, None].expand(-1, len(q), 1)], -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(k)], v)


def planned(module_name: str, lengths: Lengths, o_data_type: torch.dtype | None = None, **options: object) -> Any:
    """A wrapper of flashpage, or of a library with its interface, that has planned the case."""
    module, case = importlib.import_module(module_name), lengths.case
    workspace = torch.empty(512 << 20, dtype=torch.uint8, device=lengths.device)
    heads = (case.num_q_heads, case.num_kv_heads, case.head_dim)
    masks = {"causal": case.causal, "window_left": case.window_left}
    more: dict[str, Any] = {"q_data_type": case.q_dtype, "kv_data_type": case.kv_dtype}
    if case.soft_cap:
        more["logits_soft_cap"] = case.soft_cap
    if o_data_type is not None:
        more["o_data_type"] = o_data_type
    if not case.page_size:
        ragged = module.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", **options)
        more |= {"head_dim_vo": case.head_dim_vo} if case.head_dim_vo else {}
        ragged.plan(lengths.q_indptr, lengths.kv_indptr, *heads, **masks, **more)
        return ragged
    table = lengths.table
    pages = (table.indptr, table.indices, table.last_page_len)
    if case.q_len == 1:
        paged = module.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", **options)
        paged.plan(*pages, *heads, case.page_size, window_left=case.window_left, **more)
    else:
        paged = module.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", **options)
        paged.plan(lengths.q_indptr, *pages, *heads, case.page_size, **masks, **more)
    return paged


def wrapper_call(
    module_name: str, batch: Batch, o_data_type: torch.dtype | None = None, **options: object
) -> Call | None:
    """flashpage, or a library with its interface, whose kernels with sinks take them, and the scale, after K and V."""
    wrapper = planned(module_name, batch, o_data_type, **options)
    rest: tuple[object, ...] = ()
    more: dict[str, object] = {}
    if batch.sinks is not None and module_name == "flashpage":
        more["sinks"] = batch.sinks
    elif batch.sinks is not None:
        rest = batch.sinks, batch.case.head_dim**-0.5
    kv = (batch.cache,) if batch.case.page_size else (batch.k, batch.v)
    return lambda: wrapper.run(batch.q, *kv, *rest, **more)


def flashinfer_call(batch: Batch, backend: str) -> Call | None:
    """FlashInfer, which uses tensor cores in decode only if use_tensor_cores is set."""
    case = batch.case
    if backend == "fa2" and ends_the_process(case):
        return None
    options: dict[str, object] = {"use_tensor_cores": True} if case.q_len == 1 else {}
    if case.has_sinks:
        options["jit_args"] = flashinfer_sinks(case, backend)
    return wrapper_call("flashinfer", batch, backend=backend, **options)


def ends_the_process(case: Case) -> bool:
    """Whether fa2 of FlashInfer 0.7.2 ends with an illegal access of memory, after which no call of the process works:
    in decode by tensor cores of 96 and 112 columns, and in prefill over ragged rows of 96 and pages of 80. In decode of
    80 it returns NaN."""
    return case.head_dim in (96, 112) if case.q_len == 1 else case.head_dim == (80 if case.page_size else 96)


def flashinfer_sinks(case: Case, backend: str) -> list[object]:
    """The `jit_args` of FlashInfer's wrappers for a case with sinks. Its own wrapper for sinks takes no ragged K and V,
    and has one name for the kernels of all head dims."""
    variants = importlib.import_module("flashinfer.jit.attention.variants")
    is_windowed = case.window_left >= 0
    name = f"sinks_{backend}_{case.head_dim}_{str(case.kv_dtype)[6:]}_window_{int(is_windowed)}"
    types = case.q_dtype, case.kv_dtype, case.q_dtype, torch.int32
    tensors, numbers = (["sink"], ["float"]), (["sm_scale"], ["double"])
    source = "AttentionSink", variants.attention_sink_decl[backend]
    no_positions = 0
    return [name, *types, case.head_dim, case.value_dim, *tensors, *numbers, *source, no_positions, is_windowed]


def only_sm80() -> AbstractContextManager[object]:
    """While it is entered, plans get the kernel that cards before Hopper get."""
    return mock.patch.object(choose, "ATTENTION", [attention_sm80.KERNEL])


def sm80_call(batch: Batch) -> Call | None:
    """flashpage with the kernel that cards before Hopper get."""
    with only_sm80():
        return wrapper_call("flashpage", batch)


def is_rectangular(batch: Batch) -> bool:
    """Whether it is a ragged prefill of equal lengths without other options than the causal mask."""
    case = batch.case
    is_equal = len(set(batch.q_lens)) == 1 and batch.q_lens == batch.kv_lens
    return is_equal and not (case.page_size or case.soft_cap or case.has_sinks) and case.window_left < 0


def by_request(batch: Batch) -> tuple[Tensor, ...]:
    """q, k and v of equal lengths as [batch, tokens, heads, head_dim]."""
    return tuple(x.view(batch.case.batch, -1, *x.shape[1:]) for x in (batch.q, batch.k, batch.v))


def torch_call(backend: SDPBackend, batch: Batch) -> Call | None:
    """torch's own attention, for ragged prefills of equal lengths."""
    case = batch.case
    if not is_rectangular(batch) or case.q_dtype != torch.bfloat16 or case.kv_dtype != torch.bfloat16:
        return None
    q, k, v = (x.transpose(1, 2) for x in by_request(batch))

    def call() -> Tensor:
        with sdpa_kernel(backend):
            out = scaled_dot_product_attention(q, k, v, is_causal=case.causal, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)

    return call


def cudnn_fp8_call(batch: Batch) -> Call | None:
    """cuDNN's fp8 attention, for ragged prefills of equal lengths."""
    case = batch.case
    if not is_rectangular(batch) or {case.q_dtype, case.kv_dtype} != {torch.float8_e4m3fn}:
        return None
    call = fp8_attention(*by_request(batch), is_causal=case.causal)
    return lambda: call().flatten(0, 1)


def fa3_call(batch: Batch, is_scheduled: bool = False) -> Call | None:
    """FlashAttention-3; `is_scheduled`: a paged batch is scheduled once in advance, not in each call."""
    import flash_attn_interface as fa3

    case, device = batch.case, batch.device
    masks: dict[str, object] = {"causal": case.causal, "window_size": (case.window_left, -1)}
    scores: dict[str, object] = {"softcap": case.soft_cap} if case.soft_cap else {}
    if batch.sinks is not None:
        scores["s_aux"] = batch.sinks.bfloat16()
    q_starts, longest_q = batch.q_indptr.to(device), max(batch.q_lens)
    if not case.page_size:
        k_starts = batch.kv_indptr.to(device)
        lengths = (q_starts, k_starts, longest_q, max(batch.kv_lens))
        if is_scheduled:
            return None
        return lambda: fa3.flash_attn_varlen_func(batch.q, batch.k, batch.v, *lengths, **masks, **scores)
    if case.kv_dtype != case.q_dtype:
        return None
    kv_lens = torch.tensor(batch.kv_lens, dtype=torch.int32, device=device)
    options: dict[str, object] = {"page_table": batch.table.rectangular(), "cu_seqlens_q": q_starts}
    if is_scheduled:
        sizes = (case.batch, longest_q, max(batch.kv_lens), case.num_q_heads, case.num_kv_heads, case.head_dim)
        told = {"qkv_dtype": case.q_dtype, "cu_seqlens_q": q_starts, "page_size": case.page_size, **masks}
        told |= {"has_softcap": True} if case.soft_cap else {}
        options["scheduler_metadata"] = fa3.get_scheduler_metadata(*sizes, kv_lens, **told)
    options |= {"cache_seqlens": kv_lens, "max_seqlen_q": longest_q, **masks, **scores}
    k, v = batch.cache[:, 0], batch.cache[:, 1]
    return lambda: fa3.flash_attn_with_kvcache(batch.q, k, v, **options)


XQA_PAGES = (16, 32, 64, 128)  # tokens
XQA_SEMAPHORES = 8 << 20  # bytes at the workspace's start that must be zero


def xqa_call(batch: Batch) -> Call | None:
    """XQA, FlashInfer's decode of TensorRT-LLM's kernels, with q in bf16. Its window counts the tokens before the
    row's own, as ours."""
    case, device = batch.case, batch.device
    is_decode = case.q_len == 1 and case.page_size in XQA_PAGES and case.value_dim == case.head_dim
    types = case.q_dtype == torch.bfloat16 and case.kv_dtype in (torch.bfloat16, torch.float8_e4m3fn)
    group = case.num_q_heads // case.num_kv_heads
    columns = case.head_dim % 16 == 0 and case.head_dim <= (512 if group <= 16 else 256)
    if not (is_decode and types and columns) or case.soft_cap:
        return None
    xqa = importlib.import_module("flashinfer.decode").xqa_batch_decode_with_kv_cache
    kv_lens = torch.tensor(batch.kv_lens, dtype=torch.int32, device=device).view(torch.uint32)
    workspace = torch.zeros(XQA_SEMAPHORES + (504 << 20), dtype=torch.uint8, device=device)
    options: dict[str, object] = {
        "bmm1_scale": case.head_dim**-0.5,
        "bmm2_scale": 1.0,
        "out": torch.empty_like(batch.q),
    }
    if case.window_left >= 0:
        options["window_left"] = case.window_left
    if batch.sinks is not None:
        options["sinks"] = batch.sinks
    table, kv = batch.table.rectangular(), (batch.cache[:, 0], batch.cache[:, 1])
    return lambda: xqa(batch.q, kv, workspace, table, kv_lens, max(batch.kv_lens), **options)


PEERS: dict[str, tuple[str, Callable[[Batch], Call | None]]] = {  # label: module that it needs, how it is called
    "flashpage": ("flashpage", lambda batch: wrapper_call("flashpage", batch)),
    "flashpage sm80": ("flashpage", sm80_call),
    "flashpage e4m3 out": ("flashpage", lambda batch: wrapper_call("flashpage", batch, torch.float8_e4m3fn)),
    "flashinfer fa2": ("flashinfer", lambda batch: flashinfer_call(batch, "fa2")),
    "flashinfer fa3": (
        "flashinfer",
        lambda batch: flashinfer_call(batch, "fa3") if batch.case.q_len > 1 else None,
    ),
    "xqa": ("flashinfer", xqa_call),
    "fa3": ("flash_attn_interface", fa3_call),
    "fa3 scheduled": ("flash_attn_interface", lambda batch: fa3_call(batch, is_scheduled=True)),
    "torch cudnn": ("torch", lambda batch: torch_call(SDPBackend.CUDNN_ATTENTION, batch)),
    "cudnn fp8": ("cudnn", cudnn_fp8_call),
    "torch flash": ("torch", lambda batch: torch_call(SDPBackend.FLASH_ATTENTION, batch)),
}


# Peers that end a process in which they compute several cases: `gpu.py --apart` gives each case its own.
ALONE = ("xqa",)


def installed(peers: Mapping[str, tuple[str, Any]] = PEERS) -> list[str]:
    """Labels of the peers that can be imported here. flashpage's other kernels and ALONE run only if they are named."""
    return [
        label
        for label, (module, _) in peers.items()
        if importlib.util.find_spec(module) and not label.startswith("flashpage ") and label not in ALONE
    ]
