"""max_logits of flash_mla_sparse_fwd: its numbers, when they are computed, and inputs that were written before."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashpage import RunError
from flashpage.engines.flash_mla import largest
from flashpage.flash_mla import flash_mla_sparse_fwd

pytestmark = pytest.mark.usefixtures("quick_kernels")

ROWS, HEADS, CKV, KPE, TOKENS, TOPK, SCALE = 5, 6, 64, 32, 40, 12, 0.2
NEAR = {"atol": 1e-4, "rtol": 1e-4}
LENGTHS = (12, 7, 0, 12, 1)


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    dtype = torch.float32 if torch.get_default_device().type == "cpu" else torch.bfloat16
    torch.manual_seed(1)
    q, kv = torch.randn(ROWS, HEADS, CKV + KPE).to(dtype), torch.randn(TOKENS, 1, CKV + KPE).to(dtype)
    lists = torch.stack([torch.randperm(TOKENS - 2)[:TOPK] + 1 for _ in range(ROWS)]).int().unsqueeze(1)
    lists[0, 0, 3], lists[1, 0, 0], lists[3, 0] = -1, TOKENS + 5, -1
    kv[0] = kv[-1] = math.nan  # in no list
    return q, kv, lists, torch.tensor(LENGTHS).int()


def expected(q: Any, kv: Any, lists: Any, lengths: Any) -> torch.Tensor:
    found = torch.full((ROWS, HEADS), -math.inf, dtype=torch.float64)
    for row in range(ROWS):
        used = lists[row, 0, : lengths[row]].long()
        used = used[(used >= 0) & (used < TOKENS)]
        if len(used):
            found[row] = (q[row].double() @ kv[used, 0].double().T * SCALE).amax(-1)
    return found


def call(q: Any, kv: Any, lists: Any, lengths: Any, **options: Any) -> Any:
    return flash_mla_sparse_fwd(q, kv, lists, SCALE, CKV, None, lengths, **options)[1]


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each time that scores are computed from here on."""
    found: list[int] = []
    original = largest.Scores.maxima
    monkeypatch.setattr(largest.Scores, "maxima", lambda scores: found.append(1) or original(scores))
    return found


