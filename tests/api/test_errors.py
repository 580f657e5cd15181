"""A table of bad input: each error names the argument, its value and the fix; the wrapper works afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from wrong_arguments import DIM, KINDS, KV_HEADS, META, PAGE, PAGES, TABLE, Bad, decode_plan, ints, workspace

import flashpage
from flashpage import CapabilityError, PlanError, RunError
from flashpage.wrappers import operators


@pytest.mark.parametrize("row", TABLE, ids=str)
def test_bad_argument_is_reported(row: Bad) -> None:
    name, plan_arguments, run_arguments = KINDS[row.kind]
    wrapper = getattr(flashpage, name)(workspace())
    planned, ran = plan_arguments(), run_arguments()
    (planned if row.where == "plan" else ran)[row.argument] = row.value
    with pytest.raises(row.error) as caught:
        wrapper.plan(**planned)
        wrapper.run(**ran)
    message = str(caught.value)
    for word in row.says:
        assert word in message, f"{word!r} is not in: {message}"
    assert message.rstrip().endswith(".") or row.error is CapabilityError, message
    # The wrapper still works after a refusal.
    wrapper.plan(**plan_arguments())
    assert bool(wrapper.run(**run_arguments()).isfinite().all())


def test_there_are_enough_rows() -> None:
    assert len(TABLE) >= 40
    assert len({str(row) for row in TABLE}) == len(TABLE)


_ONE, _MASK = ints(0, 1), torch.ones(1, 1, 1, dtype=torch.bool)
_OTHER_PLANS: list[tuple[str, tuple[Any, ...]]] = [  # plans that take head_dim, with 65
    ("BlockSparseAttentionWrapper", (_ONE, ints(0), 1, 1, 1, 1, 1, 1, 65)),
    ("VariableBlockSparseAttentionWrapper", (_MASK, ints(1)[None], ints(1)[None], 1, 1, 65)),
    ("PODWithPagedKVCacheWrapper", (_ONE, ints(0), ints(1), 1, 1, 65, 16)),
    ("BatchPODWithPagedKVCacheWrapper", (*(_ONE, _ONE, ints(0), ints(1)) * 2, 1, 1, 65, 16)),
    ("MultiLevelCascadeAttentionWrapper", ([_ONE], [_ONE], [ints(0)], [ints(1)], 1, 1, 65, 16)),
    ("BatchDecodeWithSharedPrefixPagedKVCacheWrapper", (_ONE, ints(0), ints(1), 1, 1, 65, 16)),
    ("BatchPrefillWithSharedPrefixPagedKVCacheWrapper", (_ONE, _ONE, ints(0), ints(1), 1, 1, 65, 16)),
]


@pytest.mark.parametrize(("name", "arguments"), _OTHER_PLANS, ids=[name for name, _ in _OTHER_PLANS])
def test_a_head_dim_of_no_kernel_has_the_callers_name(name: str, arguments: tuple[Any, ...]) -> None:
    levels = [1] if "Level" in name else []
    wrapper = getattr(flashpage, name)(*levels, workspace())
    with pytest.raises(CapabilityError, match="^head_dim=65 is not supported: pass a multiple of 8 from 16 to 512"):
        wrapper.plan(*arguments) if hasattr(wrapper, "plan") else wrapper.begin_forward(*arguments)


@pytest.mark.parametrize("kind", KINDS)
def test_run_without_a_plan(kind: str) -> None:
    name, plan_arguments, run_arguments = KINDS[kind]
    wrapper = getattr(flashpage, name)(workspace())
    with pytest.raises(RunError, match="has no plan"):
        wrapper.run(**run_arguments())
    with pytest.raises(RunError, match="has no plan"):
        _ = wrapper.last_plan
    wrapper.plan(**plan_arguments())
    wrapper.run(**run_arguments())
    broken = plan_arguments() | {"num_kv_heads": 3}
    with pytest.raises(PlanError):
        wrapper.plan(**broken)
    with pytest.raises(RunError, match="and again if it failed"):  # not the plan before
        wrapper.run(**run_arguments())


CONSTRUCTORS = [
    ({"float_workspace_buffer": None}, PlanError, "float_workspace_buffer=None"),
    ({"float_workspace_buffer": torch.empty(8, device=META)}, PlanError, "meta"),
    ({"float_workspace_buffer": workspace()[3:]}, PlanError, "16 bytes"),
    ({"float_workspace_buffer": workspace()[::2]}, PlanError, "contiguous"),
    ({"kv_layout": "NDH"}, PlanError, "'NDH'"),
    ({"backend": "trtllm-gen"}, CapabilityError, "'trtllm-gen'"),
    ({"backend": "cutlass"}, CapabilityError, "'cutlass'"),
    ({"jit_args": ["uri"]}, CapabilityError, "flashpage.Variant"),
    ({"use_cuda_graph": True}, PlanError, "paged_kv_indptr_buffer=None"),
]


@pytest.mark.parametrize(("changed", "error", "says"), CONSTRUCTORS)
def test_bad_constructor(changed: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        flashpage.BatchDecodeWithPagedKVCacheWrapper(**({"float_workspace_buffer": workspace()} | changed))


def test_graph_buffers_are_judged() -> None:
    given = {"float_workspace_buffer": workspace(), "use_cuda_graph": True}
    buffers = {"paged_kv_indptr_buffer": ints(0, 0, 0), "paged_kv_last_page_len_buffer": ints(0, 0)}
    make = flashpage.BatchDecodeWithPagedKVCacheWrapper
    with pytest.raises(PlanError, match="int32"):
        make(**given, **buffers, paged_kv_indices_buffer=torch.zeros(4, dtype=torch.int64))
    with pytest.raises(PlanError, match="3 requests"):
        short = buffers | {"paged_kv_last_page_len_buffer": ints(0, 0, 0)}
        make(**given, **short, paged_kv_indices_buffer=ints(0, 0, 0, 0))
    wrapper = make(**given, **buffers, paged_kv_indices_buffer=ints(0, 0))
    with pytest.raises(PlanError, match="indices has 3 entries but .* holds 2"):
        wrapper.plan(**decode_plan())
    with pytest.raises(PlanError, match="fix it at 2"):
        wrapper.plan(**(decode_plan() | {"indptr": ints(0, 1), "last_page_len": ints(3)}))


def test_indices_on_the_device_are_checked_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """With FLASHPAGE_CHECK_INDICES=on. On the CPU page numbers are always checked, so the switch itself is tested."""
    from flashpage import native
    from flashpage.plan.page_indices import KvIndices

    def checks_pages() -> bool:
        batch = native.BatchStruct()
        KvIndices(torch.device("cpu"), batch)
        return bool(batch.checks_pages)

    assert not checks_pages()
    monkeypatch.setenv("FLASHPAGE_CHECK_INDICES", "on")
    assert checks_pages()


def test_workspaces_too_small() -> None:
    plan_arguments = decode_plan() | {"indptr": ints(0, 400), "indices": torch.zeros(400, dtype=torch.int32)}
    plan_arguments["last_page_len"] = ints(16)
    wrapper = flashpage.BatchDecodeWithPagedKVCacheWrapper(workspace(64))
    needed = wrapper.workspace_size(**plan_arguments)
    with pytest.raises(PlanError, match=r"float_workspace_buffer has 64 bytes but this plan needs \d+"):
        wrapper.plan(**plan_arguments, fixed_split_size=16)
    wrapper.reset_workspace_buffer(workspace(), workspace(64))
    wrapper.plan(**plan_arguments)  # the int workspace grows by itself
    wrapper.reset_workspace_buffer(workspace(max(16, needed[0])), workspace(needed[1]))
    wrapper.plan(**plan_arguments)


SINGLE = (*(torch.zeros(2, 4, 64),) * 3, None, 1.0, None, None, None, None, False, "NHD", "NONE", False, None, -1)
SINGLE += (None, None, None, "auto", False, None, 2.0)  # scale_k=1 and k_scale=2


@pytest.mark.parametrize(
    ("function", "arguments", "says"),
    [
        ("merge_state", (torch.zeros(2, 4, 64), torch.zeros(2, 4), torch.zeros(2, 4, 32), torch.zeros(2, 4)), "v_b"),
        ("merge_state", (torch.zeros(2, 4, 64), torch.zeros(2, 3)) * 2, "s_a has shape (2, 3)"),
        ("merge_state", (torch.zeros(2, 4, 64).int(), torch.zeros(2, 4)) * 2, "v_a has dtype"),
        ("merge_state", (torch.zeros(2, 4, 64), torch.zeros(2, 4).half()) * 2, "float32"),
        ("merge_states", (torch.zeros(2, 4, 64), torch.zeros(2, 4)), "num_states"),
        ("merge_states", (torch.zeros(2, 0, 4, 64), torch.zeros(2, 0, 4)), "at least one state"),
        (
            "merge_state_in_place",
            (torch.zeros(2, 4, 64), torch.zeros(2, 4)) * 2 + (torch.ones(3, dtype=torch.bool),),
            "mask has shape (3,)",
        ),
        (
            "merge_state_in_place",
            (torch.zeros(4, 2, 64).transpose(0, 1), torch.zeros(2, 4), torch.zeros(2, 4, 64), torch.zeros(2, 4)),
            "v has strides",
        ),
        ("packbits", (torch.zeros(3),), "bool or uint8"),
        ("packbits", (torch.zeros(3, dtype=torch.bool), "middle"), "'middle'"),
        ("segment_packbits", (torch.zeros(3, dtype=torch.bool), ints(0, 5)), "3 values"),
        ("segment_packbits", (torch.zeros(3, dtype=torch.bool), torch.zeros(2)), "float32"),
        ("get_seq_lens", (ints(0, 2), ints(1, 2), 16), "kv_last_page_len has shape (2,)"),
        ("get_batch_indices_positions", (ints(0, 2), ints(1, 2), 2), "seq_lens has shape (2,)"),
        ("single_decode_with_kv_cache", (torch.zeros(1, 4, 64),) * 3, "one row"),
        ("single_prefill_with_kv_cache", (torch.zeros(4, 64),) * 3, "three dimensions"),
        ("single_prefill_with_kv_cache", SINGLE, "k_scale"),
        (
            "single_decode_with_kv_cache",
            (torch.zeros(8, 128), *(torch.zeros(3, 8, 64),) * 2),
            "q has 128 columns and k 64: pass equal",
        ),
        (
            "single_prefill_with_kv_cache",
            (torch.zeros(2, 8, 64), *(torch.zeros(3, 8, 128),) * 2),
            "q has 64 columns and k 128: pass equal",
        ),
    ],
)
def test_bad_function_argument(function: str, arguments: tuple[Any, ...], says: str) -> None:
    with pytest.raises((RunError, PlanError)) as caught:
        getattr(flashpage, function)(*arguments)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("argument", "value", "says"),
    [
        ("append_key", torch.zeros(2, 3, DIM), "append_key has shape (2, 3, 64)"),
        ("append_value", torch.zeros(2, KV_HEADS, DIM).half(), "append_value has shape"),
        ("batch_indices", ints(0, 2), "2 requests"),
        ("batch_indices", ints(0), "batch_indices has 1 entries"),
        ("positions", ints(0, 16), "16 of request 1"),
        ("positions", ints(-1, 0), "-1 of request 0"),
        ("kv_indices", ints(5, 2, 8), "8 pages"),
        ("kv_indices", torch.zeros(3), "float32"),
        ("kv_last_page_len", ints(1), "kv_last_page_len has 1"),
        ("kv_layout", "NDH", "'NDH'"),
    ],
)
def test_bad_append(argument: str, value: Any, says: str) -> None:
    new = torch.zeros(2, KV_HEADS, DIM)
    given = {"append_key": new, "append_value": new, "batch_indices": ints(0, 1), "positions": ints(17, 3)}
    given |= {"paged_kv_cache": torch.zeros(PAGES, 2, PAGE, KV_HEADS, DIM), "kv_indices": ints(5, 2, 7)}
    given |= {"kv_indptr": ints(0, 2, 3), "kv_last_page_len": ints(2, 4), "kv_layout": "NHD"}
    flashpage.append_paged_kv_cache(**given)
    with pytest.raises((RunError, PlanError)) as caught:
        flashpage.append_paged_kv_cache(**(given | {argument: value}))
    assert says in str(caught.value)


class Wrapped(torch.Tensor):
    """A tensor subclass without memory, such as a DTensor or the result of a functional all_gather."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        made: Wrapped = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{function} is not to be called")


