"""The answers of the vLLM backend before a model is loaded, and its builder. Runs where vLLM can be imported."""

from __future__ import annotations

import copy
import gc
import inspect
import os
import pickle
import sys
import weakref
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import vllm_latent
import vllm_lists
import vllm_weights
import vllm_window_blocks
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8DynamicTensorSym, kFp8StaticTensorSym
from vllm.platforms.interface import DeviceCapability
from vllm.plugins import load_general_plugins
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig, get_attn_backend
from vllm_step import Form, Scene, close, run

from flashpage.engines.plugin.group_plans import Use
from flashpage.engines.vllm.plugin import fusion, ranks, register
from flashpage.engines.vllm.plugin.builder import FlashpageBuilder
from flashpage.engines.vllm.plugin.impl import FlashpageImpl

HOPPER, AMPERE, TURING = DeviceCapability(9, 0), DeviceCapability(8, 0), DeviceCapability(7, 5)
BLACKWELL = DeviceCapability(10, 0)
USUAL: dict[str, Any] = {
    "head_size": 128,
    "dtype": torch.bfloat16,
    "kv_cache_dtype": "auto",
    "block_size": 16,
    "use_mla": False,
    "has_sink": False,
    "use_sparse": False,
    "use_mm_prefix": False,
    "use_per_head_quant_scales": False,
    "device_capability": HOPPER,
    "attn_type": "decoder",
}
SERVED: list[dict[str, Any]] = [
    {},
    {"head_size": 80},
    {"head_size": 16},
    {"head_size": 512},
    {"block_size": 1},
    {"block_size": 100},
    {"kv_cache_dtype": "fp8"},
    {"kv_cache_dtype": "fp8_e5m2"},
    {"has_sink": True},
    {"has_sliding_window": True, "has_sink": True, "kv_cache_dtype": "fp8_e4m3"},
    {"use_non_causal": True},
    {"use_batch_invariant": True},
    {"use_mm_prefix": True},
    {"use_rswa": True},
    {"use_mm_prefix": True, "has_sliding_window": True, "head_size": 256, "kv_cache_dtype": "fp8"},
    {"attn_type": "encoder_only"},
    {"attn_type": "encoder_decoder"},
    {"use_dcp": True},
    {"device_capability": AMPERE, "kv_cache_dtype": "fp8"},
]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"head_size": 100}, "head_size"),
    ({"head_size": 520}, "head_size"),
    ({"dtype": torch.float32}, "dtype"),
    ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype"),
    ({"kv_cache_dtype": "float16"}, "flashpage: no kernel can honour this request"),
    ({"use_mla": True}, "MLA"),
    ({"use_sparse": True}, "sparse"),
    ({"use_per_head_quant_scales": True}, "per-head quant"),
    ({"device_capability": TURING}, "compute capability"),
]


def check_answers() -> None:
    load_general_plugins()
    assert AttentionBackendEnum.CUSTOM.is_overridden() and not AttentionBackendEnum.CPU_ATTN.is_overridden()
    register()  # twice is once
    backend = AttentionBackendEnum.CUSTOM.get_class()
    known = inspect.signature(backend.validate_configuration).parameters  # 0.26 knows no use_dcp
    for changes in (changes for changes in SERVED if changes.keys() <= known.keys()):
        assert backend.validate_configuration(**USUAL | changes) == [], changes
    for changes, reason in REFUSED:
        found = backend.validate_configuration(**USUAL | changes)
        assert any(reason in text for text in found), (changes, found)
    for ranks_of_contexts, count in ((2, 1), (1, 0)):
        with vllm_latent.configured(context_ranks=ranks_of_contexts):
            assert len(backend.validate_configuration(**USUAL | {"has_sliding_window": True})) == count
            assert backend.validate_configuration(**USUAL) == []
            assert len(backend.validate_configuration(**USUAL | {"use_mm_prefix": True})) == count
            images = USUAL | {"use_mm_prefix": True, "use_batch_invariant": True}
            assert len(backend.validate_configuration(**images)) == count + 1


