"""The plans of vLLM's steps, without vLLM: every way to plan a step, against the exact results."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from vllm_step import Form, Scene, close, run

from flashpage import jit
from flashpage.base.dtypes import DType
from flashpage.base.errors import KernelMissingError
from flashpage.engines.plugin.group_plans import Use
from flashpage.engines.plugin.parts import PagedRows, RaggedRows
from flashpage.engines.plugin.versions import TESTED, warn_if_untested
from flashpage.engines.vllm.plugin import cascade
from flashpage.engines.vllm.plugin.planner import GroupPlanner
from flashpage.jit import loader
from flashpage.kernels import devices
from flashpage.kernels.spec import KernelSpec
from flashpage.plan.option_plan import OptionPlan

pytestmark = pytest.mark.usefixtures("quick_kernels")

DECODE = ([1, 1, 1, 1], [5, 64, 130, 33])
MIXED = ([1, 1, 7, 40], [50, 9, 7, 90])  # two decodes, a whole prompt, a later chunk of one
VERIFY = ([3, 3, 2], [50, 9, 70])

FORMS = {
    "usual": Form(),
    "heads before tokens": Form(layout="HND"),
    "pages of one token": Form(page=1),
    "pages of 24 tokens": Form(page=24, layout="HND"),
    "head_dim 80": Form(heads=(6, 2, 80)),
    "float16, one KV head": Form(heads=(8, 1, 128), dtype=torch.float16),
    "window": Form(window=20),
    "soft cap": Form(soft_cap=2.0, scale=1.0),
    "sinks": Form(sinks=True),
    "slopes of the second of two ranks": Form(slopes=(0.5**5, 0.5**6, 0.5**7, 0.5**8)),
    "all at once": Form(window=33, soft_cap=5.0, sinks=True, slopes=(0.1, 0.2, 0.05, 0.3), layout="HND"),
    "e4m3": Form(kv_type="fp8"),
    "e5m2 with a window": Form(kv_type="fp8_e5m2", window=20),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("lens", [DECODE, MIXED], ids=["decode", "mixed"])
def test_each_form(name: str, lens: tuple[list[int], list[int]], device: str) -> None:
    scene = Scene(FORMS[name], *lens, device)
    planner = scene.planner()
    for _ in range(2):  # the second time with known kernels
        found = run(planner.plan(scene.common()), planner.plans.layers[0], scene.tensors())
        close(found, scene.expected())


def test_a_step_whose_lengths_lie_where_the_last_ones_did(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernels are chosen again, and results are those of the lengths that are there then."""
    scene, other = Scene(FORMS["usual"], *DECODE, device), Scene(FORMS["usual"], [1] * 4, [64, 2, 33, 130], device)
    planner, common, chosen, choose = scene.planner(), scene.common(), [], OptionPlan.prepare_on_device
    monkeypatch.setattr(OptionPlan, "prepare_on_device", lambda *given: (chosen.append(0), choose(*given)))
    for now in (scene, other, other, scene):
        common.seq_lens.copy_(torch.tensor(now.kv_lens, dtype=torch.int32))
        common.block_table_tensor.copy_(now.table)
        close(run(planner.plan(common), planner.plans.layers[0], now.tensors()), now.expected())
    common.seq_lens = common.seq_lens.clone()
    assert planner.plan(common).parts and len(chosen) == 2  # lengths elsewhere


