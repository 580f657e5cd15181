"""FlashInfer's functions for paged attention from block tables: each call plans on the device and runs, waits for
nothing and may be captured in a graph."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..base import checks
from ..base.errors import CapabilityError, RunError, named
from ..run.checks import scales_of
from .function_plans import Tables, plan_of
from .lse_mode import BASE_2
from .plan_arguments import DecodeArguments, PrefillArguments

_BACKENDS = ("auto", "xqa", "trtllm-gen")
_INTERVALS = "pass a flashpage.Variant with such a mask_mod to the plan of BatchPrefillWithPagedKVCacheWrapper"
_REASONS = {
    "mask": "rows of a request are causal among themselves without it: leave it None",
    "o_sf_scale": "outputs are 16 or 32 bits wide and need no scale: leave it None",
    "o_sf_vec_size": "outputs are 16 or 32 bits wide and need no scale: leave it None",
    "bmm1_scale_log2": "pass the scale of the scores as bmm1_scale",
    "enable_block_sparse_attention": "use BlockSparseAttentionWrapper",
    "causal_seqlens_kv_global": "use flashpage.parallel.ContextParallelAttention",
    "bf16q_fp8kv_transform_mode": "fp8 caches are read under 16-bit queries as they are: leave it None",
    "cp_world": "use flashpage.parallel.ContextParallelAttention",
    "cp_rank": "use flashpage.parallel.ContextParallelAttention",
    "enable_dcp": "use flashpage.parallel.ContextParallelAttention",
    "sparse_mla_top_k": "use BatchMLASparseAttentionWrapper, and leave it 0",
    "sparse_mla_top_k_lens": "use BatchMLASparseAttentionWrapper, and leave it None",
    "request_order": "the plan orders requests: leave it None",
    "request_order_plan": "the plan orders requests: leave it None",
    "sparse_top_k": "pass the lists as block_tables of pages of one token, with one list for K and V, and leave it 0",
    "window_right": "no kernel has a window to the right: pass -1 or 0",
    "variable_window_token_starts": _INTERVALS,
    "variable_window_token_ends": _INTERVALS,
    "skip_softmax_threshold_scale_factor": "it belongs to the trtllm-gen kernels: leave it None",
    "kv_cache_sf": "nvfp4 caches are read by the wrappers: pass it to their run, or leave it None",
    "use_fp16_softmax": "softmax is computed in fp32: leave it None",
    "uses_spcompress": "it belongs to the trtllm-gen kernels: leave it None",
}
_USUAL = (None, False)
_NAMES = dict.fromkeys(("head_dim", "head_dim_qk", "head_dim_vo"), "head_dim of query")
_NAMES |= {"q_data_type": "dtype of query", "kv_data_type": "dtype of kv_cache"}
_NAMES |= {"o_data_type": "out_dtype (or out's dtype)"}


class _Call(NamedTuple):
    """The arguments that both functions share."""

    query: Any
    kv_cache: Any
    workspace: Any
    block_tables: Any
    seq_lens: Any
    scales: tuple[Any, Any]  # of scores and of the output: bmm1_scale and bmm2_scale
    o_scale: Any  # of fp8 outputs, which it divides; None: 1
    out: Any
    out_dtype: Any
    sinks: Any
    kv_layout: str
    enable_pdl: bool | None
    lse: Any
    return_lse: bool
    lse_mode: str


@named(_NAMES)
def trtllm_batch_decode_with_kv_cache(
    query: torch.Tensor,
    kv_cache: Any,
    workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    bmm1_scale: Any = 1.0,
    bmm2_scale: Any = 1.0,
    window_left: int = -1,
    out: torch.Tensor | None = None,
    out_dtype: Any = None,
    o_sf_scale: float | None = None,
    o_sf_vec_size: int | None = None,
    sinks: Any = None,
    kv_layout: str = "HND",
    enable_pdl: bool | None = None,
    backend: str = "auto",
    q_len_per_req: int | None = 1,
    o_scale: float | None = 1.0,
    mask: torch.Tensor | None = None,
    max_q_len: int | None = None,
    cum_seq_lens_q: torch.Tensor | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    kv_cache_sf: Any = None,
    uses_shared_paged_kv_idx: bool = True,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    bmm1_scale_log2: torch.Tensor | None = None,
    multi_ctas_kv_counter_buffer: torch.Tensor | None = None,
    enable_block_sparse_attention: bool = False,
    cp_world: int = 1,
    cp_rank: int = 0,
    causal_seqlens_kv_global: torch.Tensor | None = None,
    bf16q_fp8kv_transform_mode: str | None = None,
    request_order: torch.Tensor | None = None,
    request_order_plan: Any = None,
    sparse_top_k: int = 0,
    length_aware_schedule: bool = False,
    *,
    lse_mode: str = BASE_2,
) -> Any:
    """Decode from block tables. Rows of a request are causal among themselves; each row's own token is in the cache.

    Args:
        query: [batch * q_len_per_req, num_qo_heads, head_dim], or [cum_seq_lens_q[-1], ...].
        kv_cache: (K, V) of [pages, num_kv_heads, page_size, head_dim] (NHD: tokens before heads), any strides; or one
            tensor [pages, 1 or 2, ...] (1: V is K); or [pages, num_kv_heads, page_size, 2 * head_dim], whose rows have
            K and then V.
        workspace_buffer: not written; graphs whose calls have different ones may be replayed at the same time.
        max_seq_len, backend, multi_ctas_kv_counter_buffer, length_aware_schedule: accepted and not used; every plan
            weighs requests by their lengths.
        block_tables: [batch, pages] int32.
        seq_lens: [batch], tokens of each request.
        bmm1_scale: multiplies the scores; bmm2_scale: the output. Numbers, or fp32 tensors of one entry.
        window_left: tokens visible left of the row's own; -1: all.
        out: [rows, num_qo_heads, head_dim], written in place; None: allocated.
        out_dtype: type of the output; None: of `out`, or of the query.
        o_scale: divides outputs of float8_e4m3fn: a number, or an fp32 tensor of one entry.
        sinks: [num_qo_heads] fp32, natural-log units.
        kv_layout: "HND" or "NHD".
        q_len_per_req: rows of each request; None: cum_seq_lens_q says.
        cum_seq_lens_q: [batch + 1] int32 on the device, where each request's rows begin, with max_q_len.
        lse, return_lse: [rows, num_qo_heads] fp32, base 2.
        lse_mode: "base2", or "basee": the LSE is a natural logarithm (one multiplication more).

    The other arguments belong to FlashInfer's kernels and are refused if they differ from their defaults.
    """
    refuse(
        o_sf_scale=o_sf_scale,
        o_sf_vec_size=o_sf_vec_size,
        mask=mask,
        skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
        kv_cache_sf=kv_cache_sf,
        bmm1_scale_log2=bmm1_scale_log2,
        enable_block_sparse_attention=enable_block_sparse_attention,
        causal_seqlens_kv_global=causal_seqlens_kv_global,
        bf16q_fp8kv_transform_mode=bf16q_fp8kv_transform_mode,
        request_order=request_order,
        request_order_plan=request_order_plan,
        cp_world=unless(cp_world, 1),
        cp_rank=unless(cp_rank, 0),
        sparse_top_k=unless(sparse_top_k, 0),
    )
    check_tables(uses_shared_paged_kv_idx, backend)
    call = _Call(
        *(query, kv_cache, workspace_buffer, block_tables, seq_lens, (bmm1_scale, bmm2_scale), unless(o_scale, 1)),
        *(out, out_dtype, sinks, kv_layout),
        *(enable_pdl, lse, return_lse, lse_mode),
    )
    if (cum_seq_lens_q is None) == (q_len_per_req is None):
        raise RunError(
            f"q_len_per_req={q_len_per_req} and cum_seq_lens_q is {'not ' if cum_seq_lens_q is not None else ''}None: "
            "pass one of them, as it says how many rows each request has."
        )
    return _run(call, window_left, cum_seq_lens_q, q_len_per_req)


@named(_NAMES)
def trtllm_batch_context_with_kv_cache(
    query: torch.Tensor,
    kv_cache: Any,
    workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: Any,
    bmm2_scale: Any,
    batch_size: int,
    cum_seq_lens_q: torch.Tensor,
    cum_seq_lens_kv: torch.Tensor,
    window_left: int = -1,
    out: torch.Tensor | None = None,
    out_dtype: Any = None,
    o_sf_scale: float | None = None,
    o_sf_vec_size: int | None = None,
    kv_layout: str = "HND",
    enable_pdl: bool | None = None,
    sinks: Any = None,
    kv_cache_sf: Any = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    uses_shared_paged_kv_idx: bool = True,
    causal: bool = True,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    multi_ctas_kv_counter_buffer: torch.Tensor | None = None,
    use_fp16_softmax: bool | None = None,
    uses_spcompress: bool | None = None,
    backend: str = "trtllm-gen",
    window_right: int = -1,
    variable_window_token_starts: torch.Tensor | None = None,
    variable_window_token_ends: torch.Tensor | None = None,
    *,
    lse_mode: str = BASE_2,
) -> Any:
    """Prefill and append from block tables, with the appended tokens in the cache.

    Args:
        query: [cum_seq_lens_q[-1], num_qo_heads, head_dim].
        batch_size: requests.
        cum_seq_lens_q: [batch + 1] int32 on the device, where each request's rows begin.
        causal: row r of a request sees tokens up to seq_len - rows + r.
        window_right: tokens visible right of the row's own: -1, all that `causal` allows, or 0, which is causal.
        max_q_len, max_kv_len, cum_seq_lens_kv: accepted and not used.

    The other arguments are those of trtllm_batch_decode_with_kv_cache.
    """
    refuse(
        o_sf_scale=o_sf_scale,
        o_sf_vec_size=o_sf_vec_size,
        kv_cache_sf=kv_cache_sf,
        skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
        use_fp16_softmax=use_fp16_softmax,
        uses_spcompress=uses_spcompress,
        window_right=unless(unless(window_right, -1), 0),
        variable_window_token_starts=variable_window_token_starts,
        variable_window_token_ends=variable_window_token_ends,
    )
    check_tables(uses_shared_paged_kv_idx, backend)
    call = _Call(
        *(query, kv_cache, workspace_buffer, block_tables, seq_lens, (bmm1_scale, bmm2_scale), None),
        *(out, out_dtype, sinks, kv_layout),
        *(enable_pdl, lse, return_lse, lse_mode),
    )
    checks.tensor(seq_lens, "seq_lens", RunError)
    if checks.whole("batch_size", batch_size, 0, error=RunError) != seq_lens.numel():
        raise RunError(f"batch_size={batch_size} but seq_lens has {seq_lens.numel()} entries: pass the same requests.")
    checks.tensor(cum_seq_lens_q, "cum_seq_lens_q", RunError)
    return _run(call, window_left, cum_seq_lens_q, None, True if window_right == 0 else causal)


def _grouped_size_compiled_for_decode_kernels(num_qo_heads: int, num_kv_heads: int) -> bool:
    """Whether FlashInfer's decode kernels without tensor cores have such a group; every group has kernels here."""
    return num_qo_heads // num_kv_heads in (1, 2, 4, 8)