def check_layers() -> None:
    """Layers whose rows see later tokens are refused before weights are loaded."""
    canvas = {"diffusion_config": SimpleNamespace(canvas_length=16)}
    drafts = {
        "speculative_config": SimpleNamespace(num_speculative_tokens=8),
        "attention_config": SimpleNamespace(use_non_causal=True),
    }
    for others, window, message in ((canvas, 15, "canvas of 16 tokens"), (drafts, 8, "Draft fewer tokens")):
        with vllm_latent.configured(others=others), mock.patch.object(fusion, "prepare"):
            FlashpageImpl(4, 64, 0.1, sliding_window=window + 1)
            try:
                FlashpageImpl(4, 64, 0.1, sliding_window=window)
            except NotImplementedError as error:
                assert message in str(error), error
            else:
                raise AssertionError(f"a window of {window} was not refused")
    with vllm_latent.configured(context_ranks=2, others=canvas):
        (reason,) = AttentionBackendEnum.CUSTOM.get_class().validate_configuration(**USUAL)
    assert "no diffusion models" in reason


def check_layers_that_see_images() -> None:
    """vLLM's platform for the CPU asks no backend whether it serves a model, so layers do."""
    others = {"model_config": SimpleNamespace(is_mm_prefix_lm=True)}
    with vllm_latent.configured(others=others), mock.patch.object(fusion, "prepare"):
        FlashpageImpl(4, 64, 0.1)
        try:
            FlashpageImpl(4, 64, 0.1, alibi_slopes=[0.5, 0.25, 0.1, 0.05])
        except NotImplementedError as error:
            assert "not served with ALiBi" in str(error), error
        else:
            raise AssertionError("ALiBi was not refused")


def check_own_choice() -> None:
    """With FLASHPAGE_VLLM=on vLLM's own choice on a card, where no backend is named, is flashpage."""
    for operators in ("vllm._C", "vllm._C_stable_libtorch"):
        sys.modules.setdefault(operators, ModuleType(operators))  # those of a card: a choice calls none
    from vllm.platforms.cuda import CudaPlatformBase

    usual = AttentionSelectorConfig(128, torch.bfloat16, "auto", None)
    ours = "flashpage.engines.vllm.plugin.backend.InPlaceOf"
    has_own = "TRITON_FLASH_ATTN" in AttentionBackendEnum.__members__  # newer versions have backends for images
    images = usual._replace(head_size=256, use_mm_prefix=True)
    overrides = "vllm.v1.attention.backends.registry._ATTN_OVERRIDES"
    with mock.patch.dict(overrides, clear=True), mock.patch.dict(os.environ, FLASHPAGE_VLLM="on"):
        register()
        for card, place in ((AMPERE, "FlashAttn"), (HOPPER, "FlashAttn"), (BLACKWELL, "FlashInfer")):
            for given in (usual, usual._replace(head_size=80, has_sink=True, has_sliding_window=True)):
                with mock.patch.object(CudaPlatformBase, "get_device_capability", return_value=card):
                    assert CudaPlatformBase.get_attn_backend_cls(None, given, 32) == ours + place, (card, given)
            with mock.patch.object(CudaPlatformBase, "get_device_capability", return_value=card):
                found = CudaPlatformBase.get_attn_backend_cls(None, images, 32)
            assert found == ours + ("Triton" if has_own and card is not AMPERE else "") + place, (card, found)
    with mock.patch.dict(overrides, clear=True), mock.patch.dict(os.environ, FLASHPAGE_VLLM="off"):
        register()
        for name in ("FLASH_ATTN", "FLASHINFER", "CPU_ATTN", *(["TRITON_FLASH_ATTN"] if has_own else [])):
            assert not AttentionBackendEnum[name].is_overridden(), name


def check_variables_for_ray() -> None:
    """vLLM copies our variables to Ray's actors: workers of its first Ray executor, and engines of data parallelism."""
    from vllm.ray.ray_env import get_env_vars_to_copy

    with mock.patch.dict(os.environ, FLASHPAGE_VLLM="on", VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY="MY_", MY_OWN="1"):
        assert "FLASHPAGE_VLLM" not in get_env_vars_to_copy()
        with mock.patch.dict("vllm.v1.attention.backends.registry._ATTN_OVERRIDES"):
            register()
        assert {"FLASHPAGE_VLLM", "MY_OWN"} <= get_env_vars_to_copy()


