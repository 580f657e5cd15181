"""The rows of a step, from SGLang's ForwardBatch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class StepRows(NamedTuple):
    """The rows of q of a step, and the tokens that its requests have with them."""

    requests: torch.Tensor  # [requests], each one's row of the table of slots
    seq_lens: torch.Tensor  # [requests], on the device
    total: int  # rows of q
    each: int = 0  # rows of every request; 0: q_indptr says
    q_indptr: torch.Tensor | None = None  # [requests + 1] int32, on the device
    on_host: tuple[torch.Tensor, torch.Tensor] | None = None  # rows and tokens of each request; None: unknown there
    encoder_lens: torch.Tensor | None = None  # [requests]
    has_tree: bool = False  # whether a tree says what rows see


def rows_of(batch: Any, more_tokens: int, is_captured: bool) -> StepRows:
    """The rows of a ForwardBatch.

    Args:
        more_tokens: tokens of a draft step that `seq_lens` does not count.
        is_captured: whether the step has the sizes of a captured one, equal rows for all requests.
    """
    mode, seq_lens = batch.forward_mode, batch.seq_lens
    found = StepRows(batch.req_pool_indices, seq_lens, len(seq_lens), encoder_lens=batch.encoder_lens)
    if mode.is_decode_or_idle():
        lens = seq_lens + more_tokens if more_tokens else seq_lens
        return found._replace(seq_lens=lens, each=1)
    if mode.is_target_verify():
        each = _rows_each(batch)
        return found._replace(seq_lens=seq_lens + each, total=each * len(seq_lens), each=each)
    if is_captured:
        each = _rows_each(batch)
        return found._replace(total=each * len(seq_lens), each=each)
    if batch.extend_prefix_lens_cpu is not None and not mode.is_draft_extend_v2():
        new = torch.as_tensor(batch.extend_seq_lens_cpu, dtype=torch.int32, device="cpu")
        before = torch.as_tensor(batch.extend_prefix_lens_cpu, dtype=torch.int32, device="cpu")
        return found._replace(total=int(new.sum()), on_host=(new, before + new))
    starts = torch.nn.functional.pad(batch.extend_seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
    return found._replace(total=len(batch.positions), q_indptr=starts)


def _rows_each(batch: Any) -> int:
    """Rows of each request, where all have the same number."""
    drafts = getattr(batch.spec_info, "draft_token_num", None)
    if batch.forward_mode.is_target_verify() and drafts:
        return int(drafts)
    tokens = batch.positions if batch.positions is not None else batch.input_ids
    return int(tokens.shape[-1]) // max(1, len(batch.seq_lens))