@pytest.mark.usefixtures("on_the_device")
@pytest.mark.parametrize("most", [1, 1 << 24], ids=["row by row", "all rows"])
@pytest.mark.parametrize(("log2", "unit"), [(None, 1.0), (True, math.log2(math.e))], ids=["natural", "base 2"])
def test_numbers(log2: Any, unit: float, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(largest, "_MOST_ELEMENTS", most)
    given = inputs()
    torch.testing.assert_close(call(*given, return_log2_lse=log2).double(), expected(*given) * unit, **NEAR)
    assert bool((expected(*given)[3] == -math.inf).all())  # rows without tokens


def test_it_is_computed_once_and_only_if_it_is_used(times: list[int]) -> None:
    given = inputs()
    found = call(*given)
    assert isinstance(found, torch.Tensor) and found.shape == (ROWS, HEADS) and len(found) == ROWS
    assert found.dtype is torch.float32 and found.device == given[0].device and found.is_contiguous()
    assert not times
    first = found.clone()
    assert type(first) is torch.Tensor and torch.equal(found, first) and torch.equal(first, found)
    assert len(times) == 1


def test_autocast_and_inference_mode_of_a_reader_change_nothing() -> None:
    given = inputs()
    given = (given[0] * 4, *given[1:])
    exact = call(*given).clone()
    with torch.autocast(given[0].device.type, torch.bfloat16):
        assert torch.equal(call(*given).clone(), exact)
    found = call(*given)
    with torch.inference_mode():
        found.clone()
    found.mul_(2)
    assert torch.equal(found + 0, exact * 2)


@pytest.mark.usefixtures("on_the_device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_large_products_that_cancel_are_not_refused(dtype: torch.dtype) -> None:
    """Scores far smaller than their products, whose sums a kernel rounds in another order than torch."""
    q, kv, lists, lengths = inputs()
    half = (CKV + KPE) // 2
    q[..., half:], kv[..., half:] = q[..., :half].flip(-1), -kv[..., :half].flip(-1)
    q, kv = (q * 3000).to(dtype), (kv * 3000).to(dtype)
    found, exact = call(q, kv, lists, lengths).clone().double(), expected(q, kv, lists, lengths)
    torch.testing.assert_close(found, exact, atol=3000**2 * (CKV + KPE) * SCALE * 2**-19, rtol=0)


USES: dict[str, Callable[[Any], Any]] = {
    "arithmetic": lambda m: 1 - m * 2,
    "index": lambda m: m[0, 1:],
    "numpy": lambda m: torch.from_numpy(m.numpy()),
    "list": lambda m: torch.tensor(m.tolist()),
    "stack": lambda m: torch.stack([m, m]),
    "maximum": lambda m: m.amax(0),
    "out": lambda m: torch.exp(m, out=torch.empty_like(m)),
    "view": lambda m: m.view(torch.int32),
    "copy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "in place": lambda m: (m.mul_(2), m)[1] + 0,
    "address": lambda m: torch.tensor(m.data_ptr() != 0),
    "text": lambda m: torch.tensor([ord(letter) for letter in repr(m)]),
    "dispatcher": lambda m: torch.ops.aten.add.Tensor(m, m),
}


@pytest.mark.parametrize("name", USES)
def test_uses(name: str) -> None:
    found = USES[name](call(*inputs()))
    assert type(found) is torch.Tensor and torch.equal(found, USES[name](call(*inputs()).clone()))


def test_an_operator_may_return_it() -> None:
    @torch.library.custom_op("flashpage_tests::sparse_prefill", mutates_args=())
    def prefill(q: torch.Tensor, kv: torch.Tensor, lists: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return flash_mla_sparse_fwd(q, kv, lists, SCALE, CKV)[:2]

    q, kv, lists, _ = inputs()
    expected_logits = flash_mla_sparse_fwd(q, kv, lists, SCALE, CKV)[1].clone()
    assert torch.equal(prefill(q, kv, lists)[1] + 0, expected_logits)


@pytest.mark.usefixtures("on_the_device")
@pytest.mark.parametrize("name", ["q", "kv"])
def test_inputs_that_were_written_are_refused(name: str, times: list[int]) -> None:
    q, kv, lists, lengths = inputs()
    found = call(q, kv, lists, lengths)
    (q if name == "q" else kv).mul_(1.0)  # equal numbers, which torch cannot know
    with pytest.raises(
        RunError, match="^q or kv was written between flash_mla_sparse_fwd and the first use of its max"
    ):
        found.clone()
    assert not times
    with torch.inference_mode():  # in which torch counts no writes
        q, kv = q.clone(), kv.clone()
        found, kept = call(q, kv, lists, lengths), call(q, kv, lists, lengths)
        kept = kept.clone()
        assert torch.equal(found.clone(), kept)
        found = call(q, kv, lists, lengths)
        (q if name == "q" else kv).mul_(1.5)
        with pytest.raises(RunError, match="^q or kv was written"):
            found.clone()
    lists.fill_(-1), lengths.fill_(0)  # the call has its own


@pytest.mark.usefixtures("on_the_device")
def test_lists_may_be_written() -> None:
    given = inputs()
    exact, found = expected(*given), call(*given)
    given[2].fill_(0), given[3].fill_(3)
    torch.testing.assert_close(found.double(), exact, **NEAR)


def test_a_graph_reads_it_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    given = inputs()
    for captured, place in ((True, "in a CUDA graph is read outside of it"), (False, "outside of .* is read in it")):
        monkeypatch.setattr(largest, "is_capturing", lambda _, captured=captured: captured)
        found, read = call(*given), call(*given)
        read.clone()
        monkeypatch.setattr(largest, "is_capturing", lambda _, captured=captured: not captured)
        with pytest.raises(RunError, match=f"^max_logits of a call {place}"):
            found.clone()
        read.clone()  # computed where the call was


def test_lists_without_entries() -> None:
    q, kv, lists, _ = inputs()
    found = flash_mla_sparse_fwd(q, kv, lists[..., :0].contiguous(), SCALE, CKV)[1]
    assert bool((found == -math.inf).all())
