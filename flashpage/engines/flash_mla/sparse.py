"""FlashMLA's sparse attention: each row of q lists the tokens that it reads, of one cache or of two."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch

from ...base import checks
from ...base.errors import CapabilityError, RunError, named
from ...base.memory import is_capturing
from ...kernels.latent_formats import PACKED, has_two_caches
from ...plan.lengths import Lengths
from ...plan.page_indices import NO_PAGES
from ...run.checks import NO_SCALES, Tensors
from ...wrappers.function_plans import Tables, plan_of
from ...wrappers.latent_sparse import SELECTED, SelectedAttention, check_entries, check_slots
from ...wrappers.lse_mode import LN_2
from ...wrappers.merge import merge_state_in_place
from ...wrappers.plan_arguments import LatentArguments
from ...wrappers.two_lists import second_of

_FORMATS = {found.row_bytes: name for name, found in PACKED.items()}
_KV_FORMATS = {"V32": PACKED["deepseek_v32"].row_bytes, "V4": PACKED["deepseek_v4"].row_bytes}
_OTHER_KV_FORMATS = ("V32_NO_ROPE", "V41", "V41_FP4")
_V41 = {528: "V3.2's without rotated columns or V4.1's", 288: "V4.1's in fp4"}


def names_of_cache(name: str) -> dict[str, str]:
    """The caller's name of a cache, for each of the inner interface's names of it."""
    inner = ("paged_kv_cache", "kv_cache", "k", "ckv_cache", "kpe_cache")
    return dict.fromkeys(inner, name) | {"kv_data_type": f"dtype of {name}"}


_SECOND_NAMES = names_of_cache("extra_k_cache") | {"indices": "extra_indices_in_kvcache"}


class Lists(NamedTuple):
    """The tokens that rows of q read in one cache."""

    cache: torch.Tensor  # [pages, page_size, columns or bytes]
    indices: torch.Tensor  # [rows, topk] int32: page * page_size + token of the page; -1: none
    lengths: torch.Tensor | None  # [rows] int32, entries that are used; None: all

    def lens(self) -> torch.Tensor:
        """Entries of each list that are used."""
        if self.lengths is not None:
            return self.lengths
        rows, topk = self.indices.shape
        return torch.full((rows,), topk, dtype=torch.int32, device=self.indices.device)

    def is_joint_with(self, others: Lists) -> bool:
        """Whether one launch reads both caches."""
        row_format = _row_format(self.cache)
        if row_format is None or row_format != _row_format(others.cache):
            return False
        return has_two_caches(row_format)


class SparseCall(NamedTuple):
    """The queries, and the options of the plan."""

    query: torch.Tensor  # [rows, heads, columns]
    head_dim_vo: Any
    sm_scale: float
    key: Hashable = None  # the step for which one plan is enough; None: every call plans
    out_dtype: torch.dtype | None = None  # of a state's output; None: the query's
    uncut: bool = False  # no list is cut

    def state(self, lists: Lists) -> tuple[torch.Tensor, torch.Tensor]:
        """The output and the LSE, base 2, over one cache."""
        attention, lens = self._planned(lists)
        cache = lists.cache
        if cache.is_cpu:
            check_slots(lists.indices, lens, cache.shape[0] * cache.shape[1])
        tensors = Tensors(self.query, _as_stored(cache), None, None)
        out, lse = attention.run_indices(tensors, lists.indices, True, NO_SCALES, None, None)
        return out, lse

    def joint_state(self, lists: Lists, others: Lists) -> tuple[torch.Tensor, torch.Tensor]:
        """The output and the LSE, base 2, over two caches in one launch."""
        device = self.query.device
        checks.same_device(others.indices, device, "extra_indices_in_kvcache", RunError)
        attention, _ = self._planned(lists, others)
        second = second_of(attention.options, others.cache, others.indices, lists.lengths, device)
        for each, name in ((lists, "indices"), (others, "extra_indices_in_kvcache")):
            if each.cache.is_cpu:
                check_slots(each.indices, each.lens(), each.cache.shape[0] * each.cache.shape[1], name)
        tensors = Tensors(self.query, _as_stored(lists.cache), None, None)
        out, lse = attention.run_indices(tensors, lists.indices, True, NO_SCALES, None, None, second)
        return out, lse

    def _planned(self, lists: Lists, others: Lists | None = None) -> tuple[SelectedAttention, torch.Tensor]:
        """The Attention with a plan for these lists, and their lengths."""
        rows, ckv = len(lists.indices), checks.whole("head_dim_ckv", self.head_dim_vo, 1, error=RunError)
        row_format = _row_format(lists.cache)
        arguments = LatentArguments(
            num_heads=self.query.shape[1],
            head_dim_ckv=ckv,
            head_dim_kpe=self.query.shape[2] - ckv,
            page_size=lists.cache.shape[1],
            sm_scale=self.sm_scale,
            q_data_type=self.query.dtype,
            o_data_type=self.out_dtype,
            kv_data_type=None if row_format else lists.cache.dtype,
            kv_row_format=row_format,
            disable_split_kv=self.uncut,
            is_selected=True,
            has_two_caches=others is not None,
        )
        plan = plan_of(self.query.device, "NHD", arguments, SELECTED)
        # A row has the entries of its first list, of which some may be unused, and then those of its second one.
        last, before = (lists, 0) if others is None else (others, lists.indices.shape[1])
        lens, topk = last.lens() + before if before else last.lens(), before + last.indices.shape[1]
        captures = is_capturing(lists.indices.device)  # a graph makes its own plan
        key = None if self.key is None or last.lengths is not None else (self.key, rows, topk, captures)
        if lens.is_cpu:
            starts = torch.arange(rows + 1, device="cpu") * topk
            found = plan.on_host(key, lambda: (Lengths(None, starts, None, lens), NO_PAGES))
        else:
            found = plan.on_device(Tables(lens, lists.indices, list_entries=topk), key)
        assert isinstance(found, SelectedAttention)
        return found, lens


def attend(call: SparseCall, lists: list[Lists], attn_sink: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [rows, heads, head_dim_vo] and LSE [rows, heads], base e and without the sink, over all lists."""
    is_joint = len(lists) == 2 and lists[0].is_joint_with(lists[1])
    if len(lists) > 1 and (attn_sink is not None or not is_joint):  # the output is rounded once, after fp32 states
        call = call._replace(out_dtype=torch.float32)
    if is_joint:
        out, lse = call.joint_state(*lists)
    else:
        out, lse = call.state(lists[0])
        for others in lists[1:]:
            with named(_SECOND_NAMES):
                state = call.state(others)
            merge_state_in_place(out, lse, *state)
    lse = lse * LN_2
    return with_sink(call, out, lse, attn_sink), lse


