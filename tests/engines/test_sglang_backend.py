"""SGLang's backend class without SGLang: each mode of a step against the exact results."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_sglang import ForwardMode
from sglang_requests import close
from sglang_step import Form, Scene

from flashpage.engines.plugin.group_plans import Use
from flashpage.engines.sglang import hooks

pytestmark = pytest.mark.usefixtures("quick_kernels")

DECODE = ([1, 1, 1, 1], [5, 64, 130, 33])
MIXED = ([1, 1, 7, 40], [50, 9, 7, 90])  # two decodes, a whole prompt, a later chunk of one
GUESSES = ([4, 4, 4], [50, 9, 70])
STEPS = {
    ForwardMode.DECODE: DECODE,
    ForwardMode.MIXED: MIXED,
    ForwardMode.TARGET_VERIFY: GUESSES,
    ForwardMode.DRAFT_EXTEND_V2: GUESSES,
    ForwardMode.DLLM_EXTEND: GUESSES,
}
FORMS = {
    "usual": Form(),
    "pages of 16": Form(page=16),
    "head_dim 80": Form(heads=(6, 2, 80)),
    "window": Form(window=20, soft_cap=2.0),
    "window in its own pool": Form(window=20, window_pool=True),
    "window in its own pool, pages of 8": Form(window=20, window_pool=True, page=8),
    "chunks": Form(chunk=24),
    "chunks in the pool of windows, pages of 16": Form(chunk=24, window_pool=True, page=16),
    "sinks and e4m3": Form(sinks=True, kv_type=torch.float8_e4m3fn),
    "after an encoder": Form(encoder=True),
    "after an encoder, pages of 16": Form(encoder=True, page=16),
    "of an encoder's tokens": Form(encoder=True, is_cross=True),
    "of an encoder's tokens, pages of 16": Form(encoder=True, is_cross=True, page=16),
    "both sides": Form(is_encoder_only=True),
}


def captured(backend: Any, batch: Any) -> None:
    """The calls of SGLang's runner of graphs for a step that is captured."""
    backend.init_cuda_graph_state(batch.batch_size, len(batch.positions))
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    backend.init_forward_metadata_in_graph(batch)


@pytest.mark.parametrize("name", FORMS)
def test_each_form_in_each_mode(name: str, device: str) -> None:
    for mode, lens in STEPS.items():
        scene = Scene(FORMS[name], *lens, device)
        backend, batch = scene.backend(), scene.batch(mode)
        backend.init_forward_metadata(batch)
        close(scene.run(backend, batch), scene.expected())
        if mode is not ForwardMode.MIXED:
            captured(backend, batch)
            close(scene.run(backend, batch), scene.expected())
        # Runs have the options that were planned; others would be planned for each step too.
        assert all(len(attention.session.active) == 1 for _, attention in attentions(backend))


def attentions(backend: Any) -> list[tuple[Use, Any]]:
    """The plans that steps made, eager or captured."""
    plans = {id(plans): plans for one in backend._planners.values() for plans in (one._eager, one._captured)}
    return [(use, found) for each in plans.values() for use, of in each._attentions.items() for found in of.values()]


def uses(backend: Any) -> set[Use]:
    return {use for use, _ in attentions(backend)}


@pytest.mark.parametrize(
    ("mode", "eager", "in_graph"),
    [
        (ForwardMode.DECODE, Use.DECODE, Use.DECODE_IN_GRAPH),
        (ForwardMode.EXTEND, Use.ROWS, None),
        (ForwardMode.TARGET_VERIFY, Use.ROWS, Use.ROWS_IN_GRAPH),
        (ForwardMode.DRAFT_EXTEND_V2, Use.ROWS, Use.ROWS_IN_GRAPH),
        (ForwardMode.DLLM_EXTEND, Use.ROWS, Use.ROWS_IN_GRAPH),
    ],
)
def test_plans_of_each_mode(mode: ForwardMode, eager: Use, in_graph: Use | None) -> None:
    """Prompts and blocks are planned on the host, and all else where the lengths are."""
    scene = Scene(Form(), *STEPS.get(mode, MIXED), "cpu")
    backend, batch = scene.backend(), scene.batch(mode)
    backend.init_forward_metadata(batch)
    assert uses(backend) == {eager}
    (attention,) = next(iter(backend._planners.values()))._eager.of(eager).values()
    assert (attention.session.batch.tables is None) == (mode in (ForwardMode.EXTEND, ForwardMode.DLLM_EXTEND))
    if in_graph is not None:
        captured(backend, batch)
        assert uses(backend) == {eager, in_graph}


