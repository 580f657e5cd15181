"""The engine serves a model with latent rows (MLA): its greedy tokens equal the model's own, in captured steps too."""

from __future__ import annotations

import math

import pytest
import torch
from engine_runs import LATENT, alone, check, check_idle, prompts, small_model

from flashpage import FlashpageError, PlanError
from flashpage.demo.latent_model import LatentModel
from flashpage.engine import Engine, EngineConfig, Request
from flashpage.integrations import AttentionLayer, ForwardBatch, ForwardMode, PagedAttention, RequestTable, TokenPool

LENS, NEW = [1, 15, 16, 17, 70, 33], [20, 9, 9, 1, 22, 24]
ENGINES = {
    "at once": EngineConfig(64, use_graphs=False),
    "chunks of 7 tokens, blocks of one": EngineConfig(400, block_size=1, max_step_tokens=7, use_graphs=False),
    "captured, in a small pool": EngineConfig(1 + 12, max_requests=6, max_step_tokens=40, use_graphs=True),
}


@pytest.fixture(scope="module")
def model(device: str) -> LatentModel:
    found = small_model(device, config=LATENT)
    assert isinstance(found, LatentModel)
    return found


@pytest.fixture(scope="module")
def expected(model: LatentModel) -> list[list[int]]:
    return [alone(model, prompt, new) for prompt, new in zip(prompts(LENS), NEW, strict=True)]


@pytest.mark.parametrize("name", ENGINES)
def test_tokens_are_those_of_the_model_alone(name: str, model: LatentModel, expected: list[list[int]]) -> None:
    assert len({token for tokens in expected for token in tokens}) > 50
    config = ENGINES[name]
    engine = Engine(model, config)
    assert engine.pool.kv(0).shape == (config.num_blocks, config.block_size, LATENT.head_dim)
    requests = [Request(prompt, new) for prompt, new in zip(prompts(LENS), NEW, strict=True)]
    engine.run(requests)
    if model.dtype is torch.float32:
        assert [request.generated for request in requests] == expected
    check(model, requests, least=sum(NEW))
    assert (engine.statistics.captured_steps > 0) == bool(config.use_graphs)
    check_idle(engine)


def numbers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_trees_of_guesses() -> None:
    """Guesses of a VERIFY step see their ancestors; rows that no guess sees are NaN."""
    torch.manual_seed(0)
    table, pool = RequestTable(1, 16), TokenPool(3, 8, 1, 1, 48, torch.float32, fill=math.nan, v_head_dim=32)
    layer = AttentionLayer(0, 4, 1, 48, sm_scale=0.2, v_head_dim=32)
    backend = PagedAttention(table, pool, [layer], torch.float32)
    row, slots = table.acquire(), torch.arange(8, 19, dtype=torch.int32)
    table.write(torch.full((11,), row), torch.arange(11), slots)
    rows, q = torch.randn(11, 1, 48), torch.randn(3, 4, 48)
    pool.write(0, slots[:8], rows[:8], None)
    seen = torch.ones(3, 11, dtype=torch.bool)
    seen[:, 8:] = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]])
    batch = ForwardBatch(
        ForwardMode.VERIFY, numbers(0, 0, 0), numbers(8, 9, 9), slots[8:], numbers(row), numbers(11), numbers(3),
        tree_mask=seen.flatten(),
    )  # fmt: skip
    backend.init_forward_metadata(batch)
    out = backend.forward(q, rows[8:], rows[8:, :, :32], layer, batch)
    scores = (torch.einsum("rhd,td->rht", q, rows[:, 0]) * 0.2).masked_fill(~seen[:, None], -math.inf)
    torch.testing.assert_close(out, scores.softmax(-1) @ rows[:, 0, :32], rtol=1e-5, atol=1e-5)


def test_refused() -> None:
    with pytest.raises(PlanError, match="num_kv_heads=2 with v_head_dim"):
        TokenPool(2, 16, 1, 2, 64, torch.float32, v_head_dim=32)
    pool, layer = TokenPool(2, 16, 1, 1, 64, torch.float32), AttentionLayer(0, 4, 1, 64, v_head_dim=32)
    with pytest.raises(FlashpageError, match="layer 0 has v_head_dim=32 but the pool was made without"):
        PagedAttention(RequestTable(1, 16), pool, [layer], torch.float32)
    pool = TokenPool(2, 16, 1, 1, 64, torch.float32, v_head_dim=32)
    with pytest.raises(FlashpageError, match="k"):
        pool.write(0, numbers(1), torch.zeros(1, 1, 48), None)
