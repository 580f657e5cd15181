"""Compares a run's outputs with the reference, row by row, and reports where they differ."""

from __future__ import annotations

import dataclasses

import torch
from cases.case import Case
from reference import LOG2_E, State
from tolerance import Limits, approximates_tanh, has_16_bits, has_e4m3_scores, has_fp8_products, limits, sees_few_tokens

from flashpage.kernels import devices

GUARD_BYTES, GUARD_VALUE = 4096, 0xAB


@dataclasses.dataclass
class Outputs:
    """out [rows, num_q_heads, head_dim_vo] and lse [rows, num_q_heads] of a run, and the memory around them."""

    out: torch.Tensor
    lse: torch.Tensor | None
    guards: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)  # name: whole buffer, bytes


@dataclasses.dataclass(frozen=True)
class Report:
    """The error of a case: relative Frobenius norm, and the used share of each limit."""

    frobenius: float
    row: float
    element: float
    lse: float

    def __str__(self) -> str:
        shares = f"row {self.row:.2f} element {self.element:.2f} lse {self.lse:.2f}"
        return f"frobenius {self.frobenius:.1e}, of limits: {shares}"


class Mismatch(AssertionError):
    """A result is wrong; the message says which request, row, head and by how much."""


def compare(case: Case, outputs: Outputs, states: list[State]) -> Report:
    """Raises Mismatch at the first difference."""
    for name, memory in outputs.guards.items():
        if not _is_untouched(memory, getattr(outputs, name)):
            raise Mismatch(f"{case}: memory around {name} was written")
    out = outputs.out.cpu().double()
    lse = None if outputs.lse is None else outputs.lse.cpu().double()
    if lse is not None and case.lse_mode == "basee":
        lse = lse * LOG2_E
    expected = (sum(case.q_lens), case.num_q_heads, case.value_dim)
    if tuple(out.shape) != expected or (lse is not None and tuple(lse.shape) != expected[:2]):
        raise Mismatch(f"{case}: out has shape {tuple(out.shape)}, expected {expected}")
    if outputs.out.dtype != getattr(torch, case.out_type) or (lse is not None and outputs.lse.dtype != torch.float32):
        raise Mismatch(f"{case}: out is {outputs.out.dtype}, lse {outputs.lse.dtype if lse is not None else None}")
    on_card = outputs.out.is_cuda
    card = devices.of(outputs.out.device) if on_card else devices.CPU
    kinds = {
        "fp8_products": has_fp8_products(case, card),
        "e4m3_scores": has_e4m3_scores(case, card),
        "approximate_tanh": approximates_tanh(case, card),
    }
    used, begin = [], 0
    for request, state in enumerate(states):
        end = begin + len(state.out)
        lse_rows = None if lse is None else lse[begin:end]
        used.append(_compare_request(case, request, out[begin:end], lse_rows, state, kinds))
        begin = end
    exact = torch.cat([state.out for state in states])
    frobenius = float((out - exact).norm() / exact.norm()) if exact.norm() > 0 else 0.0
    return Report(frobenius, *(max(column, default=0.0) for column in zip(*used, strict=True)))


def _is_untouched(memory: torch.Tensor, view: torch.Tensor) -> bool:
    """Whether all bytes outside the view still have the guard's value."""
    copy = memory.clone()
    guard = torch.full((view.element_size(),), GUARD_VALUE, dtype=torch.uint8, device=memory.device).view(view.dtype)
    copy.view(view.dtype).as_strided(view.shape, view.stride(), view.storage_offset()).copy_(guard)
    return bool((copy == GUARD_VALUE).all())


def _compare_request(
    case: Case, request: int, out: torch.Tensor, lse: torch.Tensor | None, state: State, kinds: dict[str, bool]
) -> tuple[float, float, float]:
    """The used share of each limit, at most 1."""
    allowed: Limits = limits(case, state, **kinds)
    error = (out - state.out).abs()
    shares = {"row": error.norm(dim=-1) / allowed.row, "element": error / allowed.element}
    if lse is not None:
        same = (lse == state.lse) | ((lse - state.lse).abs() <= allowed.lse)  # -inf equals only itself
        shares["lse"] = torch.where(same & lse.isinf(), 0.0, (lse - state.lse).abs() / allowed.lse)
    for name, share in shares.items():
        wrong = ~(share <= 1)  # NaN is wrong too
        if bool(wrong.any()):
            raise Mismatch(_describe(case, request, name, wrong, share, out, lse, state))
    narrow = has_16_bits(out, state.out) if case.out_type == "float32" else torch.zeros(out.shape[:2], dtype=torch.bool)
    # A token's value may have been rounded to q's type as it was read, and its elements have few bits: in e4m3 many are
    # one number. So many results have few bits together, where a weight, or the quotient of two, has few.
    narrow &= ~sees_few_tokens(state)
    if bool(narrow.any()):
        row, head = (int(i) for i in narrow.nonzero()[0])
        raise Mismatch(f"{case}: fp32 outputs of request {request} at row {row}, head {head} were rounded to 16 bits")
    none = torch.zeros(1)
    return tuple(float(shares.get(name, none).max()) if out.numel() else 0.0 for name in ("row", "element", "lse"))


def _describe(
    case: Case,
    request: int,
    name: str,
    wrong: torch.Tensor,
    share: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    state: State,
) -> str:
    where = tuple(int(i) for i in wrong.nonzero()[0])
    row, head = where[:2]
    sizes = f"q_len {case.q_lens[request]}, kv_len {case.kv_lens[request]}"
    if name == "lse":
        found, expected = float(lse[row, head]), float(state.lse[row, head])
    else:
        dim = where[2] if len(where) > 2 else int((out[row, head] - state.out[row, head]).abs().argmax())
        found, expected = float(out[row, head, dim]), float(state.out[row, head, dim])
    heads = sorted({int(i) for i in wrong.nonzero()[:, 1]})
    rows = sorted({int(i) for i in wrong.nonzero()[:, 0]})
    return (
        f"{case}: {name} of request {request} ({sizes}) is wrong at row {row}, head {head}. "
        f"Found {found:.6g}, expected {expected:.6g} ({float(share[where]):.3g} of the limit). "
        f"{len(rows)} rows {rows[:8]}, heads {heads[:8]}"
    )
