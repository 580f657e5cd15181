"""Random rows over latent rows (MLA): all formats and forms of a batch, lists of tokens, graphs, and two caches in one
softmax. A kernel of the CPU is compiled for each format, so that a round has a few of them."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import latent_runs
import torch
from caches import Cache, poison, write_pages
from cases.case import Case
from comparison import Outputs, compare
from fuzz import Format, lengths
from fuzz_graphs import CapturedRuns
from fuzz_wrappers import small, workspace
from harness import WORKSPACE_BYTES, run_case
from hypothesis import strategies as st
from inputs import Inputs, make_inputs
from latent_rows import arrange, halves, lists, shape_of
from reference import State, attention

import flashpage
from flashpage import flash_mla
from flashpage.kernels.latent_formats import PACKED

FORMATS_OF_A_ROUND = 4
HEADS = (1, 3, 16, 20, 24, 32, 40, 64, 96, 128)
_SIZES = ((576, 512), (320, 256), (512, 512), (256, 256), (192, 128), (448, 384))  # columns of K, and of V
_SCALED = ("numbers", "tensors", "tokens", "tokens-uneven")


def latent_formats() -> list[Format]:
    """Types, columns and formats of rows, each of which has a kernel of its own."""
    found: list[Format] = []
    for q_dtype, o_dtype in itertools.product(("bfloat16", "float16", "float32"), ("", "float32")):
        types = {"q_dtype": q_dtype, "o_dtype": o_dtype if q_dtype != "float32" else ""}
        for qk, vo in _SIZES:
            sizes = types | {"head_dim": qk, "head_dim_vo": vo}
            found += [sizes | {"row_format": "", "kv_dtype": ""}]
            found += [sizes | {"row_format": name, "kv_dtype": "float8_e4m3fn"} for name in _SCALED]
        for name, packed in PACKED.items():
            sizes = types | {"head_dim": sum(packed.head_dims), "head_dim_vo": packed.head_dims[0]}
            found += [sizes | {"row_format": name + end, "kv_dtype": "float8_e4m3fn"} for end in _ends(packed)]
    return [form for i, form in enumerate(found) if form not in found[:i]]


def _ends(packed: Any) -> tuple[str, ...]:
    return ("",) if packed.by_page else ("", "-uneven")  # scales after a page's rows are powers of two


def of_round(chosen: list[Format], has_fp32: bool = True) -> list[Format]:
    """Some formats, which depend on the round's by their seed; the usual one is always among them."""
    found = [form for form in latent_formats() if has_fp32 or form["q_dtype"] != "float32"]
    return [found[0], *random.Random(repr(chosen)).sample(found[1:], FORMATS_OF_A_ROUND - 1)]


def _memory(draw: st.DrawFn, form: Format) -> dict[str, Any]:
    """Draws the pages, and how the cache holds them."""
    packed = PACKED.get(form["row_format"].removesuffix("-uneven"))
    if packed and packed.by_page:
        return {"cache": "tuple", "page_size": draw(st.sampled_from([16, 64]))}
    page_size = draw(st.sampled_from([1, 1, 2, 3, 7, 16, 32, 64, 128]))
    forms = ["interleaved", "tuple", "gapped", "permuted", "odd_rows"] + (["odd_page"] if page_size == 1 else [])
    return {"cache": draw(st.sampled_from(forms)), "page_size": page_size}


def on(case: Case, device: str) -> Case:
    """The case as the device runs it: on cards rows begin on 16 bytes."""
    return dataclasses.replace(case, cache="gapped") if device != "cpu" and case.cache == "odd_rows" else case


# ---------------------------------------------------------------- one batch


@dataclasses.dataclass(frozen=True)
class LatentRow:
    """A batch, and how its plan gets it."""

    case: Case
    form: str = "csr"
    name: str = "fuzz"

    def check(self, device: str) -> None:
        if self.case.runs_on(device):
            run_case(on(self.case, device), device, form=self.form)