def test_an_idle_step_plans_nothing() -> None:
    scene = Scene(Form(), *DECODE, "cpu")
    backend = scene.backend()
    assert not backend.needs_cpu_seq_lens
    batch = scene.batch(ForwardMode.IDLE)
    batch.seq_lens = batch.req_pool_indices = batch.seq_lens[:0]
    backend.init_forward_metadata(batch)
    out = backend.forward(torch.zeros(0, 256), None, None, scene.layer, batch)
    assert out.shape == (0, 256) and not uses(backend)


def test_rows_after_the_step_are_zero(device: str) -> None:
    """SGLang pads the rows of a step, for its collectives."""
    scene = Scene(Form(), *DECODE, device)
    backend, batch = scene.backend(), scene.batch(ForwardMode.DECODE)
    backend.init_forward_metadata(batch)
    scene.run(backend, batch)
    padded = torch.cat([scene.q, torch.full_like(scene.q[:2], float("nan"))])
    out = backend.forward(padded.flatten(1), None, None, scene.layer, batch)
    close(out[:4].view(4, 4, 64), scene.expected())
    assert not out[4:].any()


def test_requests_that_pad_a_captured_step(device: str) -> None:
    """SGLang fills a captured batch with requests of row 0, which have the length that the backend names."""
    modes = ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2  # rows of a draft are more than that length
    for mode, lens in ((ForwardMode.DECODE, DECODE), *((mode, GUESSES) for mode in modes)):
        scene = Scene(Form(), *lens, device)
        backend, batch = scene.backend(), scene.batch(mode)
        scene.pool.kv[0][:, 0] = 0
        rows = len(batch.positions)
        each = rows // batch.batch_size
        fill = backend.get_cuda_graph_seq_len_fill_value()
        batch.seq_lens = torch.cat([batch.seq_lens, batch.seq_lens.new_full((2,), fill)])
        batch.req_pool_indices = torch.cat([batch.req_pool_indices, batch.req_pool_indices.new_zeros(2)])
        batch.positions = batch.positions.new_zeros(rows + 2 * each)
        batch.batch_size += 2
        scene.q = torch.cat([scene.q, scene.q[: 2 * each]])
        captured(backend, batch)
        found = scene.run(backend, batch)
        assert len(found) == rows + 2 * each and not found.isnan().any()
        scene.q = scene.q[:rows]
        close(found[:rows], scene.expected())


@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.parametrize(
    "form",
    [Form(), Form(page=16, window=30), Form(page=8, window=30, window_pool=True), Form(page=16, sinks=True)],
    ids=repr,
)
def test_trees_of_guesses(form: Form, is_captured: bool, device: str) -> None:
    """Each guess sees its ancestors; a second step has another tree."""
    given = (("speculative_eagle_topk", 2), ("speculative_num_draft_tokens", 4))
    scene = Scene(Form(**{**vars(form), "server": given}), *GUESSES, device)
    backend = scene.backend()
    for parents in ([[-1, 0, 0, 1], [-1, 0, 1, 0], [-1, 0, 0, 0]], [[-1, 0, 1, 2], [-1, 0, 0, 0], [-1, 0, 0, 2]]):
        masks = []
        for tree, tokens in zip(parents, scene.kv_lens, strict=True):
            seen = torch.ones(4, tokens, dtype=torch.bool)
            seen[:, tokens - 4 :] = torch.eye(4, dtype=torch.bool)
            for guess, parent in enumerate(tree):
                if parent >= 0:
                    seen[guess] |= seen[parent]
            masks.append(seen)
        batch = scene.batch(ForwardMode.TARGET_VERIFY, torch.cat([mask.flatten() for mask in masks]).to(device))
        if is_captured:
            captured(backend, batch)
        else:
            backend.init_forward_metadata(batch)
        close(scene.run(backend, batch), scene.expected(masks))
        assert uses(backend) == {Use.MASKED_IN_GRAPH if is_captured else Use.MASKED}