def check_kinds() -> None:
    """By `backend_per_kind` some layers of a model are ours, and others have vLLM's own attention."""
    from vllm.config import AttentionConfig
    from vllm.platforms.cuda import CudaPlatformBase

    has_window = {"full_attention": False, "sliding_window": True}
    hopper = mock.patch.object(CudaPlatformBase, "get_device_capability", return_value=HOPPER)
    others = {
        "model_config": SimpleNamespace(use_mla=False, rswa_window=None),
        "cache_config": SimpleNamespace(user_specified_block_size=True, block_size=16, cache_dtype="auto"),
        "parallel_config": SimpleNamespace(prefill_context_parallel_size=1, decode_context_parallel_size=1),
        "kv_transfer_config": None,
        "speculative_config": None,
    }
    platform = mock.patch("vllm.platforms.current_platform", CudaPlatformBase)
    for kind in has_window:
        others["attention_config"] = AttentionConfig(backend="TRITON_ATTN", backend_per_kind={kind: "CUSTOM"})
        with vllm_latent.configured(others=others), hopper, platform:
            for layer, window in has_window.items():
                found = get_attn_backend(128, torch.bfloat16, "auto", has_sliding_window=window)
                assert found.get_name() == ("CUSTOM" if layer == kind else "TRITON_ATTN"), (kind, layer)


# ---------------------------------------------------------------- the builder


def config(mode: str = "NONE", drafts: int = 0, **changes: Any) -> SimpleNamespace:
    """The fields of vLLM's config that the builder reads."""
    drafting = SimpleNamespace(num_speculative_tokens=drafts, parallel_drafting=False) if drafts else None
    return SimpleNamespace(
        compilation_config=SimpleNamespace(
            cudagraph_mode=CUDAGraphMode[mode],
            max_cudagraph_capture_size=64,
            static_forward_context={},
            inductor_compile_config={},
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=16, max_num_batched_tokens=512),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        model_config=SimpleNamespace(dtype=torch.bfloat16, max_model_len=256),
        speculative_config=drafting,
        **changes,
    )


def builder_of(scene: Scene, given: SimpleNamespace) -> FlashpageBuilder:
    impl = SimpleNamespace(options=scene.form.layer(), kv_cache_dtype="auto", dcp_world_size=1, dcp_rank=0)
    given.compilation_config.static_forward_context["layer"] = SimpleNamespace(impl=impl)
    return FlashpageBuilder(SimpleNamespace(block_size=scene.form.page), ["layer"], given, torch.device("cpu"))


def common_of(scene: Scene) -> CommonAttentionMetadata:
    return CommonAttentionMetadata(**vars(scene.common()), max_seq_len=256)


def check_builder() -> None:
    """The plans of each mode of capture, by the steps that vLLM captures."""
    decode, verify, mixed = ([1, 1, 1], [5, 64, 33]), ([3, 3, 1], [50, 9, 70]), ([1, 7, 40], [50, 7, 90])
    for mode, drafts, lens, use in (
        ("NONE", 0, decode, Use.DECODE),
        ("PIECEWISE", 0, decode, Use.DECODE),
        ("FULL_DECODE_ONLY", 0, decode, Use.DECODE_IN_GRAPH),
        ("FULL_AND_PIECEWISE", 0, decode, Use.DECODE_IN_GRAPH),
        ("FULL_AND_PIECEWISE", 0, mixed, Use.ROWS),
        ("FULL", 0, decode, Use.ROWS_IN_GRAPH),
        ("FULL", 0, mixed, Use.ROWS_IN_GRAPH),
        ("FULL_AND_PIECEWISE", 2, decode, Use.ROWS_IN_GRAPH),
        ("FULL_AND_PIECEWISE", 2, verify, Use.ROWS_IN_GRAPH),
    ):
        scene = Scene(Form(), *lens, "cpu")
        builder = builder_of(scene, config(mode, drafts))
        assert builder.reorder_batch_threshold == 1 + drafts
        assert builder.get_cudagraph_support(config(mode), None) is AttentionCGSupport.ALWAYS
        step = builder.build_for_cudagraph_capture(common_of(scene))
        assert set(builder._planner.plans._attentions) == {use}, (mode, lens)
        close(run(step, scene.form.layer(), scene.tensors()), scene.expected())
        if use is not Use.ROWS:
            builder.update_draft_decode_metadata(step)
            close(run(step, scene.form.layer(), scene.tensors()), scene.expected())


