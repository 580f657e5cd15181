"""Random rows of the wrappers that plan other batches than the case table has: POD, BatchAttention and sparse matrices.
Each row checks itself against the fp64 reference."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch
from caches import poison
from cases.case import Case
from comparison import Outputs, compare
from fuzz import MOST_SCORES, Format, lengths
from hypothesis import strategies as st
from inputs import Inputs, make_inputs, reference_states
from reference import attention

import flashpage
from flashpage import pod, sparse

WORKSPACE_BYTES = 64 << 20
_HEADS = st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 3]))  # query heads of a KV head, KV heads


def workspace(device: str) -> torch.Tensor:
    return poison(torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device))


def plain(chosen: list[Format], *, has_soft_cap: bool = True, has_dims: bool = False) -> st.SearchStrategy[Format]:
    """Formats that every wrapper's plan has arguments for: no variant and no type of the output."""
    found = [
        f for f in chosen if not (f["variant"] or f["o_dtype"] or f["kv_format"] or (f["head_dim_vo"] and not has_dims))
    ]
    return st.sampled_from([f for f in found if has_soft_cap or not f["soft_cap"]])


def types(case: Case) -> dict[str, Any]:
    return {"q_data_type": getattr(torch, case.q_dtype), "kv_data_type": getattr(torch, case.kv_type)}


def pages(inputs: Inputs, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return inputs.indptr, inputs.indices.to(device), inputs.last_page_len


def moved(values: dict[str, Any], device: str) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in values.items()}


def mask_of(inputs: Inputs, device: str) -> torch.Tensor | None:
    return None if inputs.masks is None else torch.cat([mask.flatten() for mask in inputs.masks]).to(device)