@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.parametrize("form", [Form(), Form(window=40), Form(window=2), Form(window=40, window_pool=True)], ids=repr)
@pytest.mark.parametrize(("topk", "page"), [(1, 1), (3, 1), (3, 8)])
def test_steps_of_a_draft(topk: int, page: int, form: Form, is_captured: bool, device: str) -> None:
    """All steps are planned before the first; a branch's guesses have slots of their own after the known tokens."""
    from flashpage.engines.sglang.drafts import FlashpageDraftSteps

    steps, known = 4, [50, 9, 70]
    total = steps - 1
    # One line of guesses for each branch: the scene's tokens after the known ones. Pages of a branch begin with a copy
    # of the known tokens of the last page.
    strides = [steps if page == 1 else -(-(n % page + steps) // page) * page for n in known]
    assert page == 1 or len(set(strides)) == 2
    news = [topk * stride for stride in strides]
    form = dataclasses.replace(form, page=page)
    scene = Scene(form, news, [n + new for n, new in zip(known, news, strict=True)], device)
    for i, n in enumerate(scene.kv_lens):
        scene._write(i, 0, n)
    draft = FlashpageDraftSteps(scene.runner(), topk, steps)
    batch = scene.batch(ForwardMode.DECODE)
    batch.seq_lens = torch.tensor(known, device=device)
    if is_captured:
        draft.init_cuda_graph_state(3, 3 * topk)
        draft.init_forward_metadata_out_graph(batch, in_capture=True)
        draft.init_forward_metadata_in_graph(batch)
    else:
        draft.init_forward_metadata(batch)
    assert len(draft.attn_backends) == total
    q = scene.q[: 3 * topk]
    for step, backend in enumerate(draft.attn_backends):
        found = backend.forward(q.flatten(1), None, None, scene.layer, batch).view(3 * topk, 4, 64)
        masks, rows = [], []
        for i, n in enumerate(scene.kv_lens):
            seen = torch.zeros(topk, n, dtype=torch.bool)
            hidden = 0 if form.window is None else max(0, known[i] + step + 1 - form.window)
            seen[:, hidden : known[i]] = True
            for branch in range(topk):
                first = known[i] + branch * strides[i]
                seen[branch, first + max(0, hidden - known[i]) : first + step + 1] = True
            masks.append(seen)
            rows.append(q[i * topk : (i + 1) * topk])
        plain = dataclasses.replace(form, is_encoder_only=True, window=None)
        expected = Scene(plain, [topk] * 3, scene.kv_lens, device)
        expected.pool, expected.slots, expected.requests, expected.q = scene.pool, scene.slots, scene.requests, q
        close(found, expected.expected(masks))
        assert all(len(attention.session.active) == 1 for _, attention in attentions(backend))


def test_deterministic_mode_does_not_depend_on_the_batch(device: str) -> None:
    form = Form(server=(("enable_deterministic_inference", True),))
    for mode, lens in ((ForwardMode.DECODE, DECODE), (ForwardMode.MIXED, MIXED)):
        scene = Scene(form, *lens, device)
        backend, batch = scene.backend(), scene.batch(mode)
        backend.init_forward_metadata(batch)
        together = scene.run(backend, batch)
        rows, alone = scene.q_lens[-1], scene.last_request(batch)
        backend.init_forward_metadata(alone)
        found = backend.forward(scene.q[-rows:].flatten(1), None, None, scene.layer, alone)
        assert torch.equal(found.view(rows, 4, 64), together[-rows:])
        assert all(attention.options.fixed_piece_tokens == 4096 for _, attention in attentions(backend))


def test_slots_of_windows_are_those_of_the_step(device: str) -> None:
    """SGLang may write a step's slots into the tensor of the step before."""
    scene = Scene(Form(window=20, window_pool=True), *DECODE, device)
    backend, batch = scene.backend(), scene.batch(ForwardMode.DECODE)
    for moved in (0, 1):
        batch.out_cache_loc.copy_(batch.out_cache_loc.roll(moved))
        backend.init_forward_metadata(batch)
        scene.run(backend, batch)
        keys = torch.cat([kv[0, -1:] for kv in scene.kv])
        places = scene.pool.translate_loc_from_full_to_swa(batch.out_cache_loc)
        assert torch.equal(scene.pool.kv[1][0][places], keys)


# ---------------------------------------------------------------- hooks and entry point


def test_a_draft_has_our_name_too() -> None:
    """SGLang's factory has a map of names for drafts of several steps, and one for their first step."""
    runner = Scene(Form(), *DECODE, "cpu").runner()
    factory = SimpleNamespace(
        _create_triton_decode_backend=object(), draft_model_runner=runner, topk=1, speculative_num_steps=3
    )

    def plain(factory: Any, name: str, backend_map: dict[str, Any], error_template: str) -> Any:
        return backend_map["flashpage"]()

    def stamped(factory: Any, name: str, backend_map: Any, error_template: str, stamps_children: bool = False) -> Any:
        return backend_map["flashpage"]()

    steps, first = factory._create_triton_decode_backend, object()
    found = hooks._create_draft_backend(plain, factory, "decode", {"triton": steps}, "")
    assert len(found.attn_backends) == 2
    found = hooks._create_draft_backend(plain, factory, "prefill", {"triton": first}, "")
    assert type(found).__name__ == "FlashpageBackend"
    name, found = hooks._create_draft_backend(stamped, factory, "decode", {"triton": steps}, "", stamps_children=True)
    assert name == "flashpage" and len(found.attn_backends) == 2


def test_the_entry_point_imports_little() -> None:
    """SGLang calls it in each process, also where no model runs."""
    code = "import sys, flashpage.engines.sglang; assert not {'torch', 'numpy', 'sglang'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)


# ---------------------------------------------------------------- captured


@pytest.mark.cuda
@pytest.mark.parametrize("form", [Form(), Form(page=16), Form(window=20, window_pool=True, page=8)])
@pytest.mark.parametrize("mode", [mode for mode in STEPS if mode is not ForwardMode.MIXED])
def test_a_replay_plans_for_the_lengths_of_its_time(mode: ForwardMode, form: Form) -> None:
    scene = Scene(form, *STEPS[mode], "cuda:0")
    backend, batch = scene.backend(), scene.batch(mode)
    backend.init_cuda_graph_state(batch.batch_size, len(batch.positions))
    lens_then = batch.seq_lens.clone()
    batch.seq_lens.fill_(1)  # as SGLang captures
    backend.init_forward_metadata_out_graph(batch, in_capture=True)

    def step() -> torch.Tensor:
        backend.init_forward_metadata_in_graph(batch)
        return scene.run(backend, batch)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())  # the lengths were written there
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    batch.seq_lens.copy_(lens_then)
    backend.init_forward_metadata_out_graph(batch)
    graph.replay()
    close(out, scene.expected())


@pytest.mark.cuda
@pytest.mark.parametrize("mode", [*STEPS])
def test_no_step_waits_for_the_card(mode: ForwardMode) -> None:
    scene = Scene(Form(), *STEPS[mode], "cuda:0")
    backend, batch = scene.backend(), scene.batch(mode)
    backend.init_forward_metadata(batch)
    scene.run(backend, batch)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        backend.init_forward_metadata(batch)
        found = scene.run(backend, batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    close(found, scene.expected())
