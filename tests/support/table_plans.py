"""Plans made from lengths on a device, and the host's plans of the same lengths."""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any

import numpy as np
import torch
from planner_batches import Batch, Cutting, arrays_of, call, problem_of, visibility_of

from flashpage import native
from flashpage.native import records


@dataclasses.dataclass
class TableBatch:
    """A batch over block tables whose rows have `stride` entries, of which the first `columns` count."""

    batch: Batch
    columns: int
    stride: int
    has_rows: bool = True  # q_indptr is given; otherwise every request has as many rows as the first one

    @staticmethod
    def of(batch: Batch, spare_columns: int = 0, spare_stride: int = 0, has_rows: bool = True) -> TableBatch:
        """A table wider than the longest request needs."""
        columns = int(-(-max(batch.kv_lens, default=0) // batch.page_size)) + spare_columns
        return TableBatch(batch, columns, columns + spare_stride, has_rows)

    def host_plan(self, cutting: Cutting, requests: int | None = None) -> bytes:
        """The batch of the first `requests`, whose page numbers begin where the rows of the table do."""
        batch, count = self.batch, len(self.batch.q_lens) if requests is None else requests
        mine = dataclasses.replace(batch, q_lens=batch.q_lens[:count], kv_lens=batch.kv_lens[:count])
        arrays = arrays_of(mine, np.int64, use_kv_lens=True)
        arrays["kv_indptr"] = np.arange(count + 1, dtype=np.int64) * self.stride
        status, buffer, result = call(problem_of(mine, arrays), cutting, 1 << 26)
        assert status == native.OK, native.last_error()
        return buffer[: result.used_bytes].tobytes()

    def tables(self, device: str, dtype: torch.dtype = torch.int32, requests: int | None = None) -> Tables:
        return Tables(self, device, dtype, requests)


class Tables:
    """The tables as a struct over tensors on a device."""

    def __init__(self, of: TableBatch, device: str, dtype: torch.dtype, requests: int | None) -> None:
        batch = of.batch
        self.device = device
        ends = torch.from_numpy(np.concatenate([[0], np.cumsum(batch.q_lens)]) + batch.q_start).to(device, torch.int32)
        self.seq_lens = torch.from_numpy(batch.kv_lens).to(device, dtype)
        self.q_indptr = ends if of.has_rows else None
        self.requests = None if requests is None else torch.tensor([requests], dtype=torch.int32, device=device)
        self.struct = native.Tables(
            q_indptr=address(self.q_indptr),
            seq_lens=address(self.seq_lens),
            num_requests=address(self.requests),
            table_stride=of.stride,
            num_table_rows=len(batch.q_lens),
            table_columns=of.columns,
            lens_are_int64=dtype is torch.int64,
            batch=len(batch.q_lens),
            q_len_per_request=0 if of.has_rows else int(batch.q_lens[0]),
            max_rows=int(ends[-1]),
            page_size=batch.page_size,
            num_q_heads=batch.num_q_heads,
            num_kv_heads=batch.num_kv_heads,
            visibility=visibility_of(batch),
        )

    def bounds(self, cutting: Cutting) -> tuple[int, int]:
        """Bytes and partial rows by the bounds."""
        found = ctypes.c_int64(), ctypes.c_int64()
        arguments = (self.struct, cutting.struct(), *found)
        native.check(native.load().fp_tables_bounds(*map(ctypes.byref, arguments)))
        return found[0].value, found[1].value

    def plan(self, cutting: Cutting, kernel: Any = None, library: Any = None) -> bytes:
        """The plan's bytes, made in memory of exactly the size that the bounds promise."""
        size, limit_rows = self.bounds(cutting)
        memory = torch.full((size + 256,), 0xA5, dtype=torch.uint8, device=self.device)
        start = -memory.data_ptr() % 16
        stream = torch.cuda.current_stream().cuda_stream if memory.is_cuda else None
        native.check(
            (library or native.load()).fp_tables_plan(
                kernel,
                ctypes.byref(self.struct),
                ctypes.byref(cutting.struct()),
                memory.data_ptr() + start,
                size,
                stream,
                0,
            )
        )
        found = memory.cpu().numpy()
        assert (found[:start] == 0xA5).all() and (found[start + size :] == 0xA5).all(), "wrote outside its memory"
        header = found[start : start + records.PLAN_HEADER.itemsize].view(records.PLAN_HEADER)[0]
        assert header["num_partial_rows"] <= limit_rows
        return found[start : start + int(header["used_bytes"])].tobytes()


def address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