def with_sink(call: SparseCall, out: torch.Tensor, lse: torch.Tensor, attn_sink: torch.Tensor | None) -> torch.Tensor:
    """The output in the query's type, multiplied by exp(lse) / (exp(lse) + exp(attn_sink))."""
    if attn_sink is not None:
        sink = checks.tensor(attn_sink, "attn_sink", RunError)
        if sink.shape != lse.shape[1:] or sink.dtype != torch.float32:
            raise RunError(
                f"attn_sink has shape {tuple(sink.shape)} and dtype {sink.dtype}: "
                f"pass float32 of {tuple(lse.shape[1:])}."
            )
        kept = (lse - sink).sigmoid().nan_to_num(0.0).unsqueeze(-1)
        return torch.mul(out, kept, out=torch.empty_like(out, dtype=call.query.dtype))
    return out.to(call.query.dtype)


def check_format(kv_format: Any, cache: torch.Tensor | None) -> None:
    """Checks FlashMLA's name of the format of a cache; None: a cache without lists, which has no such format."""
    if kv_format is None:
        return
    if cache is None:
        raise RunError(f"kv_format={checks.shown(kv_format)} without indices: pass None, as rows have q's type.")
    if kv_format in _OTHER_KV_FORMATS:
        known = " or ".join(f"{name!r} ({size} bytes)" for name, size in _KV_FORMATS.items())
        raise CapabilityError(f"kv_format={kv_format!r} is not supported, as no kernel reads such rows: pass {known}.")
    size = _KV_FORMATS[checks.choice("kv_format", kv_format, tuple(_KV_FORMATS), RunError)]
    if cache.element_size() != 1 or cache.shape[-1] != size:
        found = f"{cache.shape[-1]} elements of {cache.dtype}" if cache.element_size() != 1 else cache.shape[-1]
        raise RunError(f"kv_format={kv_format!r} is of {size} bytes but k_cache has rows of {found}: pass None.")


def lists_of(cache: Any, indices: Any, lengths: Any, rows: tuple[int, ...], names: tuple[str, str, str]) -> Lists:
    """Checks one cache's lists: indices [*rows, topk], lengths [rows[0]]; names: of the three tensors."""
    cache, indices = checks.tensor(cache, names[0], RunError), checks.tensor(indices, names[1], RunError)
    if indices.dim() != len(rows) + 1 or indices.shape[:-1] != rows or indices.dtype != torch.int32:
        raise RunError(
            f"{names[1]} has shape {tuple(indices.shape)} and dtype {indices.dtype}: "
            f"pass int32 of {(*rows, 'topk')}, as q has such rows."
        )
    if cache.dim() and cache.element_size() == 1 and cache.shape[-1] not in _FORMATS:
        sizes = " or ".join(f"{size} ({name})" for size, name in _FORMATS.items())
        given = f"{names[0]} has rows of {cache.shape[-1]} bytes"
        if cache.shape[-1] in _V41:
            given += f", {_V41[cache.shape[-1]]}, which no kernel reads"
        raise RunError(f"{given}: pass {sizes}, or elements of q's type.")
    if lengths is not None:
        lengths = checks.tensor(lengths, names[2], RunError)
        if lengths.shape != rows[:1] or lengths.dtype != torch.int32 or lengths.device != indices.device:
            raise RunError(
                f"{names[2]} has shape {tuple(lengths.shape)} and dtype {lengths.dtype}: pass int32 of {rows[:1]}, on "
                "the device of the lists."
            )
        if lengths.is_cpu:
            check_entries(lengths, indices.shape[-1], names[2], RunError)
        lengths = lengths.repeat_interleave(math.prod(rows[1:]))
    return Lists(cache, indices.flatten(0, -2).contiguous(), lengths)


def _as_stored(cache: torch.Tensor) -> torch.Tensor:
    """Rows of bytes as the type of most of their numbers; any other cache as it is."""
    is_bytes = _row_format(cache) is not None and cache.dtype in (torch.uint8, torch.int8)
    return cache.view(torch.float8_e4m3fn) if is_bytes else cache


def _row_format(cache: torch.Tensor) -> str | None:
    """The format of rows of bytes that hold their scales; None: rows of elements."""
    return _FORMATS.get(cache.shape[-1]) if cache.element_size() == 1 else None
