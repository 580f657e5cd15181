"""Wrappers with options: the walk of tests/api/test_captured_memory.py and tests/card/test_card_captured_memory.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from captured_subjects import (
    HEADS,
    KV_HEADS,
    LENS,
    MOST_TOKENS,
    BatchPod,
    BlockSparse,
    Cascade,
    Decode,
    MixedBatch,
    PagedPrefill,
    Pod,
    RaggedPrefill,
    SharedPrefix,
    Single,
    Sinks,
    Subject,
    VariableSparse,
    ints,
)

from flashpage import Variant

ITEM_POSITIONS = 96


def random_mask(subject: Subject, i: int) -> torch.Tensor:
    bits = sum(q * kv for q, kv in zip(subject.rows[i], LENS[i], strict=True))
    return (torch.rand(bits, generator=torch.Generator().manual_seed(i)) < 0.7).to(subject.device)


def item_positions(_: Subject, i: int) -> torch.Tensor:
    """Items of ten tokens after each prefix."""
    return (torch.arange(ITEM_POSITIONS) % 10).repeat(3).to(torch.uint16)


ITEMS = {
    "prefix_len_ptr": lambda _, i: ints(*(n // 3 for n in LENS[i])),
    "token_pos_in_items_ptr": item_positions,
    "token_pos_in_items_len": ITEM_POSITIONS,
}


def bias_of_heads(device: str) -> Variant:
    return Variant(logit="score + bias[h]", tensors={"bias": torch.linspace(-2, 2, HEADS, device=device)})


def mask_of_documents(device: str) -> Variant:
    ids = (torch.arange(MOST_TOKENS, device=device) // 7).int()
    return Variant(mask_mod=lambda b, h, q_idx, kv_idx: (ids[q_idx] == ids[kv_idx]) | (kv_idx < 5))


@dataclasses.dataclass(frozen=True)
class Walk:
    """A subject with options; options under `made` are made from the device."""

    name: str
    subject: type[Subject]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    made: dict[str, Callable[[str], Any]] = dataclasses.field(default_factory=dict)
    run_options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    def make(self, device: str) -> Subject:
        made = {name: make(device) for name, make in self.made.items()}
        run_options = {name: value(device) for name, value in self.run_options.items()}
        return self.subject(device, self.subject.has_graphs, {**self.options, **made}, run_options)


def heads_of(device: str) -> torch.Tensor:
    return torch.linspace(0.5, 1.0, KV_HEADS, device=device)


WALKS = [
    Walk("decode", Decode),
    Walk("decode, ALiBi and scales", Decode, {"pos_encoding_mode": "ALIBI"}, run_options={"k_scale": heads_of}),
    Walk("decode, RoPE", Decode, {"pos_encoding_mode": "ROPE_LLAMA"}),
    Walk("decode, window and fixed split", Decode, {"window_left": 30, "fixed_split_size": 2}),
    Walk("paged prefill", PagedPrefill, {"causal": True}),
    Walk("paged prefill, bits", PagedPrefill, {"custom_mask": random_mask}),
    Walk("paged prefill, soft cap", PagedPrefill, {"causal": True, "logits_soft_cap": 5.0}),
    Walk("paged prefill, chunk", PagedPrefill, {"causal": True, "chunk": 24}),
    Walk("paged prefill, captured tensor", PagedPrefill, made={"variant": bias_of_heads}),
    Walk("paged prefill, items", PagedPrefill, ITEMS),
    Walk("ragged prefill, window", RaggedPrefill, {"causal": True, "window_left": 9}),
    Walk("ragged prefill, bits", RaggedPrefill, {"custom_mask": random_mask}),
    Walk("ragged prefill, mask function", RaggedPrefill, made={"variant": mask_of_documents}),
    Walk("ragged prefill, items", RaggedPrefill, ITEMS),
    Walk("ragged prefill, ALiBi", RaggedPrefill, {"causal": True, "pos_encoding_mode": "ALIBI"}),
    Walk("ragged prefill, fixed split", RaggedPrefill, {"causal": True, "fixed_split_size": 32}),
    Walk("sinks", Sinks, {"causal": True}),
    Walk("cascade", Cascade, {"causal": True}),
    Walk("cascade, window", Cascade, {"causal": True, "window_left": 20}),
    Walk("cascade, chunk", Cascade, {"causal": True, "chunk": 25}),
    Walk("POD", Pod),
    Walk("batch POD", BatchPod),
    Walk("mixed batch", MixedBatch),
    Walk("block sparse", BlockSparse),
    Walk("variable block sparse", VariableSparse),
    Walk("shared prefix", SharedPrefix),
    Walk("single", Single),
]
