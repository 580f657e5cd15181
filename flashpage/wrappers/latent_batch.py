"""The lengths and page numbers of a batch over latent rows, in the forms that FlashInfer has."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..base import checks
from ..base.errors import PlanError
from ..kernels.options import Options
from ..plan.device_lengths import TableLengths
from ..plan.lengths import Lengths, batch_of


class MLAPlanMetadata(NamedTuple):
    """Lengths and page numbers of a batch, on the host or on the device: `csr`, `dense` or `dual` makes one."""

    qo_indptr: torch.Tensor | None = None
    kv_indptr: torch.Tensor | None = None
    kv_indices: torch.Tensor | None = None
    kv_len_arr: torch.Tensor | None = None
    cum_seq_lens_q: torch.Tensor | None = None
    block_tables: torch.Tensor | None = None
    seq_lens: torch.Tensor | None = None
    max_q_len: int | None = None

    @staticmethod
    def csr(
        qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, kv_indices: torch.Tensor, kv_len_arr: torch.Tensor
    ) -> MLAPlanMetadata:
        """Rows and pages of all requests in a row.

        Args:
            qo_indptr, kv_indptr: [batch + 1], where each request's rows and pages begin.
            kv_indices: page numbers, unchecked if on a card without FLASHPAGE_CHECK_INDICES=on: one beyond the cache is
                an illegal address there.
            kv_len_arr: [batch], tokens of each request.
        """
        # The class itself is a Python function that takes a tenth of a microsecond more.
        return tuple.__new__(MLAPlanMetadata, (qo_indptr, kv_indptr, kv_indices, kv_len_arr, None, None, None, None))

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
            block_tables: [batch, pages], int32 or int64; for a plan on a card int32.
            seq_lens: [batch], tokens of each request.
            max_q_len: most rows of a request, which bounds the rows of q; None: q has cum_seq_lens_q[-1] rows. Requests
                of more rows are refused; a plan on a card does not see them.
        """
        dense = {"cum_seq_lens_q": cum_seq_lens_q, "block_tables": block_tables, "seq_lens": seq_lens}
        return MLAPlanMetadata(**dense, max_q_len=max_q_len)

    @staticmethod
    def dual(
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        *,
        cum_seq_lens_q: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        max_q_len: int | None = None,
    ) -> MLAPlanMetadata:
        """A batch in both forms. Runs read those of `csr`, and what the host has of `dense` is compared with them."""
        dense = (cum_seq_lens_q, block_tables, seq_lens, max_q_len)
        return MLAPlanMetadata(qo_indptr, kv_indptr, kv_indices, kv_len_arr, *dense)

    @property
    def is_dense(self) -> bool:
        """Whether the batch is in the form of `dense` alone."""
        if not (self.qo_indptr is self.kv_indptr is self.kv_indices is self.kv_len_arr is None):
            return False
        return not (self.cum_seq_lens_q is self.block_tables is self.seq_lens is None)

    @property
    def is_on_device(self) -> bool:
        """Whether a plan on the device serves the batch: it has a table, and its lengths are there."""
        return self.is_dense and not (self._rows.is_cpu or self._lens.is_cpu)

    @property
    def _rows(self) -> torch.Tensor:
        name = "cum_seq_lens_q" if self.is_dense else "qo_indptr"
        return checks.tensor(getattr(self, name), name, PlanError)

    @property
    def _lens(self) -> torch.Tensor:
        name = "seq_lens" if self.is_dense else "kv_len_arr"
        return checks.tensor(getattr(self, name), name, PlanError)

    def lengths(self, page_size: int) -> Lengths:
        """The lengths; those of a table say where its pages begin."""
        if not self.is_dense:
            if self.max_q_len is not None and self.cum_seq_lens_q is None:
                raise PlanError(f"max_q_len={self.max_q_len} without cum_seq_lens_q: pass both, or leave it None.")
            if not (self.cum_seq_lens_q is self.seq_lens is None):
                self._compare()
            rows = checks.tensor(self.qo_indptr, "qo_indptr", PlanError)
            return Lengths(rows, self.kv_indptr, None, checks.tensor(self.kv_len_arr, "kv_len_arr", PlanError))
        checks.tensor(self.block_tables, "block_tables", PlanError)
        batch, lens = batch_of(self._rows, "cum_seq_lens_q"), self._lens
        if lens.shape != (batch,):
            raise PlanError(
                f"seq_lens has shape {tuple(lens.shape)} but cum_seq_lens_q has {batch} requests: pass one entry a "
                "request."
            )
        self._check_most(self._rows)
        pages = -(-lens.cpu().long().clamp(min=0) // page_size)
        return Lengths(self._rows, torch.cat([pages.new_zeros(1), pages.cumsum(0)]), None, lens)

    def _compare(self) -> None:
        """Refuses two forms of different batches, as far as the host has the numbers."""
        for name, other in (("qo_indptr", "cum_seq_lens_q"), ("kv_len_arr", "seq_lens")):
            if getattr(self, other) is None:
                continue
            mine, theirs = (checks.tensor(getattr(self, n), n, PlanError) for n in (name, other))
            if mine.is_cpu and theirs.is_cpu and not torch.equal(mine.long(), theirs.long()):
                raise PlanError(f"{other} differs from {name}: pass both forms of one batch.")
        if self.cum_seq_lens_q is not None and self.cum_seq_lens_q.is_cpu:
            self._check_most(self.cum_seq_lens_q)

    def _check_most(self, begins: torch.Tensor) -> None:
        """Refuses requests of more rows than max_q_len."""
        if self.max_q_len is None:
            return
        allowed, rows = checks.whole("max_q_len", self.max_q_len, 0), begins.cpu().long().diff()
        if rows.numel() and int(rows.max()) > allowed:
            i = int(rows.argmax())
            raise PlanError(
                f"max_q_len={allowed} but request {i} has {int(rows[i])} rows: pass at least {int(rows[i])}."
            )

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