@pytest.mark.parametrize("name", ["q", "paged_kv_cache", "out", "lse", "sinks", "k_scale"])
def test_a_tensor_without_memory_is_refused(name: str) -> None:
    """Its address is 0: a kernel would read from there, or take sinks and scales for absent."""
    _, plan_arguments, run_arguments = KINDS["decode"]
    wrapper, ran = flashpage.BatchDecodeWithPagedKVCacheWrapper(workspace()), run_arguments()
    wrapper.plan(**plan_arguments())
    rows, heads, _ = ran["q"].shape
    others = {"lse": torch.empty(rows, heads), "sinks": torch.zeros(heads), "k_scale": torch.ones(KV_HEADS)}
    given = ran | {"out": torch.empty_like(ran["q"]), "return_lse": True} | others
    wrapper.run(**given)
    with pytest.raises(RunError, match=f"{name} is a Wrapped, which has no memory of its own"):
        wrapper.run(**given | {name: Wrapped(given[name])})
    wrapper.run(**given)


def test_masks_and_states_without_memory_are_refused() -> None:
    wrapper = flashpage.BatchPrefillWithRaggedKVCacheWrapper(workspace())
    mask = Wrapped(torch.ones(64, dtype=torch.bool))
    with pytest.raises(PlanError, match="custom_mask is a Wrapped"):
        wrapper.plan(ints(0, 8), ints(0, 8), 1, 1, 64, custom_mask=mask)
    v, s = torch.zeros(2, 3, 64), torch.zeros(2, 3)
    with pytest.raises(RunError, match="v_a is a Wrapped"):
        operators.call("merge_state", Wrapped(v), s, v, s)


def test_errors_take_the_callers_names() -> None:
    """Whole words, longer names first; a name that has become part of another one is not replaced again."""
    error = RunError("q has 3 rows but paged_kv_cache's k needs q_scale: pass paged_kv_cache[0], k or max_q.")
    error.use_names({"q": "q_d", "k": "cache's k", "paged_kv_cache": "cache", "paged_kv_cache[0]": "K"})
    assert str(error) == "q_d has 3 rows but cache's k needs q_scale: pass K, cache's k or max_q."
