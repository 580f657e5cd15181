"""flash-attn's two functions for inference, by their arguments, compared with the fp64 reference."""

from __future__ import annotations

import inspect
import math
from typing import Any

import numpy
import pytest
import torch
from reference import Options, attention
from signatures import shown

from flashpage import CapabilityError, FlashpageError, RunError
from flashpage.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

pytestmark = pytest.mark.usefixtures("quick_kernels")

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 32, 16
SIGNATURES = {
    flash_attn_varlen_func: (
        "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p=0.0 softmax_scale=None causal=False "
        "window_size=(-1,-1) softcap=0.0 alibi_slopes=None deterministic=False return_attn_probs=False block_table=None"
    ),
    flash_attn_with_kvcache: (
        "q k_cache v_cache k=None v=None rotary_cos=None rotary_sin=None cache_seqlens=None cache_batch_idx=None "
        "cache_leftpad=None block_table=None softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 "
        "rotary_interleaved=True alibi_slopes=None num_splits=0 return_softmax_lse=False"
    ),
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: function.__name__)
def test_parameters(function: Any) -> None:
    """Names, order and defaults of flash-attn 2.8.3."""
    parameters = [text.replace(" ", "") for text in shown(list(inspect.signature(function).parameters.values()))]
    assert parameters == SIGNATURES[function].split()


