"""A step of vLLM without vLLM: its CommonAttentionMetadata, a cache of K and V halves, and the exact results."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from reference import Options, attention

from flashpage.engines.plugin.group_plans import GroupPlans, GroupSizes
from flashpage.engines.plugin.layers import LayerOptions
from flashpage.engines.plugin.parts import LayerTensors
from flashpage.engines.vllm.plugin import cache
from flashpage.engines.vllm.plugin.planner import GroupPlanner
from flashpage.engines.vllm.plugin.step import Step


@dataclasses.dataclass
class Common:
    """The fields of vLLM's CommonAttentionMetadata that the planner reads, under vLLM's names."""

    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: Any = True
    seq_lens_cpu_upper_bound: torch.Tensor | None = None
    mm_req_doc_ranges: dict[int, list[tuple[int, int]]] | None = None
    rswa_prefix_lens: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Form:
    """Heads, types and layout of a cache, and the options of a layer."""

    heads: tuple[int, int, int] = (4, 2, 64)  # query heads, KV heads, head_dim
    page: int = 16
    dtype: torch.dtype = torch.bfloat16
    kv_type: str = "auto"
    layout: str = "NHD"
    window: int | None = None  # tokens, the row's own included
    soft_cap: float | None = None
    slopes: tuple[float, ...] | None = None
    sinks: bool = False
    scale: float = 0.2
    is_encoder: bool = False

    def layer(self) -> LayerOptions:
        return LayerOptions(
            self.heads,
            self.scale,
            slopes=self.slopes,
            window=self.window,
            soft_cap=self.soft_cap,
            is_encoder=self.is_encoder,
        )


class Scene:
    """Requests of `q_lens` new rows and `kv_lens` tokens each, with pages in a mixed order.

    The cache is vLLM's: [blocks, heads, page, 2 x head_dim] in either order of memory, NaN where nothing was written.
    """

    def __init__(self, form: Form, q_lens: list[int], kv_lens: list[int], device: str, seed: int = 0) -> None:
        self.form, self.q_lens, self.kv_lens, self.device = form, q_lens, kv_lens, torch.device(device)
        drawn = torch.Generator().manual_seed(seed)
        heads, kv_heads, dim = form.heads
        self.rows = sum(q_lens)
        self.q = torch.randn(self.rows, heads, dim, generator=drawn).to(self.device, form.dtype)
        pages = [-(-n // form.page) for n in kv_lens]
        self.blocks, width = sum(pages) + 3, max(pages, default=0) + 2
        order = torch.randperm(self.blocks, generator=drawn)
        self.table = torch.zeros(len(kv_lens), width, dtype=torch.int32)
        at = 0
        for row, count in zip(self.table, pages, strict=True):
            row[:count] = order[at : at + count]
            at += count
        self.kv = [torch.randn(2, n, kv_heads, dim, generator=drawn) for n in kv_lens]
        # As heavy as dozens of tokens, so that a sink that counts twice or not at all is seen.
        self.sinks = 3 + torch.randn(heads, generator=drawn) if form.sinks else None
        self.scales = (0.5, 2.0) if form.kv_type != "auto" else (1.0, 1.0)
        self.cache = self._written()

    def _written(self) -> torch.Tensor:
        """The cache with all tokens of all requests, written by the plugin."""
        form, (_, kv_heads, dim) = self.form, self.form.heads
        shape = (self.blocks, kv_heads, form.page, 2 * dim)
        if form.layout == "NHD":
            shape = (shape[0], shape[2], shape[1], shape[3])
        is_fp8 = form.kv_type != "auto"
        held = torch.full(shape, 0x7F if is_fp8 else float("nan"), dtype=torch.uint8 if is_fp8 else form.dtype)
        held = held.to(self.device)
        found = held.transpose(1, 2) if form.layout == "NHD" else held
        slots = torch.cat([self.slots(i, 0, n) for i, n in enumerate(self.kv_lens)]).to(self.device)
        key, value = (torch.cat([kv[half] for kv in self.kv]).to(self.device, form.dtype) for half in (0, 1))
        scales = tuple(torch.tensor(scale, device=self.device) for scale in self.scales)
        cache.write(key, value, cache.halves(found, dim, form.kv_type), slots, form.kv_type, scales)
        return found

    def slots(self, request: int, begin: int, end: int) -> torch.Tensor:
        at = torch.arange(begin, end)
        return self.table[request, at // self.form.page].long() * self.form.page + at % self.form.page

    def common(self, causal: bool = True, has_host_lengths: bool = True) -> Common:
        starts = torch.tensor([0, *self.q_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        lens = torch.tensor(self.kv_lens, dtype=torch.int32)
        slots = [self.slots(i, n - m, n) for i, (m, n) in enumerate(zip(self.q_lens, self.kv_lens, strict=True))]
        return Common(
            query_start_loc=starts.to(self.device),
            query_start_loc_cpu=starts,
            seq_lens=lens.to(self.device),
            num_reqs=len(lens),
            num_actual_tokens=self.rows,
            max_query_len=max(self.q_lens),
            block_table_tensor=self.table.to(self.device),
            slot_mapping=torch.cat(slots).to(self.device) if not self.form.is_encoder else starts,
            causal=causal,
            seq_lens_cpu_upper_bound=lens if has_host_lengths else None,
        )

    def sizes(self, **changes: Any) -> GroupSizes:
        form = self.form
        usual = GroupSizes(
            page_size=form.page,
            q_dtype=form.dtype,
            kv_dtype=cache.element_type(form.kv_type, form.dtype),
            max_requests=16,
            max_rows=512,
            max_tokens=self.table.shape[1] * form.page,
        )
        return usual._replace(**changes)

    def plans(self, layers: list[LayerOptions] | None = None, **sizes: Any) -> GroupPlans:
        return GroupPlans(layers or [self.form.layer()], self.sizes(**sizes), self.device)

    def planner(self, layers: list[LayerOptions] | None = None, **sizes: Any) -> GroupPlanner:
        return GroupPlanner(self.plans(layers, **sizes))

    def tensors(self) -> LayerTensors:
        """Rows after the step's are padding, which must stay as they are."""
        form, (_, _, dim) = self.form, self.form.heads
        new = [kv[:, n - m :] for kv, m, n in zip(self.kv, self.q_lens, self.kv_lens, strict=True)]
        key, value = (torch.cat([kv[half] for kv in new]).to(self.device, form.dtype) for half in (0, 1))
        q = torch.cat([self.q, torch.full_like(self.q[:1], float("nan")).expand(3, -1, -1)])
        output = torch.full_like(q, 7.0)
        scales = (None, *self.scales) if form.kv_type != "auto" else (None, None, None)
        sinks = None if self.sinks is None else self.sinks.to(self.device)
        return LayerTensors(q, key, value, cache.halves(self.cache, dim, form.kv_type), output, scales, sinks)

    def expected(
        self, causal: bool = True, form: Form | None = None, masks: list[torch.Tensor] | None = None
    ) -> torch.Tensor:
        """The exact output, fp64, over the values that the cache holds.

        Args:
            masks: [rows, tokens] for each request, in place of causal and window.
        """
        form = form or self.form
        k_rows, v_rows = (half.float() for half in cache.halves(self.cache.cpu(), form.heads[2], form.kv_type))
        found, at, window, encoder = [], 0, form.window, form.is_encoder
        for i, (m, n) in enumerate(zip(self.q_lens, self.kv_lens, strict=True)):
            slots = self.slots(i, 0, n)
            k, v = (rows.flatten(0, 1)[slots].double() for rows in (k_rows, v_rows))
            options = Options(
                form.scale,
                causal=causal and not encoder and masks is None,
                window_left=-1 if window is None or encoder or masks is not None else window - 1,
                soft_cap=form.soft_cap or 0.0,
                sinks=self.sinks,
                k_scale=self.scales[0],
                v_scale=self.scales[1],
                score_mod=self._alibi if form.slopes is not None else None,
                mask_mod=(lambda b, h, q, t: (q - t).abs() < window) if window is not None and encoder else None,
            )
            mask = None if masks is None else masks[i]
            found.append(attention(self.q[at : at + m].cpu().double(), k, v, options, custom_mask=mask).out)
            at += m
        return torch.cat(found)

    def _alibi(self, score: torch.Tensor, b: Any, h: Any, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
        slopes = torch.tensor(self.form.slopes, dtype=torch.float64)
        return score - slopes[h] * (q_idx - kv_idx).abs()


def run(step: Step, layer: LayerOptions, tensors: LayerTensors) -> torch.Tensor:
    """The step's rows of one layer; checks that padding was left alone."""
    for part in step.parts:
        part.run(layer, tensors)
    assert bool((tensors.output[step.num_actual_tokens :] == 7).all())
    return tensors.output[: step.num_actual_tokens]


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Within two roundings of the output's type, relative to its largest value."""
    limit = 2.5 * torch.finfo(found.dtype).eps * max(1.0, expected.abs().max().item())
    assert not found.isnan().any()
    assert (found.cpu().double() - expected).abs().max().item() < limit