def _run(call: _Call, window_left: int, q_indptr: torch.Tensor | None, q_len: int | None, causal: bool = True) -> Any:
    query = checks.tensor(call.query, "query", RunError)
    if query.dim() != 3:
        raise RunError(f"query has shape {tuple(query.shape)}: pass [rows, num_qo_heads, head_dim].")
    seq_lens, tables = as_int32(call.seq_lens, "seq_lens"), as_int32(call.block_tables, "block_tables")
    layout = checks.layout(call.kv_layout, RunError)
    k, v = _pair(call.kv_cache, query.shape[2])
    token, head = (1, 2) if layout == "NHD" else (2, 1)
    sm_scale, q_scale = scale_of(call.scales[0], "bmm1_scale")
    v_number, v_tensor = scale_of(call.scales[1], "bmm2_scale")
    scales = scales_of(q_scale, None, v_tensor if v_number == 1 else v_number, call.o_scale)
    heads = (query.shape[1], k.shape[head], query.shape[2], k.shape[token])
    types = {
        "q_data_type": query.dtype,
        "kv_data_type": k.dtype,
        "o_data_type": out_dtype_of(call.out, call.out_dtype, query),
    }
    given: dict[str, Any] = {"window_left": window_left, **types}
    arguments: DecodeArguments | PrefillArguments
    if q_indptr is None:
        q_len = checks.whole("q_len_per_req", q_len, 1, error=RunError)
        if query.shape[0] != seq_lens.numel() * q_len:
            raise RunError(
                f"query has {query.shape[0]} rows but seq_lens has {seq_lens.numel()} entries and "
                f"q_len_per_req={q_len}: "
                "pass as many rows for each request."
            )
        arguments = DecodeArguments(*heads, q_len_per_req=q_len, **given)
        lengths = Tables(seq_lens, tables)
    else:
        arguments = PrefillArguments("paged", *heads, causal=causal, **given)
        lengths = Tables(seq_lens, tables, as_int32(q_indptr, "cum_seq_lens_q"), query.shape[0])
    plan = plan_of(query.device, layout, arguments, workspace=call.workspace)
    values = plan.values._replace(sm_scale=sm_scale)  # differs between the layers of an fp8 cache, unlike the plan
    sinks = call.sinks[0] if call.sinks.__class__ is list and len(call.sinks) == 1 else call.sinks
    out = call.out
    if out is None and q_indptr is not None:  # rows of no request are not written
        out = query.new_zeros((*query.shape[:2], v.shape[3]), dtype=plan.options.out_dtype.torch)
    lse = call.lse
    if lse is None and call.return_lse is True and q_indptr is not None:
        lse = query.new_full(query.shape[:2], -torch.inf, dtype=torch.float32)
    run = plan.on_device(lengths).run_of(call.lse_mode)
    return run(query, (k, v), out, lse, call.return_lse, values, scales, sinks, call.enable_pdl)