def check_canvas() -> None:
    """Steps of a diffusion model's canvases get the plan that captured ones read; some see both sides."""
    given = config("FULL_AND_PIECEWISE", diffusion_config=SimpleNamespace(canvas_length=4))
    scene = Scene(Form(), [4, 4], [9, 30], "cpu")
    builder = builder_of(scene, given)
    builder.build_for_cudagraph_capture(common_of(scene).replace(causal=torch.tensor([True, False])))
    assert set(builder._planner.plans._attentions) == {Use.MASKED_IN_GRAPH}


def check_images() -> None:
    """Only decodes are captured, none with drafts; a step with an image has a mask."""
    for mode, drafts, lens, ranges, uses in (
        ("FULL", 0, [1, 1], [(2, 8)], {Use.DECODE_IN_GRAPH}),
        ("FULL", 0, [1, 20], [(12, 28)], {Use.DECODE, Use.MASKED}),
        ("FULL", 0, [1, 20], [], {Use.ROWS}),
        ("FULL_AND_PIECEWISE", 2, [3, 3], [], {Use.FEW_ROWS}),
        ("FULL_AND_PIECEWISE", 2, [3, 3], [(12, 29)], {Use.FEW_ROWS, Use.MASKED}),
    ):
        given, scene = config(mode, drafts), Scene(Form(), lens, [9, 30], "cpu")
        given.model_config.is_mm_prefix_lm, given.model_config.hf_text_config = True, SimpleNamespace()
        builder = builder_of(scene, given)
        assert builder.get_cudagraph_support(given, None) is AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        step = builder.build(0, common_of(scene).replace(mm_req_doc_ranges={0: [], 1: ranges}))
        assert set(builder._planner.plans._attentions) == uses, (mode, lens)
        run(step, scene.form.layer(), scene.tensors())


def check_outputs() -> None:
    """A layer that vLLM's pass changed writes e4m3. It learns that in the run by which vLLM measures memory; one that
    did not, or that kernels do not serve so, quantizes after attention."""
    scene, scale = Scene(Form(), [1, 7], [50, 9], "cpu"), torch.full((1, 1), 0.004)
    quantized = (scene.expected() / scale).clamp(-448, 448)
    with vllm_latent.configured(), mock.patch.object(fusion, "prepare"):
        impls = [FlashpageImpl(4, 64, scene.form.scale, 2) for _ in range(2)]
        encoder = FlashpageImpl(4, 64, scene.form.scale, 2, attn_type="encoder_only")
    assert impls[0].fused_output_quant_supported(kFp8StaticTensorSym)
    assert not impls[0].fused_output_quant_supported(kFp8DynamicTensorSym)
    assert not encoder.fused_output_quant_supported(kFp8StaticTensorSym)
    q, k, v, *_ = scene.tensors()
    for impl, is_told in zip(impls, (True, False), strict=True):
        out = torch.empty(q.shape, dtype=torch.float8_e4m3fn)
        if is_told:
            assert not impl.forward(None, q, k, v, scene.cache, None, out, scale).float().any()
        given = config()
        given.compilation_config.static_forward_context["layer"] = SimpleNamespace(impl=impl)
        builder = FlashpageBuilder(SimpleNamespace(block_size=16), ["layer"], given, torch.device("cpu"))
        assert builder.use_cascade_attention(512, np.full(16, 2), 4, 2, False, False, False, 132, 1) is not is_told
        impl.forward(None, q, k, v, scene.cache, builder.build(0, common_of(scene)), out, scale)
        (kind,) = builder._planner.plans.of(Use.ROWS)
        assert (kind.out_dtype is torch.float8_e4m3fn) is is_told
        # Runs without metadata may follow: of sizes that are compiled by themselves, or in workers that join later.
        for metadata in (None, builder.build(0, common_of(scene))):
            impl.forward(None, q, k, v, scene.cache, metadata, out, scale)
        error = (out[: scene.rows].double() - quantized).abs()
        assert bool((error <= quantized.abs() * 2**-4 + 1).all()), is_told


