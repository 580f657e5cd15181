"""FlashAttention-3 for torch's `activate_flash_attention_impl("FA3")`, also in the build that vLLM ships.

torch imports a module and calls `torch.ops.flash_attn_3`, which FlashAttention's own package defines. vLLM's build has
the same kernels as `torch.ops._vllm_fa3_C`, with other arguments, and only for batches whose lengths are given. Here
`flash_attn_3` is defined over that operator, and dense batches get an array of equal lengths. The kernels then make a
schedule from the lengths, in a launch of its own before each call, which is timed with it.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn import attention

# Modules that load a build: FlashAttention's package or one with its names, then vLLM's own.
MODULES = ("flash_attn_interface", "vllm.vllm_flash_attn.flash_attn_interface")
# flash_attn_3::fwd as FlashAttention declares it, without defaults: torch passes all arguments by their places.
_FORWARD = (
    "Tensor q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor(out!)? out, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k, "
    "int? max_seqlen_q, int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k, "
    "Tensor? rotary_cos, Tensor? rotary_sin, Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, "
    "Tensor? v_descale, float? softmax_scale, bool is_causal, int window_size_left, int window_size_right, "
    "int attention_chunk, float softcap, bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, "
    "bool? pack_gqa, int sm_margin"
)
NAMES = tuple(argument.split()[-1] for argument in _FORWARD.split(","))
_VLLM_ONLY = {"cp_world_size": 1, "cp_rank": 0}  # arguments that only vLLM's operator has; its others are None
_libraries: list[torch.library.Library] = []  # kept alive: torch removes a library's operators with it


def register() -> None:
    """Makes "FA3" activate what is here. Raises ImportError with the reason if nothing is."""
    from torch.nn.attention import _fa3

    module = load()
    attention.register_flash_attention_impl("FA3", register_fn=lambda: _fa3.register_flash_attention_fa3(module))


def load() -> str:
    """Imports FA3, so that `torch.ops.flash_attn_3` is there; returns the name of the module that has it."""
    reasons = []
    for module in MODULES:
        try:
            importlib.import_module(module)
        except Exception as error:  # a library for another CUDA fails in many ways
            reasons.append(f"{module}: {error or type(error).__name__}".splitlines()[0])
            continue
        if hasattr(torch.ops.flash_attn_3, "fwd"):
            return module
        if hasattr(torch.ops._vllm_fa3_C, "fwd"):
            define(torch.ops._vllm_fa3_C.fwd)
            return module
        reasons.append(f"{module} defines neither flash_attn_3::fwd nor _vllm_fa3_C::fwd")
    raise ImportError("; ".join(reasons))


def define(fwd: Any, dispatch_key: str = "CUDA") -> None:
    """Defines `torch.ops.flash_attn_3` over vLLM's operator. `bwd` is there because torch looks for it, and has no
    kernel."""
    library = torch.library.Library("flash_attn_3", "DEF")
    library.define(f"fwd({_FORWARD}) -> (Tensor(out!), Tensor, Tensor, Tensor)")
    library.define("bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse) -> Tensor[]")
    library.impl("fwd", forward_over(fwd, [argument.name for argument in fwd.default._schema.arguments]), dispatch_key)
    _libraries.append(library)


@functools.cache
def _lengths(device: torch.device, batch: int, tokens: int) -> torch.Tensor:
    """Made once, as engines have them: its launch is not timed."""
    return torch.full((batch,), tokens, dtype=torch.int32, device=device)


def forward_over(fwd: Callable[..., Any], its_names: Iterable[str]) -> Callable[..., tuple[torch.Tensor, ...]]:
    """flash_attn_3::fwd by an operator whose arguments have these names in this order."""
    its_names = tuple(its_names)

    def forward(*given: Any) -> tuple[torch.Tensor, ...]:
        named = dict(zip(NAMES, given, strict=True))
        q, k = named["q"], named["k"]
        if named["softmax_scale"] is None:
            named["softmax_scale"] = q.shape[-1] ** -0.5
        if named["cu_seqlens_q"] is None and named["seqused_k"] is None:  # a dense batch
            named["seqused_k"] = _lengths(q.device, q.shape[0], k.shape[1])
        places = [named.pop(name, _VLLM_ONLY.get(name)) for name in its_names]
        if left := {name: value for name, value in named.items() if value}:
            raise NotImplementedError(f"vLLM's FA3 has no {', '.join(left)}: leave it out.")
        out, lse, *_ = fwd(*places)
        unused = lse.new_empty(0)  # partial results, which torch drops
        return out, lse, unused, unused.clone()

    return forward
