"""vLLM's operators: paged_attention_v1 and _v2, and those that fill their caches."""

from __future__ import annotations

import ctypes
import dataclasses
import math
import types
from typing import Any

import pytest
import torch
from caches import poison
from vllm_blocks import FP8, K_SCALE, V_SCALE, BlockCase, Blocks

from flashpage import RunError, native, vllm_ops
from flashpage.engines.vllm import write as card_write

pytestmark = pytest.mark.usefixtures("quick_kernels")

LONG = (1500, 0, 513, 512, 1, 1024)
SPARSE = (1, 2, 8, 64, 2)
CASES = [
    *(BlockCase(f"head-size-{n}", head_size=n) for n in (32, 64, 80, 96, 112, 120, 128, 192, 256)),
    *(BlockCase(f"block-size-{n}", block_size=n, dtype="float16", seq_lens=(3, 8, 9, 0, 100)) for n in (8, 16, 32)),
    BlockCase("fp32", dtype="float32"),
    BlockCase("long", LONG),
    BlockCase("long-fp16-mqa", LONG, num_heads=8, num_kv_heads=1, dtype="float16", block_size=32),
    BlockCase("longer-than-shared-memory", (60_000, 5), num_heads=2, num_kv_heads=1, head_size=32),
    BlockCase("alibi", LONG, alibi=True),
    BlockCase("e4m3", LONG, kv_cache_dtype="fp8"),
    BlockCase("e5m2-alibi", kv_cache_dtype="fp8_e5m2", alibi=True, dtype="float16", head_size=128),
    BlockCase("sparse-query-heads", LONG, sparse=SPARSE),
    BlockCase("sparse-kv-heads", LONG, sparse=(0, 1, 4, 32, -1), head_size=112),
    BlockCase("sparse-alibi-e4m3", LONG, sparse=(0, 16, 8, 64, 2), alibi=True, kv_cache_dtype="fp8_e4m3"),
    BlockCase("not-sparse", sparse=(3, 2, 1, 64, 1)),
    BlockCase("strided-query", strided=True),
    BlockCase("e4m3-blocks-of-8", LONG, kv_cache_dtype="fp8", block_size=8, head_size=80),
    BlockCase("e5m2-blocks-of-32", LONG, kv_cache_dtype="fp8_e5m2", block_size=32, head_size=256),
    BlockCase("e4m3-112", LONG, kv_cache_dtype="fp8", head_size=112, dtype="float16"),
    BlockCase("alibi-120", LONG, alibi=True, head_size=120, block_size=32),
    BlockCase("group-of-5", LONG, num_heads=15, num_kv_heads=3, head_size=128),
    BlockCase("group-of-40", LONG, num_heads=80, num_kv_heads=2, head_size=128, alibi=True),
    BlockCase("group-of-20-wide", (600, 3), num_heads=20, num_kv_heads=1, head_size=256),
    BlockCase("many-sequences", tuple(n * 37 % 90 * (n % 5 > 0) for n in range(300)), head_size=32),
    BlockCase("sparse-far-apart", (9000, 100), sparse=(0, 1, 50, 8, 1), block_size=8),
    BlockCase("no-tokens", (0, 0)),
    BlockCase("no-sequences", ()),
]


def runs_on(case: BlockCase, device: str) -> None:
    if case.dtype == "float32" and device != "cpu":
        pytest.skip("fp32 queries are the CPU's")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_v1(case: BlockCase, device: str) -> None:
    runs_on(case, device)
    blocks = Blocks(case)
    out = blocks.out(device)
    vllm_ops.paged_attention_v1(out, *blocks.arguments(device))
    blocks.check(out)
    if case.sparse:
        again = blocks.out(device)
        torch.ops.flashpage.paged_attention_v1(again, *blocks.arguments(device))
        assert torch.equal(again, out)


