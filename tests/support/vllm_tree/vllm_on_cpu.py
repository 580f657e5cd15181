"""A platform plugin of vLLM: the Python files of its CUDA wheel on the CPU, with the operators that they need there."""

from __future__ import annotations

import torch


def platform() -> str:
    """vLLM calls this entry point of the group `vllm.platform_plugins`."""
    _define_all()
    return "vllm.platforms.cpu.CpuPlatform"


_library: torch.library.Library | None = None  # as long as it lives, its operators exist


def _define_all() -> None:
    global _library
    if _library is not None:
        return
    _library = torch.library.Library("_C", "FRAGMENT")
    for schema, function in (
        ("silu_and_mul(Tensor(a!) result, Tensor input) -> ()", _silu_and_mul),  # looked up when a model is made
        ("gelu_tanh_and_mul(Tensor(a!) result, Tensor input) -> ()", _gelu_tanh_and_mul),
        ("greedy_argmax(Tensor logits) -> Tensor", lambda logits: logits.argmax(dim=-1)),
        ("init_cpu_memory_env(int[] nodes) -> ()", lambda nodes: None),
        (
            "compute_slot_mapping_kernel_impl(Tensor query_start_loc, Tensor positions, Tensor block_table, "
            "Tensor(a!) slot_mapping, int block_size) -> ()",
            _slot_mapping,
        ),
    ):
        _library.define(schema)
        _library.impl(schema.partition("(")[0], function, "CompositeExplicitAutograd")


def _silu_and_mul(result: torch.Tensor, input: torch.Tensor) -> None:
    gate, up = input.chunk(2, dim=-1)
    result.copy_(torch.nn.functional.silu(gate) * up)


def _gelu_tanh_and_mul(result: torch.Tensor, input: torch.Tensor) -> None:
    gate, up = input.chunk(2, dim=-1)
    result.copy_(torch.nn.functional.gelu(gate, approximate="tanh") * up)


def _slot_mapping(
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_size: int,
) -> None:
    counts = query_start_loc.diff().long()
    request = torch.repeat_interleave(torch.arange(len(counts)), counts)
    at = positions[: len(request)].long()
    slot_mapping[: len(request)] = block_table[request, at // block_size].long() * block_size + at % block_size
