"""Block-sparse wrappers, compared with the reference with the whole mask."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from cases.case import Case
from comparison import Outputs, compare
from reference import Options, attention

import flashpage
from flashpage import CapabilityError, PlanError, RunError

pytestmark = pytest.mark.usefixtures("quick_kernels")

WORKSPACE_BYTES = 32 << 20


@dataclasses.dataclass(frozen=True)
class Bsr:
    """A block-sparse matrix."""

    M: int
    N: int
    R: int
    C: int
    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    dtype: str = "bfloat16"
    out_dtype: str = "bfloat16"
    masked: bool = False
    soft_cap: float = 0.0

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.M, self.N, self.R, self.C, self.num_q_heads, self.num_kv_heads, self.head_dim


class Matrix:
    """The tensors of a matrix: some row blocks see nothing, some see everything."""

    def __init__(self, bsr: Bsr) -> None:
        self.bsr = bsr
        generator = torch.Generator().manual_seed(bsr.M + bsr.N)
        self.rows, self.columns = -(-bsr.M // bsr.R), bsr.N // bsr.C
        blocks = torch.rand(self.rows, self.columns, generator=generator) < 0.5
        blocks[0], blocks[-1] = False, True
        self.indptr = torch.cat([torch.zeros(1), blocks.sum(1).cumsum(0)]).int()
        self.indices = blocks.nonzero()[:, 1].int()
        shape = (len(self.indices), bsr.R, bsr.C)
        self.mask = torch.rand(shape, generator=generator) < 0.6 if bsr.masked else None
        inside = torch.zeros(self.rows, self.columns, bsr.R, bsr.C, dtype=torch.bool)
        inside[blocks] = torch.ones(shape, dtype=torch.bool) if self.mask is None else self.mask
        self.visible = inside.permute(0, 2, 1, 3).reshape(self.rows * bsr.R, bsr.N)[: bsr.M]
        heads = ((bsr.M, bsr.num_q_heads), (bsr.N, bsr.num_kv_heads), (bsr.N, bsr.num_kv_heads))
        dtype = getattr(torch, bsr.dtype)
        self.q, self.k, self.v = (torch.randn(*n, bsr.head_dim, generator=generator).to(dtype) for n in heads)

    def options(self) -> dict[str, Any]:
        bsr = self.bsr
        types = {"q_data_type": getattr(torch, bsr.dtype), "o_data_type": getattr(torch, bsr.out_dtype)}
        return types | {"logits_soft_cap": bsr.soft_cap or None}

    def tensors(self, device: str) -> tuple[torch.Tensor, ...]:
        return self.q.to(device), self.k.to(device), self.v.to(device)

    def check(self, out: torch.Tensor, lse: torch.Tensor | None, scale: float = 1.0) -> None:
        bsr = self.bsr
        case = Case(
            "bsr",
            "rows that see the blocks of a block-sparse matrix",
            kv_lens=(bsr.N,),
            q_lens=(bsr.M,),
            num_q_heads=bsr.num_q_heads,
            num_kv_heads=bsr.num_kv_heads,
            head_dim=bsr.head_dim,
            q_dtype=bsr.dtype,
            o_dtype=bsr.out_dtype,
            soft_cap=bsr.soft_cap,
        )
        options = Options(sm_scale=scale * bsr.head_dim**-0.5, soft_cap=bsr.soft_cap)
        compare(case, Outputs(out, lse), [attention(self.q, self.k, self.v, options, custom_mask=self.visible)])


def wrapper_on(device: str, kind: str = "") -> Any:
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    return getattr(flashpage, f"{kind}BlockSparseAttentionWrapper")(workspace)


MATRICES = [
    Bsr(64, 128, 16, 16),
    Bsr(50, 96, 16, 8, dtype="float16", out_dtype="float16", soft_cap=10.0),
    Bsr(3, 3, 1, 1, num_q_heads=8, num_kv_heads=8),
    Bsr(130, 192, 64, 64, out_dtype="float16"),
    Bsr(50, 96, 16, 12, masked=True),
    Bsr(70, 60, 7, 5, masked=True, num_q_heads=6, num_kv_heads=1),
]


@pytest.mark.parametrize("bsr", MATRICES, ids=str)
def test_block_sparse(bsr: Bsr, device: str) -> None:
    matrix, wrapper = Matrix(bsr), wrapper_on(device)
    mask = None if matrix.mask is None else matrix.mask.to(device)
    wrapper.plan(matrix.indptr, matrix.indices.to(device), *bsr.sizes, mask, **matrix.options())
    out, lse = wrapper.run(*matrix.tensors(device), return_lse=True)
    matrix.check(out, lse)
    given = torch.empty_like(out), torch.empty_like(lse)
    assert wrapper.run(*matrix.tensors(device), out=given[0], lse=given[1]) is given[0]
    assert torch.equal(given[0], out) and torch.equal(given[1], lse)
    on_device = (matrix.indptr.to(device), matrix.indices.to(device))
    wrapper.begin_forward(*on_device, *bsr.sizes, mask, **matrix.options())
    assert torch.equal(wrapper.run(*matrix.tensors(device)), out)
    matrix.check(wrapper.run(*matrix.tensors(device), scale_k=0.5), None, scale=0.5)
    if not bsr.masked:
        return
    bits = [m.transpose(0, 1).reshape(-1) for m in matrix.mask.split(matrix.indptr.diff().tolist())]
    rows = [min(bsr.R, bsr.M - i * bsr.R) for i in range(matrix.rows)]
    bits = [b[: len(b) // bsr.R * n] for b, n in zip(bits, rows, strict=True)]
    indptr = torch.tensor([0, *map(len, bits)]).cumsum(0)
    packed = flashpage.segment_packbits(torch.cat(bits), indptr, bitorder="little")[0].to(device)
    wrapper.plan(*on_device, *bsr.sizes, packed_mask=packed, causal=True, **matrix.options())
    assert torch.equal(wrapper.run(*matrix.tensors(device)), out)


def test_forward_wins_over_plan() -> None:
    """forward's defaults override plan's options too, as in the other wrappers."""
    matrix, wrapper = Matrix(MATRICES[0]), wrapper_on("cpu")
    wrapper.plan(matrix.indptr, matrix.indices, *matrix.bsr.sizes, sm_scale=0.7, **matrix.options())
    matrix.check(wrapper.forward(*matrix.tensors("cpu")), None)
    capped = dataclasses.replace(matrix.bsr, soft_cap=3.0)
    matrix.bsr = capped
    matrix.check(wrapper.forward(*matrix.tensors("cpu"), logits_soft_cap=3.0), None)
    assert wrapper.end_forward() is None


def test_the_output_has_the_type_of_q_unless_told() -> None:
    matrix, wrapper = Matrix(MATRICES[0]), wrapper_on("cpu")
    wrapper.plan(matrix.indptr, matrix.indices, *matrix.bsr.sizes, q_data_type="bfloat16")
    assert wrapper.run(*matrix.tensors("cpu")).dtype == torch.bfloat16
    wrapper.plan(matrix.indptr, matrix.indices, *matrix.bsr.sizes, q_data_type="bfloat16", o_data_type="float16")
    assert wrapper.run(*matrix.tensors("cpu")).dtype == torch.float16


def test_torch_compile() -> None:
    matrix, wrapper = Matrix(MATRICES[0]), wrapper_on("cpu")
    wrapper.plan(matrix.indptr, matrix.indices, *matrix.bsr.sizes, **matrix.options())
    blocks, variable = Blocks(4, 2, 8), wrapper_on("cpu", "Variable")
    blocks.plan(variable, "cpu")

    def steps(first: list[torch.Tensor], second: list[torch.Tensor]) -> Any:
        return *wrapper.run(*first, return_lse=True), *variable.run(*second, return_lse=True)

    tensors = [list(given.tensors("cpu")) for given in (matrix, blocks)]
    torch._dynamo.reset()
    found = torch.compile(steps, fullgraph=True, backend="aot_eager")(*tensors)
    assert all(torch.equal(x, y) for x, y in zip(found, steps(*tensors), strict=True))


def test_errors() -> None:
    matrix, wrapper = Matrix(MATRICES[0]), wrapper_on("cpu")
    M, N, R, C, *heads = matrix.bsr.sizes
    indptr, indices = matrix.indptr, matrix.indices
    both = {"mask": torch.ones(1), "packed_mask": torch.ones(1)}
    for arguments, options, error, says in (
        ((indptr, indices, M, N + 1, R, C), {}, PlanError, "N=129 is not a multiple of C=16"),
        ((indptr, indices, M + 1, N, R, C), {}, PlanError, "indptr has 4 row blocks but M=65 rows are 5 blocks"),
        ((indptr, indices, M, N - C, R, C), {}, PlanError, "indices reach block 7 but N=112 tokens are 7 blocks"),
        ((indptr, indices, M, N, R, C), {"block_mask": torch.ones(1)}, CapabilityError, "block_mask=a tensor of"),
        ((indptr, indices, M, N, R, C), {"mask": torch.ones(2, R, C).bool()}, PlanError, r"mask has shape \(2, 16"),
        ((None, indices, M, N, R, C), {}, PlanError, "indptr=None is not a tensor"),
        ((indptr, indices, M, N, R, C), both, PlanError, "mask and packed_mask each say"),
    ):
        with pytest.raises(error, match=says):
            wrapper.plan(*arguments, *heads, **(options | matrix.options()))
        with pytest.raises(RunError, match="no plan"):
            wrapper.run(*matrix.tensors("cpu"))
    with pytest.raises(CapabilityError, match="backend='vsa_sm100_blk128' is not part of flashpage"):
        flashpage.BlockSparseAttentionWrapper(torch.empty(64, dtype=torch.uint8), backend="vsa_sm100_blk128")
    wrapper.plan(indptr, indices, M, N, R, C, *heads, **matrix.options())
    with pytest.raises(RunError, match=r"k has shape \(127, 2, 64\): pass \[N=128"):
        wrapper.run(matrix.q, matrix.k[1:], matrix.v)
    wrapper.reset_workspace_buffer(*(torch.empty(1 << 20, dtype=torch.uint8) for _ in range(2)))
    with pytest.raises(RunError, match="no plan"):
        wrapper.run(*matrix.tensors("cpu"))


# ---------------------------------------------------------------- blocks of any sizes


class Blocks:
    """Block masks for each KV head; sizes are multiples of `least` between `least` and three times that."""

    def __init__(self, num_q_heads: int, num_kv_heads: int, least: int, dtype: str = "bfloat16") -> None:
        self.heads, self.dtype, self.dim = (num_q_heads, num_kv_heads), dtype, 64
        generator = torch.Generator().manual_seed(num_q_heads + least)

        def sizes(count: int, total: int) -> torch.Tensor:
            found = torch.ones(num_kv_heads, count, dtype=torch.int64)
            for head in range(num_kv_heads):
                found[head] += torch.bincount(
                    torch.randint(count, (total - count,), generator=generator), minlength=count
                )
            return found * least

        self.row_sizes, self.column_sizes = sizes(4, 12), sizes(5, 15)
        self.mask = torch.rand(num_kv_heads, 4, 5, generator=generator) < 0.5
        self.mask[0, 0] = False
        shapes = ((num_q_heads, 12 * least), (num_kv_heads, 15 * least), (num_kv_heads, 15 * least))
        self.q, self.k, self.v = (
            torch.randn(*shape, self.dim, generator=generator).to(getattr(torch, dtype)) for shape in shapes
        )

    def plan(self, wrapper: Any, device: str, **options: Any) -> None:
        arrays = (self.mask.to(device), self.row_sizes.int().to(device), self.column_sizes.int().to(device))
        wrapper.plan(*arrays, *self.heads, self.dim, q_data_type=self.dtype, **options)

    def tensors(self, device: str) -> tuple[torch.Tensor, ...]:
        return self.q.to(device), self.k.to(device), self.v.to(device)

    def check(self, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        """Compares KV heads one after the other, each as its own request."""
        group = self.heads[0] // self.heads[1]
        for head in range(self.heads[1]):
            visible = self.mask[head].repeat_interleave(self.row_sizes[head], 0)
            visible = visible.repeat_interleave(self.column_sizes[head], 1)
            mine = slice(head * group, (head + 1) * group)
            q, k, v = (t.transpose(0, 1) for t in (self.q[mine], self.k[head : head + 1], self.v[head : head + 1]))
            case = Case("blocks", "one KV head's block mask", (len(k),), (len(q),), num_q_heads=group, num_kv_heads=1)
            case = dataclasses.replace(case, q_dtype=self.dtype, head_dim=self.dim)
            state = attention(q, k, v, Options(sm_scale=self.dim**-0.5), custom_mask=visible)
            found = Outputs(out[mine].transpose(0, 1), None if lse is None else lse[mine].T)
            compare(case, found, [state])


@pytest.mark.parametrize(
    ("heads", "least"), [((4, 2), 8), ((4, 2), 1), ((3, 3), 5), ((8, 1), 16), ((2, 2), 16)], ids=str
)
def test_variable_blocks(heads: tuple[int, int], least: int, device: str) -> None:
    blocks, wrapper = Blocks(*heads, least), wrapper_on(device, "Variable")
    blocks.plan(wrapper, "cpu")
    out, lse = wrapper.run(*blocks.tensors(device), return_lse=True)
    blocks.check(out, lse)
    assert wrapper._sizes[-1] % least == 0  # pages are as long as the block sizes allow
    given = torch.empty_like(out), torch.empty_like(lse)
    assert wrapper.run(*blocks.tensors(device), out=given[0], lse=given[1]) is given[0]
    assert torch.equal(given[0], out) and torch.equal(given[1], lse)
    blocks.plan(wrapper, device)
    assert torch.equal(wrapper.run(*blocks.tensors(device)), out)
    blocks.plan(wrapper, "cpu", sm_scale=0.9)
    blocks.check(wrapper.forward(*blocks.tensors(device)), None)


def test_errors_of_variable_blocks() -> None:
    blocks, wrapper = Blocks(4, 2, 8), wrapper_on("cpu", "Variable")
    with pytest.raises(RunError, match="no plan"):
        wrapper.run(*blocks.tensors("cpu"))
    arrays = (blocks.mask, blocks.row_sizes, blocks.column_sizes)
    for given, says in (
        ((blocks.mask[:, 1:], *arrays[1:]), r"block_mask_map has shape \(2, 3, 5\)"),
        (
            (arrays[0], arrays[1] + torch.tensor([[1], [0]]), arrays[2]),
            "block_row_sz has sum 96 for KV head 1 but 100 for head 0",
        ),
        ((*arrays[:2], -arrays[2]), r"block_col_sz\[0, \d\]=-\d+ is no size"),
        ((*arrays[:2], arrays[2].float()), "block_col_sz has dtype torch.float32: pass int32 or int64"),
        ((*arrays[:2], torch.full_like(arrays[2], 2**28)), "block_col_sz has sum .* over all KV heads"),
        ((None, *arrays[1:]), "block_mask_map=None"),
    ):
        with pytest.raises(PlanError, match=says):
            wrapper.plan(*given, 4, 2, 64, q_data_type="bfloat16")
    blocks.plan(wrapper, "cpu")
    with pytest.raises(RunError, match=r"q has shape \(2, 96, 64\): pass \[4, 96, head_dim\]"):
        wrapper.run(blocks.q[:2], blocks.k, blocks.v)
    with pytest.raises(CapabilityError, match="k_scale=a tensor of shape .* Sage kernels"):
        wrapper.plan(*arrays, 4, 2, 64, q_data_type="bfloat16", k_scale=torch.ones(1, 2, 4))
    blocks.plan(wrapper, "cpu")
    with pytest.raises(CapabilityError, match="use_fp16_qk_reduction"):
        wrapper.forward(*blocks.tensors("cpu"), use_fp16_qk_reduction=True)
    wrapper.reset_workspace_buffer(*(torch.empty(1 << 20, dtype=torch.uint8) for _ in range(2)))
    with pytest.raises(RunError, match="no plan"):
        wrapper.run(*blocks.tensors("cpu"))