def partials(blocks: Blocks, device: str, spare: int = 1) -> list[torch.Tensor]:
    """exp_sums, max_logits and tmp_out with room for `spare` partitions more than needed."""
    seqs, heads, size = blocks.query.shape
    count = -(-max(blocks.case.seq_lens, default=0) // 512) + spare
    shapes = ((seqs, heads, count), (seqs, heads, count), (seqs, heads, count, size))
    types = (torch.float32, torch.float32, blocks.dtype)
    return [torch.full(s, math.nan, dtype=t, device=device) for s, t in zip(shapes, types, strict=True)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_v2(case: BlockCase, device: str) -> None:
    """The partitions' states merge to the output; nothing is written where a sequence has no partition."""
    runs_on(case, device)
    blocks = Blocks(case)
    out, (exp_sums, max_logits, tmp_out) = blocks.out(device), partials(blocks, device)
    vllm_ops.paged_attention_v2(out, exp_sums, max_logits, tmp_out, *blocks.arguments(device))
    blocks.check(out, slack=1.7)
    for i, length in enumerate(case.seq_lens):
        count = -(-length // 512)
        for written in (exp_sums, max_logits, tmp_out):
            assert bool(written[i, :, count:].isnan().all())
        if not length:
            continue
        weights = (max_logits[i, :, :count] + exp_sums[i, :, :count].log()).softmax(-1).nan_to_num()
        merged = (weights.unsqueeze(-1) * tmp_out[i, :, :count].float()).sum(1)
        torch.testing.assert_close(merged, out[i].float(), rtol=2.0**-7, atol=2.0**-7)


def test_v2_without_partitions() -> None:
    """max_seq_len 0 gives v2 no partition."""
    blocks = Blocks(BlockCase("none", (0, 0)))
    out = blocks.out("cpu")
    vllm_ops.paged_attention_v2(out, *partials(blocks, "cpu", spare=0), *blocks.arguments("cpu"))
    assert bool((out == 0).all())


def test_calls_follow_each_other() -> None:
    """Options and lengths change from call to call."""
    for name in ("sparse-alibi-e4m3", "long", "alibi", "sparse-query-heads", "no-tokens", "alibi", "fp32"):
        blocks = Blocks(next(case for case in CASES if case.name == name))
        out = blocks.out("cpu")
        vllm_ops.paged_attention_v1(out, *blocks.arguments("cpu"))
        blocks.check(out)


# ---------------------------------------------------------------- caches


def new_tokens(dtype: torch.dtype, heads: int, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values as slices of wider rows; slots in any order, some of them negative."""
    generator = torch.Generator().manual_seed(size)
    qkv = torch.randn(9, 2 * heads + 3, size, generator=generator).to(dtype)
    slots = torch.tensor([17, -1, 3, 60, 0, -1, 33, 16, 1])
    return qkv[:, :heads], qkv[:, heads : 2 * heads], slots


def written(rows: torch.Tensor, kv_cache_dtype: str, scale: float) -> torch.Tensor:
    """The tokens as the cache holds them."""
    if kv_cache_dtype == "auto":
        return rows
    dtype = FP8[kv_cache_dtype]
    most = torch.finfo(dtype).max
    return (rows.float() / scale).clamp(-most, most).to(dtype)


TYPES = [(torch.bfloat16, "auto"), (torch.float16, "fp8"), (torch.bfloat16, "fp8_e5m2"), (torch.float32, "auto")]


@pytest.mark.parametrize(("dtype", "kv_cache_dtype"), TYPES, ids=str)
@pytest.mark.parametrize("kind", ["blocks", "rows"])
def test_new_tokens_are_written(kind: str, dtype: torch.dtype, kv_cache_dtype: str, device: str) -> None:
    heads, size, block_size = 2, 48, 16
    key, value, slots = new_tokens(dtype, heads, size)
    key[0] *= 1e4  # past fp8's largest number
    kv_type = FP8.get(kv_cache_dtype, dtype)
    x = 16 // kv_type.itemsize
    shapes = {
        "blocks": ((5, heads, size // x, block_size, x), (5, heads, size, block_size)),
        "rows": ((5, block_size, heads, size),) * 2,
    }[kind]
    expected = [poison(torch.empty(shape, dtype=kv_type)) for shape in shapes]
    caches = [t.clone().to(device) for t in expected]
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, block_size)
            k, v = written(key[token], kv_cache_dtype, K_SCALE), written(value[token], kv_cache_dtype, V_SCALE)
            if kind == "blocks":
                expected[0][block, :, :, offset] = k.view(heads, size // x, x)
                expected[1][block, :, :, offset] = v
            else:
                expected[0][block, offset], expected[1][block, offset] = k, v
    given = [t.view(torch.uint8) if t.element_size() == 1 else t for t in caches]
    write = vllm_ops.reshape_and_cache if kind == "blocks" else vllm_ops.reshape_and_cache_flash
    scales = (torch.tensor(K_SCALE, device=device), torch.tensor(V_SCALE, device=device))
    padding = 2  # rows after those that have a slot
    rows = [torch.cat([t, torch.full_like(t[:padding], math.nan)]).to(device) for t in (key, value)]
    write(*rows, *given, slots.to(device), kv_cache_dtype, *scales)
    for found, exact in zip(caches, expected, strict=True):
        assert torch.equal(found.cpu().view(torch.uint8), exact.view(torch.uint8))
    for nothing in (torch.full((9,), -1), slots[:0]):
        write(*rows, *given, nothing.to(device), kv_cache_dtype, *scales)
    for found, exact in zip(caches, expected, strict=True):
        assert torch.equal(found.cpu().view(torch.uint8), exact.view(torch.uint8))


def test_writes_of_a_card_share_their_structs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card's writes, with Python in place of the kernel: structs are made once for each form of the tensors, and each
    call points them to its own. K and V are halves of a row, as in vLLM's caches."""
    heads, page, dim = 2, 7, 16
    made: list[int] = []

    def launch(handle: int, address: int, grid: int, stream: int, pdl: int) -> int:
        made.append(address)
        its = native.BlockWriteParams.from_address(address)
        whole = ctypes.c_int64 if its.slots_are_int64 else ctypes.c_int32
        for token, slot in enumerate((whole * its.num_tokens).from_address(its.slots)):
            block, offset = divmod(slot, page)
            for head in range(its.num_kv_heads if slot >= 0 else 0):
                for half, at, row in (("k", "key", its.key_row_stride), ("v", "value", its.value_row_stride)):
                    strides = (getattr(its, f"{half}_{name}_stride") for name in ("block", "slot", "head"))
                    to = sum(i * stride for i, stride in zip((block, offset, head), strides, strict=True))
                    source = token * row + head * getattr(its, f"{at}_head_stride")
                    ctypes.memmove(getattr(its, half) + 2 * to, getattr(its, at) + 2 * source, 2 * dim)
        return 0

    class Library:
        fp_launch = staticmethod(launch)

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

    real = native.load()
    monkeypatch.setattr(native, "load", Library)
    monkeypatch.setattr(card_write.jit, "get_kernel", lambda spec, device: types.SimpleNamespace(handle=1))
    monkeypatch.setattr(card_write, "current_stream", lambda index: 0)
    slots = torch.randperm(5 * page)[:9]
    slots[3] = -1
    one = torch.ones(1)
    for turn in range(4):
        rows = [torch.randn(11, heads, dim).bfloat16() for _ in range(2)]
        caches = [torch.zeros(5, heads, page, 2 * dim).bfloat16().transpose(1, 2) for _ in range(2)]
        if turn == 3:  # another order of memory
            caches = [cache.contiguous() for cache in caches]
        given = slots.int() if turn == 1 else slots
        card_write.write("rows", *rows, *caches[0].split(dim, -1), given, "auto", one, one)
        vllm_ops.reshape_and_cache_flash(*rows, *caches[1].split(dim, -1), given, "auto", one, one)
        assert bool(caches[0].any()) and torch.equal(*caches)
    assert made[0] == made[1] == made[2] != made[3]


def test_what_is_written_is_read(device: str) -> None:
    """A cache filled by reshape_and_cache: one tensor, cut by split_kv_cache."""
    blocks = Blocks(BlockCase("round-trip", (70, 5), head_size=128))
    case = blocks.case
    memory = poison(torch.empty(2, blocks.num_blocks, 16 * 2 * 128, dtype=torch.bfloat16)).to(device)
    key_cache, value_cache = vllm_ops.split_kv_cache(memory, 2, 128)
    assert key_cache.shape == blocks.key_cache.shape and value_cache.shape == blocks.value_cache.shape
    slots = torch.cat([blocks.tables[i, torch.arange(n) // 16] * 16 + torch.arange(n) % 16
                       for i, n in enumerate(case.seq_lens)])  # fmt: skip
    one = torch.ones(1, device=device)
    rows = [torch.cat(t).to(device) for t in (blocks.k, blocks.v)]
    vllm_ops.reshape_and_cache(*rows, key_cache, value_cache, slots.to(device), "auto", one, one)
    out, arguments = blocks.out(device), blocks.arguments(device)
    arguments[1:3] = key_cache, value_cache
    vllm_ops.paged_attention_v1(out, *arguments)
    blocks.check(out)


# ---------------------------------------------------------------- operators


def full_arguments(blocks: Blocks) -> list[Any]:
    """All arguments of the operators, which have no defaults; the caches hold no NaN, which opcheck finds unequal."""
    arguments = blocks.arguments("cpu")
    arguments[1:3] = [t.nan_to_num() for t in arguments[1:3]]
    return arguments if blocks.case.sparse else [*arguments, 0, 0, 0, 64, 0]


@pytest.mark.parametrize("name", ["alibi", "sparse-query-heads"])
def test_opcheck(name: str) -> None:
    blocks = Blocks(dataclasses.replace(next(c for c in CASES if c.name == name), seq_lens=(70, 0, 600)))
    out = torch.zeros_like(blocks.query)
    torch.library.opcheck(torch.ops.flashpage.paged_attention_v1.default, (out, *full_arguments(blocks)))
    rest = [t.zero_() for t in partials(blocks, "cpu")]
    torch.library.opcheck(torch.ops.flashpage.paged_attention_v2.default, (out, *rest, *full_arguments(blocks)))


def test_opcheck_of_writes() -> None:
    key, value, slots = new_tokens(torch.bfloat16, 2, 64)
    one = torch.ones(1)
    blocks = (torch.zeros(5, 2, 8, 16, 8, dtype=torch.bfloat16), torch.zeros(5, 2, 64, 16, dtype=torch.bfloat16))
    arguments = (key, value, *blocks, slots, "auto", one, one)
    torch.library.opcheck(torch.ops.flashpage.reshape_and_cache.default, arguments)
    rows = tuple(torch.zeros(5, 16, 2, 64, dtype=torch.bfloat16) for _ in range(2))
    arguments = (key, value, *rows, slots, "auto", one, one)
    torch.library.opcheck(torch.ops.flashpage.reshape_and_cache_flash.default, arguments)


def test_torch_compile() -> None:
    blocks = Blocks(CASES[1])

    def step(query: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(query)
        vllm_ops.paged_attention_v1(out, query * 1, *arguments[1:])
        return out + 0

    arguments = blocks.arguments("cpu")
    torch._dynamo.reset()
    found = torch.compile(step, fullgraph=True, backend="aot_eager")(blocks.query)
    assert torch.equal(found, step(blocks.query))


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("position", "change", "says"),
    [
        (0, lambda q: q[..., :32], r"query has shape \(5, 4, 32\). Pass \[num_seqs, num_heads, 64\]"),
        (1, lambda k: k[0], r"key_cache has shape .* pass 5 dimensions"),
        (1, lambda k: k[..., :4], "Its last dimension must be 16 bytes: x=8"),
        (2, lambda v: v[:, :, :32], "value_cache has shape"),
        (3, lambda _: 4, "num_kv_heads=4 but the caches have 2"),
        (5, lambda t: t[1:], "block_tables has shape"),
        (5, lambda t: t + 1000, "block_tables names blocks"),
        (6, lambda n: n + 1, r"seq_lens reaches 71 \(least 1\). Pass lengths from 0 to max_seq_len=70"),
        (6, lambda n: n - 2, r"least -2\)"),
        (7, lambda _: 8, "block_size=8 but the caches have 16"),
        (9, lambda _: torch.ones(3), r"alibi_slopes has shape \(3,\)"),
        (10, lambda _: "int4", "kv_cache_dtype='int4' is unknown"),
        (10, lambda _: "fp8", "kv_cache_dtype='fp8' but key_cache is torch.bfloat16"),
    ],
)
def test_errors(position: int, change: Any, says: str) -> None:
    blocks = Blocks(CASES[1])
    arguments = blocks.arguments("cpu")
    arguments[position] = change(arguments[position])
    with pytest.raises(RunError, match=says):
        vllm_ops.paged_attention_v1(blocks.out("cpu"), *arguments)


def test_errors_of_outputs() -> None:
    blocks = Blocks(CASES[1])
    with pytest.raises(RunError, match=r"out has shape \(4, 4, 64\)"):
        vllm_ops.paged_attention_v1(blocks.out("cpu")[1:], *blocks.arguments("cpu"))
    exp_sums, max_logits, tmp_out = partials(blocks, "cpu", spare=0)
    with pytest.raises(
        RunError, match=r"tmp_out has shape \(5, 4, 0, 64\) and dtype torch.bfloat16: pass \[5, 4, 1 or more, 64\]"
    ):
        vllm_ops.paged_attention_v2(
            blocks.out("cpu"), exp_sums, max_logits, tmp_out[:, :, :0], *blocks.arguments("cpu")
        )
    for wrong in (
        (exp_sums.double(), max_logits, tmp_out),
        (exp_sums, max_logits.int(), tmp_out),
        (exp_sums, max_logits, tmp_out.float()),
        (exp_sums, max_logits, tmp_out[..., :32]),
    ):
        with pytest.raises(RunError, match=r"(exp_sums|max_logits|tmp_out) has shape .* and dtype .*: pass \[5, 4, 1"):
            vllm_ops.paged_attention_v2(blocks.out("cpu"), *wrong, *blocks.arguments("cpu"))


@pytest.mark.parametrize(
    ("sparse", "says"),
    [
        ((0, 1, 2, 0, 0), "blocksparse_block_size=0 is out of range"),
        ((0, 1, 2, -4, 0), "blocksparse_block_size=-4 is out of range"),
        ((-1, 1, 2, 64, 0), "tp_rank=-1 is out of range"),
        ((0, 1, 2**33, 64, 0), "blocksparse_vert_stride=8589934592 is out of range"),
        ((2**20, 1, 2, 64, 2**12), "shifts by more than 31 bits hold"),
        ((0, 1, 2, 64, "x"), "blocksparse_head_sliding_step='x'"),
    ],
)
def test_errors_of_sparse_blocks(sparse: tuple[Any, ...], says: str) -> None:
    """A division by zero ended the process, and too large a shift wrapped."""
    blocks = Blocks(CASES[1])
    with pytest.raises(RunError, match=says):
        vllm_ops.paged_attention_v1(blocks.out("cpu"), *blocks.arguments("cpu")[:13], *sparse)


def test_scales_of_fp8_caches_are_one_value(device: str) -> None:
    key, value, slots = (tensor.to(device) for tensor in new_tokens(torch.bfloat16, 2, 64))
    rows = (torch.zeros(5, 16, 2, 64, dtype=torch.uint8, device=device),) * 2
    one = torch.ones(1, device=device)
    for scales in ((torch.ones(2, device=device), one), (one, 0.5)):
        with pytest.raises(RunError, match="[kv]_scale"):
            vllm_ops.reshape_and_cache_flash(key, value, *rows, slots, "fp8", *scales)


def test_keys_and_values_have_one_type_and_form(device: str) -> None:
    """V of another type, or a smaller cache of V, was written with K's sizes: past its memory."""
    key, value, slots = (tensor.to(device) for tensor in new_tokens(torch.bfloat16, 2, 64))
    rows, one = torch.zeros(5, 16, 2, 64, dtype=torch.bfloat16, device=device), torch.ones(1, device=device)
    for given, says in (
        ((key, value.float(), rows, rows.float()), "value_cache has shape .* and dtype torch.float32"),
        ((key, value, rows, rows[:2]), r"value_cache has shape \(2, 16, 2, 64\)"),
        ((key, value, rows, torch.zeros_like(rows[:, :8])), r"value_cache has shape \(5, 8, 2, 64\)"),
    ):
        with pytest.raises(RunError, match=says):
            vllm_ops.reshape_and_cache_flash(*given, slots, "auto", one, one)
    bytes_of = torch.zeros(5, 16, 2, 64, dtype=torch.uint8, device=device)
    with pytest.raises(RunError, match="value has dtype torch.float16 but key has torch.bfloat16"):
        vllm_ops.reshape_and_cache_flash(key, value.half(), bytes_of, bytes_of.clone(), slots, "fp8", one, one)


def test_errors_of_writes() -> None:
    key, value, slots = new_tokens(torch.bfloat16, 2, 64)
    one = torch.ones(1)
    cache = (torch.zeros(5, 2, 8, 16, 8, dtype=torch.bfloat16), torch.zeros(5, 2, 64, 16, dtype=torch.bfloat16))
    rows = (torch.zeros(5, 16, 2, 64, dtype=torch.bfloat16),) * 2
    for write, given, says in (
        (
            vllm_ops.reshape_and_cache,
            (key, value, *cache, slots + 30),
            "slot_mapping reaches 90: the cache has slots 0 to 79",
        ),
        (
            vllm_ops.reshape_and_cache,
            (key, value[:, :1], *cache, slots),
            r"value \(9, 1, 64\): key_cache and value_cache take \[tokens, 2, 64\]",
        ),
        (vllm_ops.reshape_and_cache, (key.float(), value, *cache, slots), "key has dtype torch.float32 but key_cache"),
        (vllm_ops.reshape_and_cache, (key, value, *cache, slots.float()), "slot_mapping has shape"),
        (vllm_ops.reshape_and_cache, (key[:4], value[:4], *cache, slots), "at most 4"),
        (vllm_ops.reshape_and_cache, (key[0], value, *cache, slots), "key has shape"),
        (vllm_ops.reshape_and_cache_flash, (key, value, *cache, slots), "key_cache has shape"),
        (vllm_ops.reshape_and_cache_flash, (key, value, *rows, slots + 30), "slot_mapping reaches 90"),
    ):
        with pytest.raises(RunError, match=says):
            write(*given, "auto", one, one)
