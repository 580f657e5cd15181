"""SGLang's backend class for latent rows, without SGLang, against the exact results."""

from __future__ import annotations

import math
from typing import Any

import fake_sglang
import pytest
import torch
from fake_sglang import ForwardMode
from reference import Options, attention
from sglang_latent import DIM_V, HEADS, NOPE, SCALE, LatentScene, close

from flashpage.engines.plugin.group_plans import Use

pytestmark = pytest.mark.usefixtures("quick_kernels")

STEPS = {
    ForwardMode.DECODE: ([1, 1, 1], [40, 5, 130]),
    ForwardMode.MIXED: ([1, 17, 3], [50, 17, 40]),  # a decode, a whole prompt, a later chunk of one
    ForwardMode.TARGET_VERIFY: ([3, 3], [50, 9]),
    ForwardMode.DRAFT_EXTEND_V2: ([3, 3], [50, 9]),
}


def captured(backend: Any, batch: Any) -> None:
    """The calls of SGLang's runner of graphs for a step that is captured."""
    backend.init_cuda_graph_state(batch.batch_size, len(batch.positions))
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    backend.init_forward_metadata_in_graph(batch)


@pytest.mark.parametrize("page", [1, 16])
def test_absorbed_rows_in_each_mode(page: int, device: str) -> None:
    for mode, lens in STEPS.items():
        scene = LatentScene(*lens, device, page)
        backend, batch = scene.backend(), scene.batch(mode)
        for is_apart in (False, True):
            backend.init_forward_metadata(batch)
            close(scene.run(backend, batch, is_apart), scene.expected())
        if mode is not ForwardMode.MIXED:
            captured(backend, batch)
            close(scene.run(backend, batch, True), scene.expected())
            (planner,) = backend._planners.values()
            assert any(use.is_graph for use in planner._captured._attentions)
        assert all(use in (Use.DECODE, Use.ROWS) for use in planner_uses(backend))


def test_a_drafts_requests_that_pad_a_captured_step(device: str) -> None:
    """SGLang fills a captured batch with requests of row 0, which have fewer tokens than rows."""
    scene = LatentScene(*STEPS[ForwardMode.DRAFT_EXTEND_V2], device, 16)
    backend, batch = scene.backend(), scene.batch(ForwardMode.DRAFT_EXTEND_V2)
    scene.pool.rows[:16] = 0
    fill = backend.get_cuda_graph_seq_len_fill_value()
    batch.seq_lens = torch.cat([batch.seq_lens, batch.seq_lens.new_full((2,), fill)])
    batch.req_pool_indices = torch.cat([batch.req_pool_indices, batch.req_pool_indices.new_zeros(2)])
    batch.positions, batch.batch_size = batch.positions.new_zeros(12), 4
    rows, scene.q = len(scene.q), torch.cat([scene.q, scene.q])
    captured(backend, batch)
    found = scene.run(backend, batch, False)
    assert len(found) == 2 * rows and not found.isnan().any()
    scene.q = scene.q[:rows]
    close(found[:rows], scene.expected())


def planner_uses(backend: Any) -> set[Use]:
    (planner,) = backend._planners.values()
    return {use for use in planner._eager._attentions if not use.is_graph}


def test_e4m3_rows(device: str) -> None:
    """SGLang casts rows without a scale."""
    scene = LatentScene([1, 1, 1], [40, 5, 130], device, kv_type=torch.float8_e4m3fn)
    backend, batch = scene.backend(), scene.batch(ForwardMode.DECODE)
    backend.init_forward_metadata(batch)
    close(scene.run(backend, batch, True), scene.expected())


@pytest.mark.parametrize("page", [1, 16])
def test_deterministic_mode_does_not_depend_on_the_batch(page: int, device: str) -> None:
    for mode in (ForwardMode.DECODE, ForwardMode.MIXED):
        scene = LatentScene(*STEPS[mode], device, page)
        backend, batch = scene.backend(enable_deterministic_inference=True), scene.batch(mode)
        backend.init_forward_metadata(batch)
        together = scene.run(backend, batch, True)
        close(together, scene.expected())
        alone, rows = scene.last_request(batch), scene.q_lens[-1]
        backend.init_forward_metadata(alone)
        found = backend.forward(scene.q[-rows:], None, None, scene.layer, alone)
        assert torch.equal(found.view(rows, HEADS, -1), together[-rows:])
        (planner,) = backend._planners.values()
        plans = [attention for found in planner._eager._attentions.values() for attention in found.values()]
        assert plans and all(attention.options.fixed_piece_tokens == 4096 for attention in plans)