@st.composite
def latents(draw: st.DrawFn, chosen: list[Format]) -> LatentRow:
    """Pages of whole requests with masks, and lists of tokens."""
    form, count, heads = draw(st.sampled_from(of_round(chosen))), draw(st.integers(1, 5)), draw(st.sampled_from(HEADS))
    q_lens = draw(st.lists(st.sampled_from([0, 1, 1, 1, 2, 4, 8, 17, 33, 64]), min_size=count, max_size=count))
    q_lens, kv_lens = small(tuple(q_lens), draw(lengths(count, 600)), heads)
    selected = draw(st.sampled_from(["", "", "padded", "lengths"]))
    options: dict[str, Any] = {"num_q_heads": heads, "num_kv_heads": 1, "selected": selected}
    has_mask = not selected and not form["row_format"]  # masks over rows in fp8 are refused
    options["mask"] = draw(st.sampled_from(["", "", "dense", "packed"])) if has_mask else ""
    options["mask_kind"] = draw(st.sampled_from(["random", "causal", "tree", "past", "sparse", "nothing"]))
    options["causal"] = draw(st.booleans()) and not selected
    options |= {"q_strides": draw(st.sampled_from(["contiguous", "split"])), "sinks": draw(st.booleans())}
    options["outputs"] = draw(st.sampled_from(["given", "strided", "returned", "no_lse"]))
    options["lse_mode"] = draw(st.sampled_from(["base2", "base2", "basee"]))
    options["sm_scale"] = draw(st.sampled_from([192**-0.5, None, 0.2]))
    options["fixed_split_size"] = draw(st.sampled_from([0, 0, 2]))
    options["disable_split_kv"] = not options["fixed_split_size"] and draw(st.booleans())
    case = Case("fuzz", "drawn", kv_lens, q_lens, "latent", **options, **form, **_memory(draw, form))
    if _most_partials(case) > WORKSPACE_BYTES["cpu"]:
        case = dataclasses.replace(case, fixed_split_size=0)
    batch = draw(st.sampled_from([name for name in latent_runs.FORMS if name != "on_device" or not options["mask"]]))
    return LatentRow(case, batch)


def _most_partials(case: Case) -> int:
    """Bytes of partial results of a fixed split, if each request has the most rows and tokens, as plans on the device
    take it; pieces are as long as a tile of tokens, whatever the split."""
    rows = len(case.q_lens) * max(case.q_lens) * case.num_q_heads
    pieces = -(-max(case.kv_lens) // 32)
    return rows * pieces * (case.value_dim + 1) * 4


# ---------------------------------------------------------------- two caches in one softmax


@dataclasses.dataclass(frozen=True)
class TwoCaches:
    """DeepSeek V4's call of FlashMLA: lists of a window's cache and of another one."""

    first: Case
    second: Case  # of the same requests and rows
    name: str = "fuzz"

    def check(self, device: str) -> None:
        case, (one, two) = self.first, (make_inputs(self.first), make_inputs(self.second))
        batch, rows = len(case.q_lens), case.q_lens[0]
        given: dict[str, Any] = {}
        for inputs, before in ((one, ""), (two, "extra_")):
            assert inputs.masks is not None
            listed, used = lists(inputs.case, inputs.indptr, inputs.indices, inputs.masks)
            name = "extra_indices_in_kvcache" if before else "indices"
            given[name] = listed.reshape(batch, rows, -1).to(device)
            given[f"{before}topk_length"] = None if used is None else used.to(device)
        q = torch.cat(one.q).reshape(batch, rows, case.num_q_heads, case.head_dim).to(device)
        out, lse = flash_mla.flash_mla_with_kvcache(
            *(q, one.cache.buffers[0].to(device), None, None, case.value_dim, flash_mla.get_mla_metadata()[0]),
            softmax_scale=case.score_scale,
            attn_sink=None if one.sinks is None else one.sinks.to(device),
            extra_k_cache=two.cache.buffers[0].to(device),
            **given,
        )
        found = Outputs(out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1))
        compare(case, found, [self._state(one, two, i) for i in range(batch)])

    def _state(self, one: Inputs, two: Inputs, i: int) -> State:
        """The exact result of a request; FlashMLA's LSEs are those without sinks."""
        assert one.masks is not None and two.masks is not None
        k, v = (torch.cat(pair) for pair in ((one.k[i], two.k[i]), (one.v[i], two.v[i])))
        options, mask = one.options(), torch.cat([one.masks[i], two.masks[i]], 1)
        state = attention(one.q[i], k, v, options, custom_mask=mask)
        alone = attention(one.q[i], k, v, dataclasses.replace(options, sinks=None), custom_mask=mask)
        return dataclasses.replace(state, lse=alone.lse)


