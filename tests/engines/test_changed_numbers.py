"""A step whose numbers changed in the tensors that the last step's plan was made from."""

from __future__ import annotations

import pytest
import torch
from vllm_step import Form, Scene, close, run

from flashpage import PlanError, RunError

pytestmark = pytest.mark.usefixtures("quick_kernels")


def test_numbers_that_change_where_they_lie_are_checked_again() -> None:
    """The CPU reads them: a refused step leaves no plan, right numbers plan again, and pages are checked again."""
    scene = Scene(Form(), [1] * 4, [5, 64, 130, 33], "cpu")
    planner, common = scene.planner(), scene.common()
    layer, tensors = planner.plans.layers[0], scene.tensors()
    step = planner.plan(common)
    run(step, layer, tensors)
    common.seq_lens[1] = 10000
    with pytest.raises(PlanError, match="seq_lens has 10000 for request 1"):
        planner.plan(common)
    with pytest.raises(RunError, match="has no plan"):
        run(step, layer, tensors)
    common.seq_lens[1] = 64
    with torch.inference_mode():
        planner.plan(common)
    close(run(planner.plan(common), layer, tensors), scene.expected())
    common.block_table_tensor[0, 0] = pages = len(tensors.cache[0])
    with pytest.raises(RunError, match=f"has {pages} pages but the plan's block_tables reach {pages}"):
        run(planner.plan(common), layer, tensors)
    common.seq_lens.zero_()
    run(planner.plan(common), layer, tensors)
