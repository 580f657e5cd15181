"""Why no kernel serves an engine's layers, from the kernels' own rules, before a card is touched."""

from __future__ import annotations

from typing import Any

import torch

from ...base.errors import FlashpageError
from ...kernels import choose, devices
from ...kernels.work import Problem
from ...wrappers.plan_arguments import Arguments, DecodeArguments, LatentArguments, PrefillArguments


def refusal(
    head_dim: int, q_dtype: torch.dtype, kv_dtype: torch.dtype, page_size: int, capability: tuple[int, int] | None
) -> str | None:
    """The reason why no kernel of cards with this compute capability takes such layers; None: one does.

    Args:
        capability: None for the CPU.
    """
    types: dict[str, Any] = {"q_data_type": q_dtype, "kv_data_type": kv_dtype}
    decode = DecodeArguments(1, 1, head_dim, page_size, **types)
    prefill = PrefillArguments("paged", 1, 1, head_dim, page_size, causal=True, **types)
    return _reason(capability, (decode, 1), (prefill, choose.MANY_ROWS))


def latent_refusal(
    columns: int,
    q_dtype: torch.dtype,
    kv_dtype: torch.dtype,
    page_size: int,
    capability: tuple[int, int] | None,
    ckv: int | None = None,
) -> str | None:
    """The reason why no kernel of such cards reads latent rows (MLA) of so many columns; None: one does.

    Args:
        ckv: columns that are V too; None: of the usual models, 512 or 256.
    """
    if ckv is None:
        ckv = 512 if columns >= 512 else 256  # these have at most 64 columns more
    types: dict[str, Any] = {"q_data_type": q_dtype, "kv_data_type": kv_dtype}
    return _reason(capability, (LatentArguments(16, ckv, columns - ckv, page_size, sm_scale=1.0, **types), 1))


def listed_refusal(
    columns: int,
    q_dtype: torch.dtype,
    kv_dtype: torch.dtype,
    page_size: int,
    row_format: str | None,
    capability: tuple[int, int] | None,
) -> str | None:
    """As latent_refusal, over lists of tokens; `row_format`: of rows that hold their scales, whose type is not read."""
    sizes = (16, 512, columns - 512, page_size)
    stored: dict[str, Any] = {"kv_data_type": kv_dtype} if row_format is None else {"kv_row_format": row_format}
    plan = LatentArguments(*sizes, sm_scale=1.0, q_data_type=q_dtype, is_selected=True, **stored)
    return _reason(capability, (plan, 1))


def _reason(capability: tuple[int, int] | None, *plans: tuple[Arguments, int]) -> str | None:
    """The kernels' reason to refuse one of the plans, each with its rows of a request."""
    card = devices.CPU if capability is None else _card_of(*capability)
    if card is None:
        return None  # a card that no row names; the kernels are compiled for it, and its driver's numbers decide
    try:
        for arguments, rows in plans:
            options, _ = arguments.checked()
            choose.choose_for_card(Problem(options, rows), card)
    except FlashpageError as error:
        return f"flashpage: {error}"
    return None


def _card_of(major: int, minor: int) -> devices.Device | None:
    """A row of the table of cards with this compute capability, which engines give without touching the card."""
    return next((card for card in devices.CARDS if card.sm == major * 10 + minor), None)