@st.composite
def two_caches(draw: st.DrawFn, chosen: list[Format]) -> TwoCaches:
    columns, packed = draw(st.sampled_from([(576, "deepseek_v32"), (512, "deepseek_v4")]))
    count, heads = draw(st.integers(1, 4)), draw(st.sampled_from(HEADS))
    selected = draw(st.sampled_from(["padded", "lengths"]))
    rows = 1 if selected == "lengths" else draw(st.sampled_from([1, 1, 2, 5]))  # topk_length is a request's
    shared: dict[str, Any] = {"num_q_heads": heads, "num_kv_heads": 1, "head_dim": columns, "head_dim_vo": 512}
    shared |= {"selected": selected, "lse_mode": "basee", "sm_scale": draw(st.sampled_from([192**-0.5, 0.2]))}
    shared["q_dtype"] = draw(st.sampled_from(["bfloat16", "bfloat16", "float16"]))
    cases = []
    for name in ("fuzz", "fuzz-extra"):
        row_format = draw(st.sampled_from(["", packed, packed]))
        options = {"row_format": row_format, "kv_dtype": "float8_e4m3fn" if row_format else ""}
        options |= {"cache": "tuple" if row_format else "interleaved", "page_size": draw(st.sampled_from([16, 64]))}
        options["mask_kind"] = draw(st.sampled_from(["random", "causal", "past", "nothing"]))
        options["sinks"] = name == "fuzz" and draw(st.booleans())
        kv_lens = small((rows,) * count, draw(lengths(count, 300)), heads)[1]
        cases.append(Case(name, "drawn", kv_lens, (rows,) * count, "latent", **shared, **options))
    return TwoCaches(*cases)


# ---------------------------------------------------------------- graphs


@dataclasses.dataclass(frozen=True)
class LatentGraphs:
    """Batches of as many requests in turn, through one capture on a card; the first one has the most rows. Batches with
    lists of tokens have equally many."""

    batches: tuple[Case, ...]
    form: str = "csr"  # or on_device
    name: str = "fuzz"

    def check(self, device: str) -> None:
        batches = tuple(on(case, device) for case in self.batches)
        _Runs(batches, self.form, device).check(batches, device)


