"""The lengths and page numbers of a batch over latent rows, in the forms that FlashInfer has."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..base import checks
from ..base.errors import PlanError
from ..kernels.options import Options
from ..plan.device_lengths import TableLengths
from ..plan.lengths import Lengths


class MLAPlanMetadata(NamedTuple):
    """Lengths and page numbers of a batch, on the host or on the device: `csr`, `dense` or `dual` makes one."""

    qo_indptr: torch.Tensor | None = None
    kv_indptr: torch.Tensor | None = None
    kv_indices: torch.Tensor | None = None
    kv_len_arr: torch.Tensor | None = None
    block_tables: torch.Tensor | None = None
    max_q_len: int | None = None

    @staticmethod
    def csr(
        qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, kv_indices: torch.Tensor, kv_len_arr: torch.Tensor
    ) -> MLAPlanMetadata:
        """Rows and pages of all requests in a row.

        Args:
            qo_indptr, kv_indptr: [batch + 1], where each request's rows and pages begin.
            kv_indices: page numbers.
            kv_len_arr: [batch], tokens of each request.
        """
        return MLAPlanMetadata(qo_indptr, kv_indptr, kv_indices, kv_len_arr)

    @staticmethod
    def dense(
        cum_seq_lens_q: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        max_q_len: int | None = None,
    ) -> MLAPlanMetadata:
        """A table of pages. If it and the lengths are on a card, the plan is made there, and the host reads neither.

        Args:
            cum_seq_lens_q: [batch + 1], where each request's rows begin.
            block_tables: [batch, pages], int32.
            seq_lens: [batch], tokens of each request.
            max_q_len: most rows of a request, which bounds the rows of q; None: q has cum_seq_lens_q[-1] rows.
        """
        return MLAPlanMetadata(cum_seq_lens_q, None, None, seq_lens, block_tables, max_q_len)

    @staticmethod
    def dual(
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        block_tables: torch.Tensor | None = None,
        max_q_len: int | None = None,
    ) -> MLAPlanMetadata:
        """A batch in both forms. Runs read `kv_indices`; a table on the host is compared with it."""
        return MLAPlanMetadata(qo_indptr, kv_indptr, kv_indices, kv_len_arr, block_tables, max_q_len)

    @property
    def is_on_device(self) -> bool:
        """Whether a plan on the device serves the batch: it has a table, and its lengths are there."""
        has_table = self.kv_indptr is None and self.block_tables is not None
        return has_table and not (self._rows.is_cpu or self._lens.is_cpu)

    @property
    def _rows(self) -> torch.Tensor:
        return checks.tensor(self.qo_indptr, "qo_indptr", PlanError)

    @property
    def _lens(self) -> torch.Tensor:
        return checks.tensor(self.kv_len_arr, "kv_len_arr", PlanError)

    def lengths(self, page_size: int) -> Lengths:
        """The lengths; those of a table say where its pages begin."""
        kv_indptr = self.kv_indptr
        if kv_indptr is None and self.block_tables is not None:
            pages = -(-self._lens.cpu().long().flatten() // page_size)
            kv_indptr = torch.cat([pages.new_zeros(1), pages.cumsum(0)])
        return Lengths(self._rows, kv_indptr, None, self._lens)

    def table_lengths(self, device: torch.device, options: Options) -> TableLengths:
        """The lengths for a plan on the device."""
        rows = self._rows
        if self.max_q_len is None:
            most = int(rows[-1])
        else:
            most = (len(rows) - 1) * checks.whole("max_q_len", self.max_q_len, 0)
        return TableLengths(
            device,
            self._lens,
            self.block_tables,
            q_indptr=rows,
            table_rows=None,
            num_requests=None,
            max_rows=most,
            options=options,
            takes_fewer_rows=self.max_q_len is not None,
        )