def data(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def dtype_of(device: str) -> torch.dtype:
    return torch.float32 if device == "cpu" else torch.bfloat16


def slopes_of(*shape: int) -> torch.Tensor:
    return data(*shape, seed=8).abs()


class Mask:
    """flash-attn's definitions of what a row sees, and of its ALiBi bias, as score and mask functions."""

    def __init__(self, options: dict[str, Any]) -> None:
        left, right = options.get("window_size", (-1, -1))
        self.left, self.right = left, 0 if options.get("causal") else right
        self.slopes = options.get("alibi_slopes")

    def score(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        if self.slopes is None:
            return score
        slope = self.slopes[h] if self.slopes.dim() == 1 else self.slopes[b, h]
        return score - slope * (q_idx - kv_idx).abs()

    def mask(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        seen = torch.ones_like(kv_idx + q_idx, dtype=torch.bool)
        if self.left >= 0:
            seen &= kv_idx >= q_idx - self.left
        if self.right >= 0:
            seen &= kv_idx <= q_idx + self.right
        return seen


def expected(
    requests: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]], options: dict[str, Any]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Outputs [rows, heads, dim] and natural LSEs [rows, heads] of each request."""
    mask = Mask(options)
    given = Options(
        options.get("softmax_scale") or DIM**-0.5,
        soft_cap=options.get("softcap", 0.0),
        score_mod=mask.score,
        mask_mod=mask.mask,
    )
    found = [attention(q.cpu(), k.cpu(), v.cpu(), given, request=i) for i, (q, k, v) in enumerate(requests)]
    return [(state.out, state.lse * math.log(2)) for state in found]


def check(found: tuple[torch.Tensor, torch.Tensor], wanted: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """`found`: outputs [rows, heads, dim] and LSEs [rows, heads] of all requests."""
    near = {"rtol": 1e-5, "atol": 1e-5} if found[0].is_cpu else {"rtol": 2e-2, "atol": 2e-2}
    for tensor, whole in zip(found, map(torch.cat, zip(*wanted, strict=True)), strict=True):
        torch.testing.assert_close(tensor.cpu().double(), whole, **near)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "scale": {"softmax_scale": 0.3, "causal": True},
    "window": {"window_size": (5, 0)},
    "window with causal": {"window_size": (5, 9), "causal": True},
    "left alone": {"window_size": (4, -1)},
    "right alone": {"window_size": (-1, 3)},
    "both sides": {"window_size": (4, 3)},
    "soft cap": {"softcap": 5.0, "causal": True},
    "alibi": {"alibi_slopes": slopes_of(HEADS), "causal": True},
    "alibi by request": {"alibi_slopes": slopes_of(3, HEADS)},
    "alibi and right": {"alibi_slopes": slopes_of(HEADS), "window_size": (-1, 2)},
}


def on(device: str, options: dict[str, Any]) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in options.items()}


def pages_of(tokens: list[torch.Tensor], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages with these tokens of each request, NaN elsewhere, and the table."""
    counts = [-(-len(t) // PAGE) for t in tokens]
    order = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(seed))
    cache = torch.full((len(order), PAGE, *tokens[0].shape[1:]), float("nan"), dtype=tokens[0].dtype)
    table = torch.zeros(len(tokens), max(counts) + 1, dtype=torch.int32)
    for i, (mine, count) in enumerate(zip(tokens, counts, strict=True)):
        table[i, :count] = order[sum(counts[:i]) :][:count]
        at = torch.arange(len(mine))
        cache[table[i, at // PAGE].long(), at % PAGE] = mine
    return cache, table


@pytest.mark.parametrize("is_paged", [False, True], ids=["ragged", "paged"])
@pytest.mark.parametrize("name", OPTIONS)
def test_varlen(name: str, is_paged: bool, device: str, kernels: None) -> None:
    rows, lengths = (3, 17, 1), (20, 17, 33)
    dtype, options = dtype_of(device), OPTIONS[name]
    q = [data(n, HEADS, DIM, seed=n).to(dtype) for n in rows]
    k, v = ([data(n, KV_HEADS, DIM, seed=seed + n).to(dtype) for n in lengths] for seed in (1, 2))
    cu_q, cu_k = (torch.tensor([0, *n]).cumsum(0).int().to(device) for n in (rows, lengths))
    if is_paged:
        (k_cache, table), (v_cache, _) = pages_of(k), pages_of(v)
        given: Any = {"k": k_cache, "v": v_cache, "block_table": table}
    else:
        given = {"k": torch.cat(k), "v": torch.cat(v)}
    lengths_of = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 17, "max_seqlen_k": 33}
    tensors = on(device, {"q": torch.cat(q), **given})
    out, lse, probs = flash_attn_varlen_func(**tensors, **lengths_of, **on(device, options), return_attn_probs=True)
    assert lse.shape == (HEADS, sum(rows)) and lse.is_contiguous() and probs is None
    check((out, lse.T), expected(list(zip(q, k, v, strict=True)), options))
    assert torch.equal(flash_attn_varlen_func(**tensors, **lengths_of, **on(device, options)), out)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("name", OPTIONS)
def test_cache(name: str, rows: int, device: str, kernels: None) -> None:
    """Pages, and a cache with one row of tokens for each request; with lengths as a tensor and as a number."""
    lengths, options, dtype = (20, 5, 33), OPTIONS[name], dtype_of(device)
    q = data(3, rows, HEADS, DIM).to(dtype)
    k, v = ([data(n, KV_HEADS, DIM, seed=seed + n).to(dtype) for n in lengths] for seed in (1, 2))
    (k_cache, table), (v_cache, _) = pages_of(k), pages_of(v)
    wanted = expected(list(zip(q, k, v, strict=True)), options)

    def run(**given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        given = on(device, {"q": q, **given} | options)
        out, lse = flash_attn_with_kvcache(**given, return_softmax_lse=True)
        assert lse.shape == (3, HEADS, rows) and lse.is_contiguous()
        return out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)

    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    check(run(k_cache=k_cache, v_cache=v_cache, cache_seqlens=seq_lens, block_table=table), wanted)
    wide = [torch.full((5, 40, KV_HEADS, DIM), float("nan"), dtype=dtype) for _ in range(2)]
    where = torch.tensor([3, 0, 4], dtype=torch.int32)
    for cache, tokens in zip(wide, (k, v), strict=True):
        for row, mine in zip(where, tokens, strict=True):
            cache[row, : len(mine)] = mine
    check(run(k_cache=wide[0], v_cache=wide[1], cache_seqlens=seq_lens, cache_batch_idx=where), wanted)
    short = [torch.stack([t[:5] for t in tokens]) for tokens in (k, v)]
    wanted = expected(list(zip(q, *short, strict=True)), options)
    check(run(k_cache=short[0], v_cache=short[1]), wanted)
    check(run(k_cache=wide[0], v_cache=wide[1], cache_seqlens=5, cache_batch_idx=where, num_splits=1), wanted)


def rotated(x: torch.Tensor, position: int, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """One token's heads, by complex numbers."""
    half = cos.shape[1]
    if interleaved:
        pairs = torch.view_as_complex(x[..., : 2 * half].double().unflatten(-1, (half, 2)).contiguous())
    else:
        pairs = torch.complex(x[..., :half].double(), x[..., half : 2 * half].double())
    pairs = pairs * torch.complex(cos[position].double(), sin[position].double())
    parts = torch.view_as_real(pairs)
    front = parts.flatten(-2) if interleaved else torch.cat([parts[..., 0], parts[..., 1]], -1)
    return torch.cat([front, x[..., 2 * half :].double()], -1).to(x.dtype)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("interleaved", [None, False, True], ids=["unrotated", "halves", "interleaved"])
@pytest.mark.parametrize("is_paged", [False, True], ids=["wide", "paged"])
def test_new_tokens(is_paged: bool, interleaved: bool | None, causal: bool, device: str, kernels: None) -> None:
    """New tokens are rotated at their places, written to the cache, and seen."""
    lengths, new, dtype = (20, 5, 15), 2, dtype_of(device)
    q, k, v = (data(3, new, heads, DIM, seed=heads).to(dtype) for heads in (HEADS, KV_HEADS, KV_HEADS))
    v = v.flip(0)
    past = [[data(n, KV_HEADS, DIM, seed=seed + n).to(dtype) for n in lengths] for seed in (1, 2)]
    angles = data(64, 8, seed=4)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    turn = lambda x, p: x if interleaved is None else rotated(x, p, cos, sin, interleaved)
    wanted_k = [torch.cat([p, *(turn(t, n + i)[None] for i, t in enumerate(x))])
                for p, x, n in zip(past[0], k, lengths, strict=True)]  # fmt: skip
    wanted_v = [torch.cat([p, x]) for p, x in zip(past[1], v, strict=True)]
    rows = [torch.stack([turn(t, n + (i if causal else 0)) for i, t in enumerate(x)])
            for x, n in zip(q, lengths, strict=True)]  # fmt: skip
    if is_paged:
        (caches, table) = zip(*(pages_of([torch.cat([p, p[:new]]) for p in past[i]]) for i in range(2)), strict=True)
        given: dict[str, Any] = {"block_table": table[0]}
    else:
        caches = tuple(torch.zeros(3, 40, KV_HEADS, DIM, dtype=dtype) for _ in range(2))
        for cache, tokens in zip(caches, past, strict=True):
            for row, mine in zip(cache, tokens, strict=True):
                row[: len(mine)] = mine
        given = {}
    given |= {"q": q, "k_cache": caches[0], "v_cache": caches[1], "k": k, "v": v}
    given["cache_seqlens"] = torch.tensor(lengths, dtype=torch.int32)
    if interleaved is not None:
        given |= {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": interleaved}
    given = on(device, given)
    out, lse = flash_attn_with_kvcache(**given, causal=causal, return_softmax_lse=True)
    wanted = expected(list(zip(rows, wanted_k, wanted_v, strict=True)), {"causal": causal})
    check((out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)), wanted)
    assert torch.equal(given["cache_seqlens"].cpu(), torch.tensor(lengths, dtype=torch.int32)), "the caller advances it"


def varlen_arguments(**changed: Any) -> dict[str, Any]:
    cu = torch.tensor([0, 4], dtype=torch.int32)
    q, k = data(4, HEADS, DIM), data(4, KV_HEADS, DIM)
    return {
        "q": q,
        "k": k,
        "v": k,
        "cu_seqlens_q": cu,
        "cu_seqlens_k": cu,
        "max_seqlen_q": 4,
        "max_seqlen_k": 4,
    } | changed


def cache_arguments(**changed: Any) -> dict[str, Any]:
    return {
        "q": data(1, 1, HEADS, DIM),
        "k_cache": data(1, 8, KV_HEADS, DIM),
        "v_cache": data(1, 8, KV_HEADS, DIM),
    } | changed


NEW = {"k": data(1, 1, KV_HEADS, DIM), "v": data(1, 1, KV_HEADS, DIM), "cache_seqlens": 3}
TABLES = ("rotary_cos", "rotary_sin")
PAGED = {"k": data(1, 16, KV_HEADS, DIM), "v": data(1, 16, KV_HEADS, DIM), "block_table": torch.zeros(1, 1).int()}
WRONG: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (flash_attn_varlen_func, {"dropout_p": 0.1}, CapabilityError, "dropout_p=0.1 is not supported"),
    (flash_attn_varlen_func, {"q": data(4, HEADS, DIM).requires_grad_()}, RunError, "q requires grad"),
    (flash_attn_varlen_func, {"v": data(4, KV_HEADS, DIM).requires_grad_()}, RunError, "v requires grad"),
    (flash_attn_varlen_func, {"window_size": 3}, RunError, "window_size=3"),
    (flash_attn_varlen_func, {"window_size": (1.5, 0)}, RunError, "window_size=1.5"),
    (flash_attn_varlen_func, {"alibi_slopes": torch.ones(1, 1, 4)}, RunError, "alibi_slopes has shape"),
    (flash_attn_varlen_func, {"alibi_slopes": torch.ones(KV_HEADS)}, RunError, r"alibi_slopes .* pass float32, \[4\]"),
    (flash_attn_with_kvcache, {"alibi_slopes": torch.ones(2, HEADS)}, RunError, r"alibi_slopes .* or \[1, 4\]"),
    (flash_attn_varlen_func, {"k": data(2, 4, KV_HEADS, DIM)}, RunError, "k has shape"),
    (flash_attn_varlen_func, {"softcap": "a"}, RunError, "softcap="),
    (flash_attn_with_kvcache, {"cache_leftpad": torch.zeros(1).int()}, CapabilityError, "cache_leftpad is not"),
    (flash_attn_with_kvcache, {"k": data(1, 1, KV_HEADS, DIM)}, RunError, "k and v belong together"),
    (flash_attn_with_kvcache, {"rotary_cos": torch.ones(8, 4)}, RunError, "rotary_cos and rotary_sin belong"),
    (flash_attn_with_kvcache, {"q": data(2, 1, HEADS, DIM)}, RunError, "q has 2 requests but k_cache 1"),
    (flash_attn_with_kvcache, {"q": data(1, HEADS, DIM)}, RunError, "q has shape"),
    (flash_attn_with_kvcache, {"k_cache": data(1, 8, KV_HEADS, DIM).requires_grad_()}, RunError, "k_cache requires"),
    (flash_attn_with_kvcache, {"cache_seqlens": 2**31}, RunError, "cache_seqlens=2147483648"),
    (flash_attn_varlen_func, PAGED | {"cu_seqlens_k": torch.tensor([0, 2**32 + 4])}, FlashpageError, "4294967300"),
    (flash_attn_varlen_func, PAGED | {"cu_seqlens_k": torch.tensor([0, 4.5])}, RunError, "cu_seqlens_k has .*float32"),
    (flash_attn_with_kvcache, {"cache_batch_idx": torch.tensor([2**32])}, FlashpageError, "has 1 pages"),
    (flash_attn_with_kvcache, {"cache_batch_idx": torch.tensor([0.5])}, RunError, "cache_batch_idx has .*float32"),
    (flash_attn_with_kvcache, {"cache_seqlens": torch.ones(2).int()}, RunError, "cache_seqlens has shape"),
    (flash_attn_with_kvcache, {"block_table": torch.zeros(1).int()}, FlashpageError, "block_tables has shape"),
    (flash_attn_with_kvcache, {"num_splits": "1"}, RunError, "num_splits="),
    (flash_attn_with_kvcache, {"cache_seqlens": True}, RunError, "cache_seqlens=True is of type bool"),
    (flash_attn_with_kvcache, NEW | {"k": data(1, 2, KV_HEADS, DIM)}, RunError, r"v has shape \(1, 1, 2, 32\): pass"),
    (flash_attn_with_kvcache, NEW | {"v": data(1, 1, HEADS, DIM)}, RunError, "v has shape .* takes"),
    (flash_attn_with_kvcache, NEW | {"k": data(1, 1, KV_HEADS, DIM).half()}, RunError, "k has .* dtype torch.float16"),
    (flash_attn_with_kvcache, NEW | {"cache_seqlens": 8}, RunError, "cache_seqlens: 8 of request 0 lies outside"),
    (flash_attn_with_kvcache, NEW | dict.fromkeys(TABLES, torch.ones(7, 4)), RunError, "rotary_cos .* 8 tokens"),
    (flash_attn_with_kvcache, NEW | dict.fromkeys(TABLES, torch.ones(8, 17)), RunError, "rotary_cos .* at most 16"),
]  # fmt: skip


@pytest.mark.parametrize(("function", "changed", "error", "says"), WRONG, ids=[row[3] for row in WRONG])
def test_wrong_arguments(function: Any, changed: dict[str, Any], error: type[Exception], says: str) -> None:
    good = varlen_arguments() if function is flash_attn_varlen_func else cache_arguments()
    function(**good)
    with pytest.raises(error, match=says):
        function(**good | changed)


def test_a_refused_call_writes_no_new_tokens() -> None:
    given = cache_arguments(**NEW)
    before = given["k_cache"].clone()
    for wrong in ({"softcap": math.nan}, {"window_size": 7}, {"softmax_scale": math.inf}, {"q": data(1, 1, 3, DIM)}):
        with pytest.raises(FlashpageError):
            flash_attn_with_kvcache(**given | wrong)
    assert torch.equal(given["k_cache"], before)


def test_rows_of_no_request() -> None:
    begins, ends = torch.tensor([1, 3]).int(), torch.tensor([0, 8]).int()
    given = varlen_arguments(**PAGED, cu_seqlens_q=begins, cu_seqlens_k=ends, return_attn_probs=True)
    given["q"][[0, 3]] = math.nan
    out, lse, _ = flash_attn_varlen_func(**given)
    assert out[1:3].isfinite().all() and lse[:, 1:3].isfinite().all()
    assert not out[[0, 3]].any() and lse[:, [0, 3]].isneginf().all()


@pytest.mark.parametrize("right", [2**30, 2**31 - 2, 2**31 - 1])
def test_a_window_that_no_request_fills_is_none(right: int) -> None:
    """Kernels add it to a row's position in 32 bits."""
    given = varlen_arguments()
    assert torch.equal(flash_attn_varlen_func(**given, window_size=(-1, right)), flash_attn_varlen_func(**given))


def test_lengths_that_an_array_changes_are_planned_again() -> None:
    array = numpy.array([0, 4], dtype=numpy.int32)
    given = varlen_arguments(cu_seqlens_k=torch.from_numpy(array))
    flash_attn_varlen_func(**given)
    array[1] = 2
    found = flash_attn_varlen_func(**given)
    given["cu_seqlens_k"] = torch.tensor([0, 2], dtype=torch.int32)
    assert torch.equal(found, flash_attn_varlen_func(**given))


def test_lengths_are_copied_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal tensors mean equal lengths until torch sees one written; those of inference mode are planned each time."""
    from flashpage.wrappers.base import Attention

    plans = []
    plan = Attention.plan
    monkeypatch.setattr(Attention, "plan", lambda *given: (plans.append(1), plan(*given))[1])
    given = varlen_arguments(causal=True, softcap=3.25)
    first = flash_attn_varlen_func(**given)
    assert torch.equal(flash_attn_varlen_func(**given | {"softmax_scale": DIM**-0.5}), first) and len(plans) == 1
    given["cu_seqlens_q"][0], given["cu_seqlens_k"][0] = 2, 2
    assert torch.equal(flash_attn_varlen_func(**given)[:2], torch.zeros(2, HEADS, DIM)) and len(plans) == 2
    with torch.inference_mode():
        given["cu_seqlens_q"] = torch.tensor([0, 4], dtype=torch.int32)
    for count in (3, 4):
        flash_attn_varlen_func(**given)
        assert len(plans) == count


# ---------------------------------------------------------------- on a card


@pytest.mark.cuda
def test_captured_decode_reads_lengths_at_replay() -> None:
    """As nano-vllm captures it: lengths and tables in tensors that the next step overwrites."""
    lengths = (20, 5, 33)
    q = data(3, 1, HEADS, DIM).bfloat16()
    k, v = ([data(n, KV_HEADS, DIM, seed=seed + n).bfloat16() for n in lengths] for seed in (1, 2))
    (k_cache, table), (v_cache, _) = pages_of(k), pages_of(v)
    given = on("cuda", {"q": q, "k_cache": k_cache, "v_cache": v_cache, "block_table": table})
    given["cache_seqlens"] = torch.tensor([1, 1, 1], dtype=torch.int32, device="cuda")
    flash_attn_with_kvcache(**given, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = flash_attn_with_kvcache(**given, causal=True, return_softmax_lse=True)
    given["cache_seqlens"].copy_(torch.tensor(lengths, dtype=torch.int32))
    flash_attn_with_kvcache(**given, causal=True)
    graph.replay()
    check((out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)), expected(list(zip(q, k, v, strict=True)), {}))
