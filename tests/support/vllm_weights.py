"""Layers of the vLLM that is here, after weights are loaded again and after an engine has slept: what kernels read is
where it was, and has the new values."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import vllm_latent
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm_step import Form, Scene, close

from flashpage.engines.plugin import layers
from flashpage.engines.vllm.plugin import fusion
from flashpage.engines.vllm.plugin.builder import FlashpageBuilder
from flashpage.engines.vllm.plugin.impl import FlashpageImpl

SLOPES = (0.5, 0.25, 0.125, 0.0625)
DECODE = ([1, 1, 1], [5, 64, 33])


def layer_of(**options: Any) -> FlashpageImpl:
    with vllm_latent.configured(), mock.patch.object(fusion, "prepare"):
        return FlashpageImpl(4, 64, Form.scale, 2, **options)


def load_weights(impl: FlashpageImpl) -> None:
    """In the model's type, as vLLM does."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        impl.process_weights_after_loading(torch.bfloat16)
    finally:
        torch.set_default_dtype(torch.float32)


def builder_of(impl: FlashpageImpl) -> FlashpageBuilder:
    given = SimpleNamespace(
        compilation_config=SimpleNamespace(
            cudagraph_mode=CUDAGraphMode["NONE"],
            max_cudagraph_capture_size=0,
            static_forward_context={"layer": SimpleNamespace(impl=impl)},
            inductor_compile_config={},
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=16, max_num_batched_tokens=512),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        model_config=SimpleNamespace(dtype=torch.bfloat16, max_model_len=256),
        speculative_config=None,
    )
    return FlashpageBuilder(SimpleNamespace(block_size=16), ["layer"], given, torch.device("cpu"))


def attend(
    impl: FlashpageImpl, builder: FlashpageBuilder, layer: Any, scene: Scene, out_scale: torch.Tensor | None = None
) -> torch.Tensor:
    q, k, v, _, out, *_ = scene.tensors()
    out = out if out_scale is None else out.to(torch.float8_e4m3fn)
    step = builder.build(0, CommonAttentionMetadata(**vars(scene.common()), max_seq_len=256))
    return impl.forward(layer, q, k, v, scene.cache, step, out, out_scale)[: scene.rows]


def check_sinks() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        given = torch.nn.Parameter(torch.zeros(4, dtype=dtype))
        impl = layer_of(sinks=given)
        load_weights(impl)
        first = impl.sinks
        assert first is not None and first.dtype is torch.float32 and (first is given) == (dtype is torch.float32)
        first.data.fill_(1e9)  # sleep at level 2 discards the memory of weights
        given.data.fill_(5.0)
        load_weights(impl)
        assert impl.sinks is first and first.tolist() == [5.0] * 4


def check_scales() -> None:
    """The tensors by which the cache is written change in place when an engine wakes up, and vLLM's numbers do not."""
    scene, wrong = Scene(Form(kv_type="fp8"), *DECODE, "cpu"), 0.25
    for out_scale in (None, torch.tensor(0.02)):
        impl = layer_of(kv_cache_dtype="fp8")
        if out_scale is not None:
            impl.options = impl.options.with_outputs(torch.float8_e4m3fn)
        numbers = {"_k_scale_float": wrong, "_v_scale_float": wrong}
        layer = SimpleNamespace(_k_scale=torch.tensor(wrong), _v_scale=torch.tensor(wrong), **numbers)
        builder = builder_of(impl)
        attend(impl, builder, layer, scene, out_scale)
        layer._k_scale.fill_(scene.scales[0])
        layer._v_scale.fill_(scene.scales[1])
        found = attend(impl, builder, layer, scene, out_scale)
        if out_scale is None:
            close(found, scene.expected())
        else:
            assert (found.double() * out_scale - scene.expected()).abs().max() < 0.1


class Made(TorchDispatchMode):
    """The addresses of tensors that are made within it."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[torch.Tensor] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor):
            self.tensors.append(found)
        return found


def check_slopes() -> None:
    """vLLM makes builders in the memory of the cache, whose contents every sleep discards, and layers in that of the
    weights, whose contents come back or are loaded again."""
    layers.variant_of.cache_clear()
    layers._slopes_on.cache_clear()
    scene = Scene(Form(slopes=SLOPES), *DECODE, "cpu")
    impl = layer_of(alibi_slopes=SLOPES)
    load_weights(impl)
    with Made() as made:
        builder = builder_of(impl)
    slopes = layers.variant_of(impl.options.kind, torch.device("cpu")).tensors["slopes"]
    assert all(tensor.data_ptr() != slopes.data_ptr() for tensor in made.tensors)
    slopes.zero_()
    load_weights(impl)
    assert slopes.tolist() == list(SLOPES)
    close(attend(impl, builder, None, scene), scene.expected())


def check() -> None:
    check_sinks()
    check_scales()
    check_slopes()
