"""Plans of layers whose rows of q read lists of tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashpage.engines.plugin.group_plans import Workspaces
from flashpage.engines.plugin.listed_plans import ListedPlans
from flashpage.wrappers.latent_sparse import BatchMLASparseAttentionWrapper

ARGUMENTS: dict[str, Any] = {
    "num_heads": 16,
    "head_dim_ckv": 512,
    "head_dim_kpe": 64,
    "page_size": 64,
    "sm_scale": 1.0,
    "q_data_type": torch.bfloat16,
}
LISTS = torch.full((600, 128), -1, dtype=torch.int32)


@pytest.fixture
def plans() -> ListedPlans:
    found = ListedPlans(ARGUMENTS, torch.device("cpu"), Workspaces())
    for rows in (1, 4, 8):
        found.keep(rows)
    return found


def test_only_plans_of_captured_steps_stay(plans: ListedPlans) -> None:
    for rows in (1, 4, 8, 5, 6, 7, 300):
        plans.plan(LISTS[:rows])
        assert plans.of(rows).run(query=torch.zeros(rows, 16, 576).bfloat16(), **_cache(rows)).shape[0] == rows
    assert plans.of(4) is not plans.of(8) and plans.of(7) is not plans.of(300)
    for rows in (5, 6):
        with pytest.raises(KeyError):
            plans.of(rows)


def test_a_step_may_be_captured_after_it_was_planned(plans: ListedPlans) -> None:
    plans.plan(LISTS[:5])
    plans.keep(5)
    plans.plan(LISTS[:5])
    captured = plans.of(5)
    for rows in (6, 7, 9, 5):
        plans.plan(LISTS[:rows])
    assert plans.of(5) is captured and plans.of(9) is not captured


@pytest.mark.parametrize("rows", [4, 5])
def test_a_failed_plan_is_made_again(rows: int, plans: ListedPlans, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr(BatchMLASparseAttentionWrapper, "plan", fail)
        plans.plan(LISTS[:rows])
    plans.plan(LISTS[:rows])
    assert not plans.of(rows).run(query=torch.ones(rows, 16, 576).bfloat16(), **_cache(rows)).any()


def _cache(rows: int) -> dict[str, torch.Tensor]:
    return {"kv_cache": torch.ones(4, 64, 576).bfloat16(), "indices": LISTS[:rows]}