class _Runs(CapturedRuns):
    """A wrapper, and the memory that its captured runs read and write."""

    def __init__(self, batches: tuple[Case, ...], form: str, device: str) -> None:
        self.form, self.device, case = form, device, batches[0]
        self.pages = max(sum(-(-n // batch.page_size) for n in batch.kv_lens) for batch in batches) + 3
        ints, requests = {"dtype": torch.int32, "device": device}, len(case.kv_lens)
        sizes = {"qo_indptr": requests + 1, "kv_indptr": requests + 1, "kv_indices": self.pages, "kv_len_arr": requests}
        buffers = {name: torch.zeros(size, **ints) for name, size in sizes.items()}
        shape, graph = (sum(case.q_lens), case.num_q_heads), {"use_cuda_graph": True}
        self.topk = max(max(batch.kv_lens) for batch in batches) + 7
        self.wrapper: Any = (
            flashpage.BatchMLASparseAttentionWrapper(workspace(device), **graph, num_rows=shape[0])
            if case.selected
            else flashpage.BatchMLAPagedAttentionWrapper(workspace(device), **graph, **buffers)
        )
        self.q = poison(torch.empty(*shape, case.head_dim, dtype=getattr(torch, case.q_dtype), device=device))
        self.out = torch.empty(*shape, case.value_dim, dtype=getattr(torch, case.out_type), device=device)
        self.lse, self.given = torch.empty(*shape, dtype=torch.float32, device=device), {}

    def plan(self, inputs: Inputs) -> None:
        case = inputs.case
        shape, dtype = shape_of(case, self.pages)
        cache = Cache.make(case.cache, shape, case.kv_layout, dtype)
        lists_of = write_pages(cache, case.kv_lens, *halves(case, inputs.k), seed=len(case.name))
        arrange(case, cache)
        there = dict(zip(("indptr", "indices", "last_page_len"), lists_of, strict=True))
        self._plan(dataclasses.replace(inputs, **there))
        new = latent_runs.cache_arguments(case, cache, self.device)
        self.given = self.given or new
        for name, value in new.items():
            if isinstance(value, torch.Tensor):
                self.given[name].copy_(value)
        self.q[: sum(case.q_lens)] = torch.cat(inputs.q).to(self.device)
        self.case = case

    def _plan(self, inputs: Inputs) -> None:
        case = inputs.case
        if not case.selected:
            latent_runs.plan_pages(self.wrapper, inputs, self.form, self.device)
            return
        assert inputs.masks is not None
        found, used = lists(case, inputs.indptr, inputs.indices, inputs.masks)
        wide = torch.full((len(found), self.topk), -1 if used is None else 2**31 - 1, dtype=torch.int32)
        wide[:, : found.shape[1]] = found
        if used is not None and self.form == "on_device":
            used = used.to(self.device)
        self.wrapper.plan(wide.to(self.device), used, **latent_runs.plan_options(case))

    def _run(self) -> None:
        given = latent_runs.query_arguments(self.case, self.q) | self.given
        given |= {"lse_mode": self.case.lse_mode} if self.case.selected else {}
        self.wrapper.run(**given, out=self.out, lse=self.lse, return_lse=True)


@st.composite
def latent_graphs(draw: st.DrawFn, chosen: list[Format]) -> LatentGraphs:
    form, heads = draw(st.sampled_from(of_round(chosen, has_fp32=False))), draw(st.sampled_from(HEADS))
    count, memory = draw(st.integers(1, 4)), _memory(draw, form)
    rows = draw(st.sampled_from([(1,) * count, (2,) * count, None]))  # None: drawn for each batch
    selected = draw(st.sampled_from(["", "padded", "lengths"])) if rows else ""
    options: dict[str, Any] = {"num_q_heads": heads, "num_kv_heads": 1, "selected": selected}
    options["causal"] = not selected and draw(st.booleans())
    options |= {"sm_scale": 192**-0.5, "lse_mode": draw(st.sampled_from(["base2", "basee"]))}
    batches = []
    for _ in range(draw(st.integers(2, 4))):
        q_lens = rows or tuple(draw(st.lists(st.sampled_from([0, 1, 2, 9, 40]), min_size=count, max_size=count)))
        fewer, kv_lens = small(q_lens, draw(lengths(count, 300)), heads)
        batches.append(Case("fuzz", "drawn", kv_lens, rows or fewer, "latent", **options, **form, **memory))
    batches.sort(key=lambda case: -sum(case.q_lens))
    # The device plans for as many rows of each request as the longest has, which the first batch must hold.
    return LatentGraphs(tuple(batches), draw(st.sampled_from(["csr", "on_device"])) if rows else "csr")