def small(q_lens: tuple[int, ...], kv_lens: tuple[int, ...], heads: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The lengths, halved until the reference needs some ten milliseconds."""
    while max((q * kv for q, kv in zip(q_lens, kv_lens, strict=True)), default=0) * len(q_lens) * heads > MOST_SCORES:
        q_lens, kv_lens = tuple(n // 2 for n in q_lens), tuple(n // 2 for n in kv_lens)
    return q_lens, kv_lens


# ---------------------------------------------------------------- prefills and decodes in one call


@dataclasses.dataclass(frozen=True)
class PodRow:
    """One request's prefill, or a batch of them, and a batch of decodes."""

    prefill: Case
    decode: Case
    is_batch: bool = False
    name: str = "fuzz"

    def check(self, device: str) -> None:
        prefill, decode = make_inputs(self.prefill), make_inputs(self.decode)
        found = self._run_batch(prefill, decode, device) if self.is_batch else self._run(prefill, decode, device)
        for inputs, outputs in zip((prefill, decode), found, strict=True):
            compare(inputs.case, outputs, reference_states(inputs))

    def _run(self, prefill: Inputs, decode: Inputs, device: str) -> list[Outputs]:
        one, many = self.prefill, self.decode
        wrapper = pod.PODWithPagedKVCacheWrapper(workspace(device), many.kv_layout)
        heads = (many.num_q_heads, many.num_kv_heads, many.head_dim, many.page_size)
        values = {"pos_encoding_mode": many.position, "window_left": many.window_left, "sm_scale": many.sm_scale}
        wrapper.plan(*pages(decode, device), *heads, **values, **types(many))
        k, v = (half[0] for half in prefill.cache.argument(device))
        found = wrapper.run(
            *(prefill.q[0].to(device), k, v, torch.cat(decode.q).to(device), decode.cache.argument(device)),
            custom_mask_p=mask_of(prefill, device),
            causal_p=one.causal,
            kv_layout_p=one.kv_layout,
            kv_layout_d=many.kv_layout,
            pos_encoding_mode_p=one.position,
            sm_scale_p=one.sm_scale,
            window_left_p=one.window_left,
            **moved(decode.scales, device),
        )
        return [Outputs(out, None) for out in found]

    def _run_batch(self, prefill: Inputs, decode: Inputs, device: str) -> list[Outputs]:
        case = self.prefill
        wrapper = pod.BatchPODWithPagedKVCacheWrapper(workspace(device), case.kv_layout)
        lists = [(inputs.qo_indptr, *pages(inputs, device)) for inputs in (prefill, decode)]
        heads = (case.num_q_heads, case.num_kv_heads, case.head_dim, case.page_size)
        values = {"pos_encoding_mode": case.position, "window_left": case.window_left, "sm_scale": case.sm_scale}
        wrapper.plan(*lists[0], *lists[1], *heads, **values, **types(case))
        rows = [(torch.cat(inputs.q).to(device), inputs.cache.argument(device)) for inputs in (prefill, decode)]
        options = {"custom_mask_p": mask_of(prefill, device), "causal_p": case.causal, "return_lse": True}
        found = wrapper.run(*rows[0], *rows[1], **options, **moved(decode.scales, device))
        return [Outputs(*pair) for pair in found]


@st.composite
def pods(draw: st.DrawFn, chosen: list[Format]) -> PodRow:
    form, (group, kv_heads) = draw(plain(chosen, has_soft_cap=False)), draw(_HEADS)
    is_batch, count = draw(st.booleans()), draw(st.integers(1, 4))
    shared = form | {"num_q_heads": group * kv_heads, "num_kv_heads": kv_heads}
    shared["page_size"], shared["kv_layout"] = draw(st.sampled_from([1, 8, 16])), draw(st.sampled_from(["NHD", "HND"]))
    shared["window_left"] = draw(st.sampled_from([-1, -1, 0, 15, 64]))
    shared["sm_scale"] = draw(st.sampled_from([None, 0.2]))
    scales = draw(st.sampled_from(["", "float", "tensor", "per_head"]))
    caches = st.sampled_from(["tuple", "fused", "gapped"])
    first = draw(st.integers(1, 3)) if is_batch else 1
    q_lens, kv_lens = small(draw(lengths(first, 130)), draw(lengths(first, 400)), group * kv_heads)
    entry, cache = (
        ("paged", draw(caches)) if is_batch else ("single_prefill", draw(st.sampled_from(["tuple", "gapped"])))
    )
    mask = draw(st.sampled_from(["", "", "dense"]))
    prefill = Case(
        "fuzz", "drawn", kv_lens, q_lens, entry, cache=cache, causal=draw(st.booleans()), mask=mask, **shared
    )
    rows = draw(st.lists(st.sampled_from([0, 1, 1, 2]), min_size=count, max_size=count)) if is_batch else [1] * count
    entry = "paged" if is_batch else "decode"
    sizes = draw(lengths(count, 400)), tuple(rows)
    return PodRow(prefill, Case("fuzz", "drawn", *sizes, entry, cache=draw(caches), scales=scales, **shared), is_batch)


# ---------------------------------------------------------------- BatchAttention


@dataclasses.dataclass(frozen=True)
class MixedRow:
    """A batch for BatchAttention."""

    case: Case
    name: str = "fuzz"

    def check(self, device: str) -> None:
        inputs, case = make_inputs(self.case), self.case
        scales = {name: value for name, value in inputs.scales.items() if name != "q_scale"}
        inputs = dataclasses.replace(inputs, scales=scales)
        wrapper = flashpage.BatchAttention(case.kv_layout, device)
        kv_lens = torch.tensor(case.kv_lens, dtype=torch.int32)
        lists = (inputs.qo_indptr, inputs.indptr, inputs.indices.to(device), kv_lens)
        sizes = (case.num_q_heads, case.num_kv_heads, case.head_dim, case.value_dim, case.page_size)
        values = {"causal": case.causal, "sm_scale": case.sm_scale, "logits_soft_cap": case.soft_cap}
        wrapper.plan(*lists, *sizes, **values, **types(case))
        found = wrapper.run(torch.cat(inputs.q).to(device), inputs.cache.argument(device), **moved(scales, device))
        compare(case, Outputs(*found), reference_states(inputs))


@st.composite
def mixed(draw: st.DrawFn, chosen: list[Format]) -> MixedRow:
    found = [f for f in chosen if f["position"] == "NONE"]
    form, (group, kv_heads), count = draw(plain(found, has_dims=True)), draw(_HEADS), draw(st.integers(1, 6))
    q_lens = draw(st.lists(st.sampled_from([0, 1, 1, 1, 2, 17, 130]), min_size=count, max_size=count))
    q_lens, kv_lens = small(tuple(q_lens), draw(lengths(count, 400)), group * kv_heads)
    memory = {"page_size": draw(st.sampled_from([1, 16, 64])), "kv_layout": draw(st.sampled_from(["NHD", "HND"]))}
    options = {"causal": draw(st.booleans()), "sm_scale": draw(st.sampled_from([None, 0.2]))}
    options["scales"] = draw(st.sampled_from(["", "float", "per_head"]))
    heads = {"num_q_heads": group * kv_heads, "num_kv_heads": kv_heads}
    return MixedRow(Case("fuzz", "drawn", kv_lens, q_lens, **form, **heads, **memory, **options))


# ---------------------------------------------------------------- sparse matrices


@dataclasses.dataclass(frozen=True)
class SparseRow:
    """A matrix of blocks: the columns of each row block."""

    columns: tuple[tuple[int, ...], ...]
    num_columns: int
    sizes: tuple[int, int]  # R and C: rows and tokens of a block
    last_rows: int  # of the last row block
    case: Case  # heads, types and options
    is_masked: bool = False
    name: str = "fuzz"

    def check(self, device: str) -> None:
        (R, C), case = self.sizes, self._case()
        M, N = sum(case.q_lens), self.num_columns * C
        whole = make_inputs(dataclasses.replace(case, q_lens=(M,), kv_lens=(N,), entry="single_prefill"))
        q, k, v = (rows[0] for rows in (whole.q, whole.k, whole.v))
        counts = [len(row) for row in self.columns]
        indptr = torch.tensor([0, *counts]).cumsum(0).int()
        indices = torch.tensor([column for row in self.columns for column in row], dtype=torch.int32)
        mask = None
        if self.is_masked:
            mask = torch.rand(len(indices), R, C, generator=torch.Generator().manual_seed(7)) < 0.6
        wrapper = sparse.BlockSparseAttentionWrapper(workspace(device))
        heads = (case.num_q_heads, case.num_kv_heads, case.head_dim)
        values = {"causal": case.causal, "sm_scale": case.sm_scale, "logits_soft_cap": case.soft_cap or None}
        values["pos_encoding_mode"] = case.position
        to = None if mask is None else mask.to(device)
        wrapper.plan(indptr, indices.to(device), M, N, R, C, *heads, mask=to, **values, **types(case))
        scales = {f"scale_{name[0]}": value for name, value in moved(whole.scales, device).items()}
        found = wrapper.run(*(t.to(device) for t in (q, k, v)), **scales, return_lse=True)
        options = dataclasses.replace(whole.options(), causal=case.causal and mask is None)
        states = []
        for i, row in enumerate(self.columns):
            tokens = torch.tensor([column * C + token for column in row for token in range(C)], dtype=torch.long)
            rows = slice(i * R, i * R + case.q_lens[i])
            bits = None
            if mask is not None:
                blocks = mask[int(indptr[i]) : int(indptr[i + 1]), : case.q_lens[i]]
                bits = blocks.transpose(0, 1).reshape(case.q_lens[i], -1)
            states.append(attention(q[rows], k[tokens], v[tokens], options, custom_mask=bits))
        compare(case, Outputs(*found), states)

    def _case(self) -> Case:
        q_lens = (self.sizes[0],) * (len(self.columns) - 1) + (self.last_rows,)
        kv_lens = tuple(len(row) * self.sizes[1] for row in self.columns)
        return dataclasses.replace(self.case, q_lens=q_lens, kv_lens=kv_lens, page_size=self.sizes[1])


@st.composite
def matrices(draw: st.DrawFn, chosen: list[Format]) -> SparseRow:
    form, (group, kv_heads) = draw(plain(chosen)), draw(_HEADS)
    R, C = draw(st.sampled_from([1, 3, 16, 64])), draw(st.sampled_from([1, 4, 16, 32]))
    count = draw(st.integers(1, 8))
    row = st.lists(st.integers(0, count - 1), unique=True, max_size=count).map(tuple)
    columns = draw(st.lists(row, min_size=1, max_size=4).map(tuple))
    options = {"causal": draw(st.booleans()), "sm_scale": draw(st.sampled_from([None, 0.2]))}
    options["scales"] = draw(st.sampled_from(["", "float", "per_head"]))
    case = Case("fuzz", "drawn", (), (), num_q_heads=group * kv_heads, num_kv_heads=kv_heads, **form, **options)
    is_masked = draw(st.booleans()) and case.position == "NONE"
    return SparseRow(columns, count, (R, C), draw(st.integers(1, R)), case, is_masked)


@dataclasses.dataclass(frozen=True)
class VariableRow:
    """Blocks of any sizes, with a matrix for each KV head."""

    rows: tuple[tuple[int, ...], ...]  # of each head's row blocks; equal sums
    columns: tuple[tuple[int, ...], ...]  # tokens of each head's column blocks; equal sums
    seed: int  # of the visible blocks
    case: Case  # heads, types and options
    name: str = "fuzz"

    def check(self, device: str) -> None:
        case, heads = self.case, len(self.rows)
        group, generator = case.num_q_heads // heads, torch.Generator().manual_seed(self.seed)
        visible = torch.rand(heads, len(self.rows[0]), len(self.columns[0]), generator=generator) < 0.5
        sizes = {"q_lens": (sum(self.rows[0]),), "kv_lens": (sum(self.columns[0]),)}
        whole = make_inputs(dataclasses.replace(case, entry="single_prefill", **sizes))
        q, k, v = (rows[0].transpose(0, 1).contiguous() for rows in (whole.q, whole.k, whole.v))
        wrapper = sparse.VariableBlockSparseAttentionWrapper(workspace(device))
        row_sizes, column_sizes = torch.tensor(self.rows), torch.tensor(self.columns)
        values = {"causal": case.causal, "sm_scale": case.sm_scale, "logits_soft_cap": case.soft_cap or None}
        heads_of = (case.num_q_heads, heads, case.head_dim)
        wrapper.plan(visible, row_sizes.int(), column_sizes.int(), *heads_of, **values, **types(case))
        out, lse = wrapper.run(*(t.to(device) for t in (q, k, v)), return_lse=True)
        parts, states, lens = [], [], []
        for head in range(heads):
            mine, ends = slice(head * group, (head + 1) * group), row_sizes[head].cumsum(0).tolist()
            for i, (end, size) in enumerate(zip(ends, self.rows[head], strict=True)):
                seen = torch.repeat_interleave(visible[head, i], column_sizes[head])
                rows = (q[mine, end - size : end], k[head : head + 1, seen], v[head : head + 1, seen])
                states.append(attention(*(t.transpose(0, 1) for t in rows), whole.options()))
                parts.append([t[mine, end - size : end].transpose(0, 1) for t in (out, lse)])
                lens.append((size, int(seen.sum())))
        q_lens, kv_lens = zip(*lens, strict=True)
        found = Outputs(*(torch.cat(column) for column in zip(*parts, strict=True)))
        options = {"num_q_heads": group, "num_kv_heads": 1, "q_lens": q_lens, "kv_lens": kv_lens}
        compare(dataclasses.replace(case, **options), found, states)


@st.composite
def variable_matrices(draw: st.DrawFn, chosen: list[Format]) -> VariableRow:
    found = [f for f in chosen if f["position"] == "NONE"]
    form, (group, kv_heads) = draw(plain(found)), draw(_HEADS)

    def sizes(blocks: int, most: int) -> tuple[tuple[int, ...], ...]:
        """Cuts one length in each head's way."""
        total = draw(st.integers(1, most))
        cuts = st.lists(st.integers(0, total), min_size=blocks - 1, max_size=blocks - 1).map(sorted)
        ends = [[0, *draw(cuts), total] for _ in range(kv_heads)]
        return tuple(tuple(b - a for a, b in itertools.pairwise(row)) for row in ends)

    rows, columns = sizes(draw(st.integers(1, 4)), 150), sizes(draw(st.integers(1, 5)), 300)
    options = {"causal": draw(st.booleans()), "sm_scale": draw(st.sampled_from([None, 0.2]))}
    heads = {"num_q_heads": group * kv_heads, "num_kv_heads": kv_heads}
    return VariableRow(
        rows, columns, draw(st.integers(0, 9)), Case("fuzz", "drawn", (), (), **form, **heads, **options)
    )
