"""Calls every public function with bad arguments (tests/support/bad_inputs). A call must not crash, hang or silently
give a wrong result; each row of the table says which outcome is right."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
from pathlib import Path
from typing import Any

import programs
import pytest
import torch
from bad_inputs.arguments import kind_of
from bad_inputs.rows import equal, good_arguments, judge, table
from bad_inputs.scene import Make, Scene, Step
from bad_inputs.scenes import scenes

from flashpage.wrappers.plan_arguments import Own

pytestmark = pytest.mark.usefixtures("quick_kernels")

SUPPORT = Path(__file__).resolve().parents[1] / "support"
FAMILIES = sorted({scene.family for scene in scenes().values()})

# Public names without rows, and why: other tests check their arguments, or users do not call them.
WITHOUT_ROWS = {
    "flashpage.compat": "takes names of modules alone",
    "flashpage.demo.model": "the model of the demo",
    "flashpage.engine": "takes its own objects; tests/serving checks them",
    "flashpage.hf": "called by transformers; tests/engines checks it",
    "flashpage.jit": "takes specs, manifests and folders; tests/jit checks them",
    "flashpage.torch_attention": "called by torch; tests/engines checks it",
    "flashpage.log": "takes a folder that the package wrote; tests/watch checks it",
    "flashpage.timeline": "takes wrappers, paths and the number of a run; tests/watch checks them",
    "flashpage.ops": "called by the wrappers, which check first",
    "Plan": "made by last_plan and plan_lengths",
    "flashpage.flash_mla:FlashMLASchedMeta": "a record that get_mla_metadata makes",
    "flashpage.flash_mla:get_mla_metadata": "takes no argument",
    "trtllm_prefill_with_kv_cache_mla": "trtllm_batch_decode_with_kv_cache_mla by another name",
    "MLAPlanMetadata": "a record of plan's arguments",
    "flashpage.integrations:PagedAttention": "takes its own objects; tests/serving checks them",
    "flashpage.integrations:AttentionBackend": "a protocol",
    "flashpage.integrations:AttentionLayer": "a record",
    "flashpage.integrations:DraftSteps": "takes its own objects; tests/serving checks them",
    "flashpage.integrations:ForwardBatch": "a record",
    "flashpage.integrations:ForwardMode": "an enum",
    "flashpage.integrations:GraphRunner": "takes its own objects; tests/serving checks them",
    "flashpage.integrations:KvPart": "an enum",
    "flashpage.parallel:HeadShare": "made by head_share",
    "flashpage.parallel:LocalPages": "made by ContextLayout.pages",
    "flashpage.variants:TracedVariant": "made by Variant",
    "flashpage.variants:builtin": "steps of Variant; tests/variants checks them",
    "flashpage.variants:compose": "steps of Variant; tests/variants checks them",
    "flashpage.variants:render": "steps of Variant; tests/variants checks them",
    "flashpage.utils:get_compute_capability": "needs a card",
    "flashpage.utils:get_device_sm_count": "needs a card",
    "single_prefill_with_kv_cache_with_jit_module": "takes a variant; tests/variants checks it",
    "single_decode_with_kv_cache_with_jit_module": "takes a variant; tests/variants checks it",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_bad_inputs(family: str, device: str) -> None:
    """Runs in child processes, so that a row that crashes does not stop the others."""
    result = programs.run(["-m", "bad_inputs.child", device, family], cwd=SUPPORT)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    print(f"{family} on {device}: {found['rows']} rows")
    wrong = "\n".join(f"{name}: {complaint}" for name, complaint in sorted(found["wrong"].items()))
    assert not wrong, f"{len(found['wrong'])} of {found['rows']} rows have another outcome than expected:\n{wrong}"


def test_there_are_enough_rows() -> None:
    names = [row.name for row in table("cpu")]
    assert len(names) >= 500
    assert len(set(names)) == len(names)


def test_every_argument_has_badness() -> None:
    """A new argument needs a kind in tests/support/bad_inputs/arguments.py."""

    def plan(indptr: Any, new_argument: int = 3) -> None: ...

    scene = scenes()["get_seq_lens"]
    with pytest.raises(
        LookupError, match=r"Wrapper\.plan: the argument 'new_argument' has no kind: add it to .*\.py, or"
    ):
        for parameter in inspect.signature(plan).parameters:
            kind_of("BatchDecodeWithPagedKVCacheWrapper.plan", parameter)
    arguments = {(row.scene.name, row.argument) for row in table("cpu")}
    assert all((scene.name, name) in arguments for name in ("kv_indptr", "kv_last_page_len", "page_size"))
    for name in Own._fields:
        assert ("BatchDecodeWithPagedKVCacheWrapper", name) in arguments


def test_every_public_function_has_rows() -> None:
    """A new function needs a scene in tests/support/bad_inputs/scenes, or a reason here."""
    covered = {key for scene in scenes().values() for step in scene.steps for key in _functions_of(scene, step)}
    names = (Path(__file__).parents[1] / "project" / "public_names.txt").read_text().split("# ")[1].splitlines()[1:]
    missing = []
    for line in names:
        module, _, name = line.partition(":")
        if module in WITHOUT_ROWS or line in WITHOUT_ROWS or name in WITHOUT_ROWS or _is_module(name):
            continue
        for function, label in _public(getattr(importlib.import_module(module), name), line):
            if _key(function) not in covered and not _takes_nothing(function):
                missing.append(label)
    assert not missing, missing


def _is_module(name: str) -> bool:
    return importlib.util.find_spec(f"flashpage.{name}") is not None


def _public(value: Any, line: str) -> list[tuple[Any, str]]:
    if inspect.isclass(value):
        if issubclass(value, Exception) or not hasattr(value, "__init__") or hasattr(value, "__members__"):
            return []
        methods = [name for name in dir(value) if not name.startswith("_") and inspect.isfunction(getattr(value, name))]
        return [(getattr(value, name), f"{line}.{name}") for name in methods]
    return [(value, line)] if callable(value) else []


def _key(function: Any) -> str:
    function = inspect.unwrap(getattr(function, "func", function))
    return f"{function.__module__}.{function.__qualname__}"


def _functions_of(scene: Scene, step: Step) -> list[str]:
    holder = scene.steps[0].function(None) if len(scene.steps) > 1 else None
    function = step.function(holder)
    return [_key(function)]


def _takes_nothing(function: Any) -> bool:
    """True if there is no argument to check: none but self, or `*args, **kwargs` alone, as refused names have them."""
    parameters = inspect.signature(function).parameters.values()
    return all(p.name == "self" or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)


def test_a_wrong_outcome_is_seen() -> None:
    """Tests the judge itself: a row with the opposite expectation fails."""
    make = Make("cpu")
    scene = scenes()["get_batch_indices_positions"]
    baseline = scene.run(good_arguments(scene, make))[1]
    rows = {row.name.split(".", 2)[2]: row for row in table("cpu") if row.scene is scene}
    good, bad = rows["batch_indices.good"], rows["append_indptr.type-list"]
    assert judge(good, make, baseline) is None and judge(bad, make, baseline) is None
    assert judge(bad, make, torch.zeros(1)) is None  # an error needs no result
    object.__setattr__(good, "expected", ("error", "append_indptr"))
    object.__setattr__(bad, "expected", ("works", ""))
    assert "no error, and" in str(judge(good, make, baseline)) and "must work" in str(judge(bad, make, baseline))
    object.__setattr__(good, "expected", ("works", ""))
    assert judge(good, make, [torch.zeros(3)]) == "a wrong result without an error"
    assert equal([torch.ones(2), 3], (torch.ones(2), 3)) and not equal(torch.ones(2), torch.ones(2).double())