def check_ranks() -> None:
    """With context parallelism only uniform batches are captured, of drafts too."""
    for drafts in (0, 2):
        given = config("FULL", drafts)
        given.parallel_config.decode_context_parallel_size = 2
        scene = Scene(Form(), [1, 1], [5, 9], "cpu")
        builder = builder_of(scene, given)
        assert builder.get_cudagraph_support(given, None) is AttentionCGSupport.UNIFORM_BATCH
        assert builder.reorder_batch_threshold == 1 + drafts
        sizes = builder._planner.sizes
        assert (sizes.captures_all, sizes.graph_requests, sizes.graph_rows) == (
            False,
            *((0, 64) if drafts else (64, 0)),
        )


def check_the_pass_of_rotations() -> None:
    """Each model's configuration has a pass of its own, which ends with it. A draft's configuration has its model's, as
    layers of both are in one place. Copies for keys of caches have no configuration."""
    first, second = compiled(), compiled()
    passes = {id(given): given.compilation_config.inductor_compile_config for given in (first, second)}
    for given in (first, copy.copy(first), second, first):
        fusion.prepare(given)
    (key,) = (key for key, value in passes[id(first)].items() if isinstance(value, fusion.RotationFusion))
    made = passes[id(first)][key]
    assert made._config is first and passes[id(second)][key]._config is second
    for copied in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert copied._config is None and copied.uuid() == made.uuid()
    draft = copy.copy(first)  # some drafts have their own place
    draft.compilation_config = copy.copy(first.compilation_config)
    draft.compilation_config.inductor_compile_config = dict(passes[id(first)])
    fusion.prepare(draft)
    assert draft.compilation_config.inductor_compile_config[key]._config is draft
    known = weakref.ref(second)
    del second, given, passes
    gc.collect()
    assert known() is None


def compiled() -> VllmConfig:
    """A configuration by which the pass is applied."""
    given = VllmConfig()
    compilation = given.compilation_config
    compilation.mode, compilation.splitting_ops, compilation.custom_ops = 3, [], ["none", "+rotary_embedding"]
    return given


def check_another_block_table() -> None:
    """A group whose pages lie elsewhere takes the step of the first group."""
    first, second = (Scene(Form(), [1, 7, 2], [50, 7, 90], "cpu", seed) for seed in (0, 1))
    second.q = first.q
    step = (builder := builder_of(first, config())).build(0, common_of(first))
    there = common_of(second)
    assert builder.supports_update_block_table
    moved = builder_of(second, config()).update_block_table(step, there.block_table_tensor, there.slot_mapping)
    assert moved.slot_mapping is there.slot_mapping
    close(run(moved, second.form.layer(), second.tensors()), second.expected())
    halves = config()
    halves.parallel_config.use_ubatching = True  # a step in two halves: vLLM would give the other half's
    assert not builder_of(second, halves).supports_update_block_table


def check_collectives() -> None:
    """vLLM's own merges of the ranks' outputs take base-2 LSEs and return them."""
    for is_all_to_all in (False, True):
        taken = inspect.signature(ranks._collective(is_all_to_all)).parameters
        assert {"return_lse", "is_lse_base_on_e"} <= set(taken)


if __name__ == "__main__":
    check_collectives()
    check_answers()
    check_layers()
    check_layers_that_see_images()
    check_own_choice()
    check_variables_for_ray()
    check_kinds()
    check_builder()
    check_canvas()
    check_images()
    check_outputs()
    check_ranks()
    check_another_block_table()
    check_the_pass_of_rotations()
    vllm_latent.check()
    vllm_lists.check()
    vllm_window_blocks.check()
    vllm_weights.check()