@pytest.mark.parametrize("padding", [0, 2])
def test_expanded_prompts(padding: int, device: str) -> None:
    """The step's own tokens, all of a request's tokens at once, and chunks of earlier ones with LSEs. Two steps."""
    for new, before in (([5, 17], [9, 3]), ([33], [40])):
        scene = LatentScene(new, [m + n for m, n in zip(new, before, strict=True)], device)
        backend, batch = scene.backend(), scene.batch(ForwardMode.EXTEND)
        backend.init_forward_metadata(batch)
        q = scene.draw(sum(new) + padding, HEADS, NOPE + 24)
        chunks = torch.tensor([[min(n, 8) for n in before], [max(n - 8, 0) for n in before]], dtype=torch.int32)
        batch.prefix_chunk_seq_lens_cpu = chunks
        both = [m + n for m, n in zip(new, before, strict=True)]
        ways: list[tuple[dict[str, Any], list[int], bool]] = [
            ({}, new, True),
            ({"mha_return_lse": True, "attn_attend_prefix_cache": False}, new, True),
            (
                {"mha_return_lse": True, "attn_attend_prefix_cache": True, "prefix_chunk_idx": 0},
                chunks[0].tolist(),
                False,
            ),
            (
                {"mha_return_lse": True, "attn_attend_prefix_cache": True, "prefix_chunk_idx": 1},
                chunks[1].tolist(),
                False,
            ),
            ({"mha_one_shot": True}, both, True),
        ]
        for changes, counts, is_causal in ways:
            vars(batch).update({"mha_return_lse": False, "attn_attend_prefix_cache": False} | changes)
            if "mha_one_shot" in changes:
                backend.init_forward_metadata(batch)  # SGLang chooses one way for a step
            extra = padding if is_causal else 0
            k = scene.draw(sum(counts) + extra, HEADS, NOPE + 24)
            v = scene.draw(sum(counts) + extra, HEADS, 24 + DIM_V)[..., 24:]  # a view, as SGLang hands it over
            for _ in range(2):  # layers
                found = backend.forward(q, k, v, scene.expanded, batch, save_kv_cache=False)
            tensors = zip(q[: sum(new)].split(new), *(x[: sum(counts)].split(counts) for x in (k, v)), strict=True)
            states = [attention(*(x.cpu() for x in mine), Options(SCALE, causal=is_causal)) for mine in tensors]
            out, lse = found if changes.get("mha_return_lse") else (found.view(-1, HEADS, DIM_V), None)
            close(out[: sum(new)], torch.cat([state.out for state in states]))
            assert not out[sum(new) :].any()
            if lse is not None:
                expected = torch.cat([state.lse for state in states]) * math.log(2)
                torch.testing.assert_close(lse[: sum(new)].cpu().double(), expected, rtol=1e-3, atol=1e-3)


def test_sglang_asks_by_our_name() -> None:
    scene = LatentScene([1], [5], "cpu")
    scene.backend()
    names = fake_sglang.sys.modules["sglang.srt.models.deepseek_common.utils"].FORWARD_ABSORB_CORE_ATTENTION_BACKENDS
    assert names == ["flashpage"]
    way = fake_sglang.AttentionBackendRegistry.known["flashpage"]
    assert way(None, None) == ("fa3" if torch.cuda.is_available() else "triton")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"index_topk": 2048}, "DeepSeek sparse attention"),
        ({"speculative_eagle_topk": 4}, "drafts no trees for models with multi-head latent attention"),
        ({"kv_type": torch.float8_e5m2}, "Choose another --attention-backend"),
    ],
)
def test_what_cannot_be_served(changes: dict[str, Any], reason: str) -> None:
    scene = LatentScene([1], [5], "cpu", kv_type=changes.get("kv_type"))
    runner = scene.runner()
    vars(runner.server_args).update(changes)
    vars(runner.model_config.hf_text_config).update(changes)
    from flashpage.engines.sglang.backends import backend_of

    with pytest.raises(ValueError, match=reason):
        backend_of(runner)
