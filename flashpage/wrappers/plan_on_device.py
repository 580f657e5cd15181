"""`plan_on_device`: the wrappers' plans from lengths that live on the device, for graphs that plan themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..base import checks
from ..base.errors import PlanError
from ..plan.device_lengths import TableLengths
from .plan_arguments import decode_options, paged_options

if TYPE_CHECKING:
    from ..plan.session import Planner


class DecodeOnDevice:
    """Of the decode wrapper."""

    _planner: Planner
    device: torch.device

    def plan_on_device(
        self: Any,
        seq_lens: torch.Tensor,
        block_tables: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        table_rows: torch.Tensor | None = None,
        num_requests: torch.Tensor | None = None,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        variant: Any = None,
    ) -> None:
        """Plans by one small kernel on the current stream: nothing is copied, the host neither waits nor knows the
        lengths. Captured in a graph, in front of the runs, it plans anew at every replay, from what the tensors hold
        then; call it once before the capture. The plan is the one that `plan` makes of the same lengths.

        Args:
            seq_lens: [batch] int32 or int64 on the device, tokens of each request.
            block_tables: [batch, pages] int32 on the device, read in place: page numbers of each request, as many as
                its tokens need; what follows is not looked at.
            table_rows: [batch] int32 or int64 on the device, the row of `block_tables` that each request has (a pool's
                table of all requests is read in place); None: 0, 1, 2, ...
            num_requests: [1] int32 on the device: how many of the batch's requests there are; nothing is planned and no
                row is written for those behind them. None: all.
            The others are those of `plan`.

        On a card lengths are taken to lie within 0 and what a row of `block_tables` holds; on the CPU they are judged.
        """
        key = (
            (num_qo_heads, num_kv_heads, head_dim, page_size, pos_encoding_mode, window_left, 0),
            (logits_soft_cap, q_data_type, kv_data_type, o_data_type, None, sm_scale, rope_scale, rope_theta),
            (fixed_split_size, disable_split_kv, q_len_per_req, variant),
        )
        self._use_options(key, decode_options)
        tables = TableLengths(
            *(self.device, seq_lens, block_tables),
            q_indptr=None,
            table_rows=table_rows,
            num_requests=num_requests,
            max_rows=0,
            options=self._options,
        )
        self._check_graph_batch(tables.batch)
        self._planner.plan_on_device(tables)


class PrefillOnDevice:
    """Of the paged prefill wrapper."""

    _planner: Planner
    device: torch.device

    def plan_on_device(
        self: Any,
        qo_indptr: torch.Tensor,
        seq_lens: torch.Tensor,
        block_tables: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        max_rows: int | None = None,
        table_rows: torch.Tensor | None = None,
        num_requests: torch.Tensor | None = None,
        head_dim_vo: int | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        variant: Any = None,
    ) -> None:
        """Plans by one small kernel on the current stream: nothing is copied, the host neither waits nor knows the
        lengths. Captured in a graph, in front of the runs, it plans anew at every replay, from what the tensors hold
        then; call it once before the capture. The plan is the one that `plan` makes of the same lengths, but of a
        mixed batch there is one, not two.

        Args:
            qo_indptr: [batch + 1] int32 on the device, where each request's rows begin in q.
            seq_lens: [batch] int32 or int64 on the device, tokens of each request, with the appended ones.
            block_tables: [batch, pages] int32 on the device, read in place: page numbers of each request, as many as
                its tokens need; what follows is not looked at.
            max_rows: rows of the q that runs are given; those that belong to no request are left alone. None: the
                constructor's.
            table_rows: [batch] int32 or int64 on the device, the row of `block_tables` that each request has (a pool's
                table of all requests is read in place); None: 0, 1, 2, ...
            num_requests: [1] int32 on the device: how many of the batch's requests there are; nothing is planned and no
                row is written for those behind them. None: all.
            The others are those of `plan`.

        On a card lengths are taken to lie within 0 and what a row of `block_tables` holds, rows within 0 and
        `max_rows`; on the CPU they are judged.
        """
        planner = self._planner
        if max_rows is None:
            if planner.capacity is None:
                raise PlanError("max_rows=None: pass the rows of q, which qo_indptr keeps on the device.")
            max_rows = planner.capacity.rows
        key = (
            (num_qo_heads, num_kv_heads, head_dim_qk, page_size, head_dim_vo, False, causal, pos_encoding_mode),
            (False, sm_scale, window_left, logits_soft_cap, rope_scale, rope_theta, q_data_type),
            (kv_data_type, o_data_type, fixed_split_size, disable_split_kv, variant),
        )
        self._use_options(key, paged_options)
        tables = TableLengths(
            *(self.device, seq_lens, block_tables),
            q_indptr=checks.tensor(qo_indptr, "qo_indptr", PlanError),
            table_rows=table_rows,
            num_requests=num_requests,
            max_rows=checks.whole("max_rows", max_rows, 0),
            options=self._options,
        )
        self._check_graph_batch(tables.batch)
        planner.plan_on_device(tables)
        self._set_mask((None, None), True)