def _pair(kv_cache: Any, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V, of four dimensions each."""
    if kv_cache.__class__ in (tuple, list) and len(kv_cache) == 2:
        pair = tuple(checks.tensor(part, f"kv_cache[{i}]", RunError) for i, part in enumerate(kv_cache))
    else:
        cache = checks.tensor(kv_cache, "kv_cache", RunError)
        if cache.dim() == 5 and cache.shape[1] in (1, 2):
            pair = (cache[:, 0], cache[:, -1])
        elif cache.dim() == 4 and cache.shape[3] == 2 * head_dim:
            pair = (cache[..., :head_dim], cache[..., head_dim:])
        else:
            pair = ()
    if not pair or any(part.dim() != 4 for part in pair):
        shapes = tuple(tuple(part.shape) for part in pair) or tuple(kv_cache.shape)
        raise RunError(
            f"kv_cache has shape {shapes}: pass (K, V) of four dimensions each, [pages, 1 or 2, ...], "
            "or rows of K and then V, [pages, num_kv_heads, page_size, 2 * head_dim]."
        )
    return pair[0], pair[1]


def scale_of(scale: Any, name: str) -> tuple[float, torch.Tensor | None]:
    """A scale as a number and a tensor, one of which is 1 or None."""
    if isinstance(scale, torch.Tensor):
        return 1.0, scale
    return checks.real(name, scale, error=RunError), None


def out_dtype_of(out: Any, out_dtype: Any, query: torch.Tensor) -> Any:
    if out_dtype is not None:
        return out_dtype
    return query.dtype if out is None else checks.tensor(out, "out", RunError).dtype


def as_int32(numbers: Any, name: str) -> torch.Tensor:
    """FlashInfer documents lengths as uint32; they have the bits of int32."""
    tensor = checks.tensor(numbers, name, RunError)
    return tensor.view(torch.int32) if tensor.dtype == torch.uint32 else tensor


def check_tables(is_shared: bool, backend: str, backends: tuple[str, ...] = _BACKENDS) -> None:
    if backend not in backends:
        raise CapabilityError(f"backend={checks.shown(backend)} is not known here: pass one of {', '.join(backends)}.")
    if is_shared is not True:
        raise CapabilityError(
            "uses_shared_paged_kv_idx=False is not supported: K and V of a token have one page number, pass True."
        )


def unless(value: Any, usual: int) -> Any:
    """None in place of the usual number, which `refuse` then takes."""
    return None if value.__class__ in (int, float) and value == usual else value


def refuse(**given: Any) -> None:
    for name, value in given.items():
        if not any(value is usual for usual in _USUAL):
            raise CapabilityError(f"{name}={checks.shown(value)} is not supported: {_REASONS[name]}.")
