"""A layer of a real vLLM engine: RoPE and cache write in a compiled graph become one operator, and so do attention and
the quantization of its outputs, `python FILE MODEL`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch._inductor.config
from vllm_program import OPTIONS

CALLS: list[str] = []
GRAPHS: list[str] = []
OF_CARDS = (  # operators that vLLM's fusion passes look up when they are imported
    *("static_scaled_fp8_quant", "dynamic_scaled_fp8_quant", "dynamic_per_token_scaled_fp8_quant"),
    *("rms_norm_static_fp8_quant", "fused_add_rms_norm_static_fp8_quant", "rms_norm_dynamic_per_token_quant"),
    *("rms_norm_per_block_quant", "per_token_group_fp8_quant", "fused_add_rms_norm"),
)
LIBRARY = torch.library.Library("_C", "FRAGMENT")


def main(model: str) -> None:
    from vllm import LLM
    from vllm.forward_context import set_forward_context
    from vllm.utils.torch_utils import _encode_layer_name

    from flashpage.engines.vllm.plugin import fusion
    from flashpage.engines.vllm.plugin.impl import FlashpageImpl

    given = {"mode": 0, "custom_ops": ["+rotary_embedding"], "splitting_ops": []}
    llm = LLM(model=model, **OPTIONS | {"dtype": "bfloat16"}, compilation_config=given)
    config = llm.llm_engine.vllm_config
    assert not fusion.is_chosen(config), "without a compiled graph there is nothing to fuse"
    choose(config)
    for operator in OF_CARDS:
        if not hasattr(torch.ops._C, operator):
            LIBRARY.define(f"{operator}() -> ()")
    from vllm.compilation.passes.fusion import rope_kvcache_fusion

    rope_kvcache_fusion._supports_static_q_fp8_quant_fusion = lambda: False  # the CPU's operator has another schema
    name, layer = next(iter(config.compilation_config.static_forward_context.items()))
    heads, kv_heads, size = layer.num_heads, layer.num_kv_heads, layer.head_size
    real = FlashpageImpl.do_rope_and_kv_cache_update
    FlashpageImpl.do_rope_and_kv_cache_update = lambda *a: (CALLS.append("fused"), real(*a))[1]

    def step(qkv: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> Any:
        q, k, v = (qkv * 2).split([heads * size, kv_heads * size, kv_heads * size], dim=-1)
        torch.ops._C.rotary_embedding(positions, q, k, size, table, True)
        k, v = k.view(-1, kv_heads, size), v.view(-1, kv_heads, size)
        return torch.ops.vllm.unified_kv_cache_update(k, v, _encode_layer_name(name)), q.view(-1, heads, size), k

    torch._inductor.config.enable_auto_functionalized_v2 = False  # as vLLM sets it
    drawn = torch.Generator().manual_seed(0)
    qkv = torch.randn(5, (heads + 2 * kv_heads) * size, generator=drawn).bfloat16()
    table = torch.randn(64, size, generator=drawn).bfloat16()
    positions, slots = torch.randint(64, (5,), generator=drawn), torch.tensor([3, 40, -1, 7])
    found = []
    for function in (step, torch.compile(step, backend=backend_of(fusion.RotationFusion(config)))):
        layer.kv_cache.zero_()
        with torch.inference_mode(), set_forward_context(None, config, slot_mapping={name: slots}):
            _, q, k = function(qkv.clone(), positions, table)
        found.append([t.float().clone() for t in (q, k, layer.kv_cache)])
    assert CALLS == ["fused"], GRAPHS
    for two, one in zip(*found, strict=True):
        assert bool(two.any()) and torch.allclose(two, one, rtol=2**-6, atol=2**-6)
    quantize(config, name, layer)


def backend_of(fusion_pass: Callable[[Any], None]) -> Callable[..., Any]:
    """A backend of torch.compile that runs the pass and compiles nothing."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.post_grad import view_to_reshape

    def fuse(inner: torch.fx.GraphModule, _: Any) -> Any:
        view_to_reshape(inner)
        fusion_pass(inner.graph)
        GRAPHS.append(str(inner.graph))
        inner.recompile()
        return inner.forward

    return lambda graph, inputs: aot_autograd(fw_compiler=fuse, decompositions=select_decomp_table())(graph, inputs)


def quantize(config: Any, name: str, layer: Any) -> None:
    """The layer learns its outputs' type in the run by which vLLM measures memory, which has no metadata."""
    from vllm.compilation.passes.fusion.attn_quant_fusion import AttnQuantFusionPass
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape
    from vllm.utils.torch_utils import _encode_layer_name

    from flashpage.engines.vllm.plugin.impl import FlashpageImpl

    heads, kv_heads, size = layer.num_heads, layer.num_kv_heads, layer.head_size
    real, given = FlashpageImpl.forward, []

    def forward(impl: Any, *tensors: Any, output: torch.Tensor, output_scale: Any = None, **others: Any) -> Any:
        given.append((output.dtype, None if output_scale is None else output_scale.item()))
        return real(impl, *tensors, output=output, output_scale=output_scale, **others)

    FlashpageImpl.forward = forward  # type: ignore[method-assign]
    with set_current_vllm_config(config, check_compile=False):
        quant = QuantFP8(static=True, group_shape=GroupShape.PER_TENSOR, compile_native=False)
        fusion_pass = AttnQuantFusionPass(config)

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        encoded, out = _encode_layer_name(name), torch.empty_like(q)
        written = torch.ops.vllm.unified_kv_cache_update(k, v, encoded)
        torch.ops.vllm.unified_attention_with_output(q, k, v, out, encoded, kv_cache_dummy_dep=written)
        return quant.forward_native(out.view(-1, heads * size), scale)[0]

    rows = [torch.randn(5, count, size, dtype=torch.bfloat16) for count in (heads, kv_heads, kv_heads)]
    for of_rows in rows:
        torch._dynamo.mark_dynamic(of_rows, 0)  # as in vLLM's graphs
    assert layer.impl.has_plans
    layer.impl.has_plans = False  # vLLM measures memory before there are builders
    for function in (step, torch.compile(step, backend=backend_of(fusion_pass))):
        assert layer.impl.options.kind.out_dtype is None
        with torch.inference_mode(), set_forward_context(None, config, slot_mapping={name: torch.arange(5)}):
            found = function(*rows, torch.tensor([[0.5]]))
        assert found.shape == (5, heads * size) and found.dtype is torch.float8_e4m3fn
    assert given == [(torch.bfloat16, None), (torch.float8_e4m3fn, 0.5)], GRAPHS[-1]
    assert layer.impl.options.kind.out_dtype is torch.float8_e4m3fn


def choose(config: Any) -> None:
    """The rule by which the pass is added: not if RoPE is no operator, or in another part of the graph."""
    from flashpage.engines.vllm.plugin import fusion

    compilation = config.compilation_config
    for mode, splits, operators, expected in (
        (3, None, ["none", "+rotary_embedding"], False),
        (3, [], ["none"], False),
        (3, [], ["none", "+rotary_embedding"], True),
    ):
        compilation.mode, compilation.splitting_ops, compilation.custom_ops = mode, splits, operators
        fusion.prepare(config)
        assert fusion.is_chosen(config) is expected, (mode, splits, operators)


if __name__ == "__main__":
    main(*sys.argv[1:])