def test_lengths_on_the_host_are_the_steps_own(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.26 makes steps of cross attention from the decoder's, and leaves its bound of the lengths."""
    scene = Scene(FORMS["usual"], [4, 4], [60, 150], device)
    planner, common = scene.planner(), scene.common(causal=False)
    common._seq_lens_cpu = common.seq_lens_cpu_upper_bound
    common.seq_lens_cpu_upper_bound = torch.tensor([4, 4], dtype=torch.int32)
    monkeypatch.setattr(planner, "device", torch.device("cuda"))
    found = run(planner.plan(common), planner.plans.layers[0], scene.tensors())
    assert uses(planner) == {Use.ROWS}
    close(found, scene.expected(causal=False))


def uses(planner: GroupPlanner) -> set[Use]:
    return set(planner.plans._attentions)


@pytest.mark.parametrize(
    ("lens", "sizes", "expected"),
    [
        (DECODE, {}, {Use.DECODE}),
        (DECODE, {"graph_requests": 8}, {Use.DECODE_IN_GRAPH}),
        (DECODE, {"graph_requests": 3}, {Use.DECODE}),
        (MIXED, {}, {Use.ROWS}),
        (MIXED, {"graph_requests": 8}, {Use.ROWS}),
        (MIXED, {"has_exact_lengths": False}, {Use.DECODE, Use.ROWS}),
        (MIXED, {"graph_rows": 64, "captures_all": True}, {Use.ROWS_IN_GRAPH}),
        (DECODE, {"graph_requests": 8, "graph_rows": 64, "captures_all": True}, {Use.ROWS_IN_GRAPH}),
        (VERIFY, {"few_rows": 3, "has_exact_lengths": False}, {Use.FEW_ROWS}),
        (VERIFY, {"few_rows": 3, "has_exact_lengths": False, "graph_rows": 64}, {Use.ROWS_IN_GRAPH}),
        (DECODE, {"few_rows": 3, "has_exact_lengths": False, "graph_rows": 64}, {Use.ROWS_IN_GRAPH}),
        (([3, 2, 30], [50, 9, 70]), {"few_rows": 3, "has_exact_lengths": False, "graph_rows": 64}, None),
        (MIXED, {"split_tokens": 32}, {Use.ROWS}),
        (DECODE, {"split_tokens": 32}, {Use.DECODE}),
        (([1, 0, 1], [17, 20, 9]), {"graph_requests": 8}, {Use.ROWS}),
        (([0, 1, 1], [17, 20, 9]), {"has_exact_lengths": False}, {Use.FEW_ROWS}),
    ],
)
def test_each_way(lens: Any, sizes: dict[str, Any], expected: set[Use] | None, device: str) -> None:
    """The way that a step is planned depends on its rows and on what vLLM captures; the results do not."""
    scene = Scene(Form(window=40), *lens, device)
    planner = scene.planner(**sizes)
    found = run(planner.plan(scene.common()), planner.plans.layers[0], scene.tensors())
    close(found, scene.expected())
    assert uses(planner) == (expected or {Use.FEW_ROWS, Use.ROWS})


def test_layers_that_differ(device: str) -> None:
    """Layers of one group with other windows, scales and caps share the group's plans; other slopes have their own."""
    forms = [Form(), Form(window=17), Form(scale=0.1, soft_cap=3.0), Form(slopes=(0.1, 0.2, 0.05, 0.3))]
    layers = [form.layer() for form in forms]
    for lens, sizes in ((MIXED, {}), (DECODE, {}), (DECODE, {"graph_requests": 8})):
        scene = Scene(forms[0], *lens, device)
        planner = scene.planner(layers, **sizes)
        step = planner.plan(scene.common())
        for form, layer in zip(forms, layers, strict=True):
            scene.form = form
            close(run(step, layer, scene.tensors()), scene.expected())


def test_captured_plans_know_all_layers(device: str) -> None:
    """A capture must meet no options that were never planned, and no step plans options that no layer has."""
    layers = [Form().layer(), Form(window=17).layer(), Form(soft_cap=3.0).layer()]
    scene = Scene(Form(), *DECODE, device)
    planner = scene.planner(layers, graph_requests=8)
    planner.plan(scene.common())
    (attention,) = planner.plans.of(Use.DECODE_IN_GRAPH).values()
    assert len(attention.session.active) == 3
    step = planner.plan(scene.common())
    for layer in layers:
        run(step, layer, scene.tensors())
    assert len(attention.session.active) == 3


@pytest.mark.parametrize("lens", [DECODE, MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize("has_exact_lengths", [False, True])
def test_one_kind_of_layer_has_one_plan(lens: Any, has_exact_lengths: bool) -> None:
    """Runs have the options that were planned; others would be planned for each step too."""
    scene = Scene(Form(window=17, soft_cap=3.0), *lens, "cpu")
    planner = scene.planner(has_exact_lengths=has_exact_lengths)
    run(planner.plan(scene.common()), planner.plans.layers[0], scene.tensors())
    plans = [attention for use in uses(planner) for attention in planner.plans.of(use).values()]
    assert [len(attention.session.active) for attention in plans] == [1] * len(plans)


def test_padded_requests(device: str) -> None:
    """vLLM pads a captured batch with requests of no tokens; their rows are 0, and nothing else is read."""
    scene = Scene(Form(sinks=True), *DECODE, device)
    common = scene.common()
    lens = torch.zeros(6, dtype=torch.int32, device=device)
    lens[:4] = common.seq_lens
    table = torch.full((6, common.block_table_tensor.shape[1]), 2**30, dtype=torch.int32, device=device)
    table[:4] = common.block_table_tensor
    common.seq_lens, common.block_table_tensor, common.num_reqs, common.num_actual_tokens = lens, table, 6, 6
    planner = scene.planner(graph_requests=8)
    tensors = scene.tensors()
    step = planner.plan(common)
    for part in step.parts:
        part.run(planner.plans.layers[0], tensors)
    close(tensors.output[:4], scene.expected())
    assert bool((tensors.output[4:6] == 0).all())


def test_plans_again_from_new_lengths(device: str) -> None:
    """A drafter's next step: longer by one token, in the same tensors."""
    scene = Scene(Form(), *DECODE, device)
    planner = scene.planner(graph_requests=8)
    common = scene.common()
    common.seq_lens -= 1
    step = planner.plan(common)
    assert step.plan_again is not None
    common.seq_lens += 1
    step.plan_again()
    close(run(step, planner.plans.layers[0], scene.tensors()), scene.expected())


# ---------------------------------------------------------------- encoders


@pytest.mark.parametrize(
    "form", [Form(), Form(window=6), Form(slopes=(0.5, 0.25, 0.1, 0.05)), Form(window=4, slopes=(0.5, 0.25, 0.1, 0.05))]
)
def test_encoder(form: Form, device: str) -> None:
    """Rows over the K and V of their own step; windows and slopes count to both sides."""
    from dataclasses import replace

    lens = [5, 40, 1]
    scene = Scene(replace(form, is_encoder=True), lens, lens, device)
    planner = scene.planner()
    step = planner.plan(scene.common(causal=False))
    assert isinstance(step.parts[0], RaggedRows)
    close(run(step, planner.plans.layers[0], scene.tensors()._replace(cache=None)), scene.expected(causal=False))


# ---------------------------------------------------------------- a prefix that all requests share


def share_prefix(scene: Scene, pages: int) -> int:
    """Gives all requests the first one's first pages; returns the shared tokens."""
    tokens = pages * scene.form.page
    for i, kv in enumerate(scene.kv):
        scene.table[i, :pages] = scene.table[0, :pages]
        kv[:, :tokens] = scene.kv[0][:, :tokens]
    scene.cache = scene._written()
    return tokens


@pytest.mark.parametrize("q_lens", [[1, 1, 1], [1, 20, 3]])
def test_cascade(q_lens: list[int], device: str) -> None:
    scene = Scene(Form(sinks=True, soft_cap=4.0), q_lens, [70, 90, 49], device)
    tokens = share_prefix(scene, 2)
    planner = scene.planner()
    step = planner.plan(scene.common(), tokens)
    assert isinstance(step.parts[0], cascade.SharedPrefix)
    close(run(step, planner.plans.layers[0], scene.tensors()), scene.expected())


def test_cascade_heuristic() -> None:
    """Answers equal to those of vLLM (v1/attention/backends/flash_attn.py of 0.26)."""
    ones = torch.ones(64, dtype=torch.int32).numpy()
    rows = torch.full((8,), 5).numpy()
    for prefix, lens, heads, kv_heads, window, expected in (
        (255, ones, 32, 8, False, False),
        (4096, ones[:7], 32, 8, False, False),
        (4096, ones, 32, 8, True, False),
        (4096, rows, 32, 8, False, True),
        (4096, ones, 8, 8, False, True),
        (4096, ones, 32, 8, False, True),
        (256, ones[:8], 32, 8, False, False),
    ):
        assert cascade.is_worth(prefix, lens, heads, kv_heads, window, 132) is expected, (prefix, len(lens))


# ---------------------------------------------------------------- graphs


@pytest.mark.cuda
@pytest.mark.parametrize("lens", [DECODE, MIXED], ids=["decode", "any rows"])
def test_replays_serve_later_steps(lens: Any) -> None:
    """Captured for other lengths, planned outside of the graph, replayed: as vLLM does with full graphs."""
    scene = Scene(Form(window=40, sinks=True), *lens, "cuda:0")
    sizes = {"graph_requests": 8} if lens is DECODE else {"graph_rows": 64, "captures_all": True}
    planner, common, tensors = scene.planner(**sizes), scene.common(), scene.tensors()
    lens_then = common.seq_lens.clone()
    common.seq_lens.copy_(common.query_start_loc.diff())  # as short as can be
    side, step, layer = torch.cuda.Stream(), planner.plan(common), planner.plans.layers[0]
    side.wait_stream(torch.cuda.current_stream())  # the plan was made there
    with torch.cuda.stream(side):
        run(step, layer, tensors)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for part in step.parts:
            part.run(layer, tensors)
    common.seq_lens.copy_(lens_then)
    planner.plan(common)
    graph.replay()
    close(tensors.output[: scene.rows], scene.expected())


@pytest.mark.cuda
def test_a_graph_that_plans_again() -> None:
    """A drafter captures plan and run; each replay reads the lengths of its time."""
    scene = Scene(Form(), *DECODE, "cuda:0")
    planner, common, tensors = scene.planner(graph_requests=8), scene.common(), scene.tensors()
    common.seq_lens -= 1
    step, layer = planner.plan(common), planner.plans.layers[0]
    run(step, layer, tensors)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        common.seq_lens += 1
        step.plan_again()
        for part in step.parts:
            part.run(layer, tensors)
    graph.replay()
    close(tensors.output[: scene.rows], scene.expected())


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("lens", "sizes"),
    [
        (DECODE, {}),
        (DECODE, {"graph_requests": 8}),
        (MIXED, {}),
        (MIXED, {"has_exact_lengths": False}),
        (VERIFY, {"few_rows": 3, "has_exact_lengths": False, "graph_rows": 64}),
    ],
)
def test_no_step_waits_for_the_card(lens: Any, sizes: dict[str, Any]) -> None:
    scene = Scene(Form(), *lens, "cuda:0")
    planner, common, tensors = scene.planner(**sizes), scene.common(), scene.tensors()
    run(planner.plan(common), planner.plans.layers[0], tensors)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step = planner.plan(common)
        for part in step.parts:
            part.run(planner.plans.layers[0], tensors)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(isinstance(part, PagedRows) for part in step.parts)
    close(tensors.output[: scene.rows], scene.expected())


def test_versions_outside_of_the_table() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_untested("vllm", TESTED["vllm"][-1] + "+cpu")
        warn_if_untested("transformers", TESTED["transformers"][-1] + ".3")
    with pytest.warns(RuntimeWarning, match=r"vllm 0\.1\.0 is not among .*0\.33\.0"):
        warn_if_untested("vllm", "0.1.0")
    for engine, version in (("sglang", "0.5.24"), ("sglang", "0.5.23.post1"), ("vllm", "0.33.0.dev5")):
        with pytest.warns(RuntimeWarning, match=rf"{engine} {re.escape(version)} is not among"):
            warn_if_untested(engine, version)


def test_the_entry_point_imports_little() -> None:
    """vLLM calls it in each process, also where no model runs."""
    code = "import sys, flashpage.engines.vllm.plugin; assert not {'torch', 'numpy', 'vllm'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)


# ---------------------------------------------------------------- kernels


@pytest.mark.parametrize(
    "forms",
    [
        (Form(), Form(window=17), Form(soft_cap=3.0)),
        (Form(slopes=(0.1, 0.2, 0.05, 0.3), kv_type="fp8"),),
        (Form(heads=(6, 2, 80), soft_cap=2.0),),
        (Form(window=4, is_encoder=True),),
    ],
    ids=["layers that differ", "slopes and e4m3", "head_dim 80 and soft cap", "encoder"],
)
def test_no_request_waits_for_a_compiler(forms: tuple[Form, ...], device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All kernels of a group are there before its first step."""
    layers = [form.layer() for form in forms]
    lens = [([7, 40], [7, 40])] if forms[0].is_encoder else [DECODE, MIXED]
    scenes = [Scene(forms[0], *each, device) for each in lens]
    plans = scenes[0].plans(layers)
    monkeypatch.setattr(loader, "_kernels", {})
    GroupPlanner(plans).prebuild()

    def refuse(spec: Any, device: Any) -> None:
        raise AssertionError(f"{spec} is missing")

    monkeypatch.setattr(loader, "_resolve", refuse)
    for scene in scenes:
        for has_exact_lengths in (True, False):
            plans.sizes = scene.sizes(has_exact_lengths=has_exact_lengths)
            step = GroupPlanner(plans).plan(scene.common(causal=not forms[0].is_encoder))
            for layer in layers:
                run(step, layer, scene.tensors())


@pytest.mark.parametrize("kv_type", ["fp8", "auto"])
@pytest.mark.parametrize("page", [1, 16])
def test_kernels_of_copies_are_built_too(kv_type: str, page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Hopper prompts of many rows widen pages of fp8 first. Without a compiler plans do without these kernels."""
    plans = Scene(Form(kv_type=kv_type, page=page), *MIXED, "cpu").plans()
    plans.device = torch.device("cuda:0")
    monkeypatch.setattr(devices, "of", lambda _: devices.H200)
    requested: list[set[KernelSpec]] = []

    def prebuild(specs: Iterable[KernelSpec], device: Any) -> None:
        requested.append(set(specs))
        if len(requested) == 1:
            raise KernelMissingError

    monkeypatch.setattr(jit, "prebuild", prebuild)
    GroupPlanner(plans).prebuild()
    added = {(spec.kernel, spec.loader, spec.kv_dtype) for spec in requested[0] - requested[1]}
    assert requested[1] <= requested[0] and bool(added) is (kv_type == "fp8")
    if added:
        loader_of_wide = "boxes" if page == 16 else "rows"
        assert added == {("widen_pages", "", DType.FLOAT8_E4M3), ("prefill_sm90", loader_of_wide, DType.BFLOAT16)}
