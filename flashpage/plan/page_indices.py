"""Page numbers and mask bits of a plan, in device memory."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import torch

from .. import native
from ..base import checks, env, tensor_memory
from ..base.errors import PlanError
from ..base.memory import empty
from . import mask_bits
from .buffers import CopyRing
from .lengths import Lengths, batch_of, to_host

_DLPACK_CPU, _DLPACK_CUDA = 1, 2  # types of devices


class Pages(NamedTuple):
    """Where a batch's K and V are, unused for ragged ones, and which of them rows may see."""

    indices: Any = None  # page numbers, request after request
    tables: Any = None  # page numbers, [requests, pages]: instead of `indices`, or to be compared with them
    non_blocking: bool = True  # copies of page numbers and masks may be asynchronous
    row_runs: torch.Tensor | None = None  # int32 [runs, 3] on the host, as in csrc/flashpage.h; None: all tokens


GivenPages: TypeAlias = tuple[Any, Any, bool, torch.Tensor | None]  # Pages, or only their entries
NO_PAGES = Pages()


class Mask(NamedTuple):
    """A custom mask: booleans of each request's q_len x kv_len, joined, or these packed to bits."""

    values: Any
    is_packed: bool = False

    @staticmethod
    def of(custom_mask: Any, packed_custom_mask: Any) -> Mask | None:
        """Whether a mask is given, and by which argument."""
        if custom_mask is None and packed_custom_mask is None:
            return None
        if custom_mask is not None and packed_custom_mask is not None:
            raise PlanError("custom_mask and packed_custom_mask each say what a row sees: pass one of them.")
        return Mask(custom_mask) if packed_custom_mask is None else Mask(packed_custom_mask, True)

    def of_one(self, name: str, q_len: int, kv_len: int) -> Mask:
        """The mask of a batch of one request, which may have the two dimensions of its scores."""
        if self.is_packed or not isinstance(self.values, torch.Tensor) or self.values.dim() == 1:
            return self
        if self.values.shape != (q_len, kv_len):
            raise PlanError(
                f"{name} has shape {tuple(self.values.shape)}: pass [{q_len}, {kv_len}], or its values joined."
            )
        return Mask(checks.tensor(self.values, name, PlanError).reshape(-1))


KEEP_MASK = Mask(None)  # the bits in the wrapper's buffer: engines copy them there


def kept(indices: Any, name: str) -> Any:
    """Page numbers for a plan that is made again later. Those that a card reads in place stay the caller's."""
    indices = checks.tensor(tensor_memory.waited(indices), name, PlanError).resolve_neg()
    tensor_memory.address(indices, name, PlanError)
    return indices if not indices.is_cpu and indices.dtype is torch.int32 else indices.clone()


class KvIndices:
    """Page numbers, contiguous int32 on the device. A card reads the caller's tensor in place if it has that form."""

    def __init__(self, device: torch.device, batch: native.BatchStruct) -> None:
        self.device, self._batch = device, batch
        self._device_index = -1 if device.index is None else device.index
        batch.device_type = _DLPACK_CPU if device.type == "cpu" else _DLPACK_CUDA
        batch.device_index = max(0, self._device_index)
        self._check_on_device = env.is_on("FLASHPAGE_CHECK_INDICES")
        batch.checks_pages = self._check_on_device
        self._copies: torch.Tensor | None = None  # which the CPU's kernels read
        if device.type == "cpu":
            self._make_room(1023)
        self.buffer: torch.Tensor | None = None  # set by use_buffer
        self._ring: CopyRing | None = None  # for page numbers that are copied from the host to the buffer
        self.tensor: torch.Tensor | None = None  # the caller's or the buffer

    def as_int32(self) -> torch.Tensor | None:
        """The page numbers as engines read them, on the device."""
        return None if self.tensor is None else self.tensor.to(self.device, torch.int32)

    def use_buffer(self, buffer: torch.Tensor) -> None:
        """Graph mode: sets the buffer that captured launches read, to which page numbers are copied."""
        self.buffer, self._batch.page_buffer = buffer, buffer.data_ptr()
        self._batch.page_buffer_entries = buffer.numel()
        self._make_room(len(buffer))  # of equal size, so that the copies keep their address

    def _make_room(self, count: int) -> torch.Tensor:
        """The copies on the host (csrc/plan_call.h), of at least `count` entries."""
        if self._copies is None or len(self._copies) < count:
            self._copies = empty(1 << count.bit_length(), torch.int32, "cpu")
            self._batch.page_copies, self._batch.most_page_copies = self._copies.data_ptr(), len(self._copies)
        return self._copies

    @property
    def address(self) -> int:
        """The address that kernels read."""
        return self._batch.page_numbers or 0

    @property
    def max_page(self) -> int:
        """The largest page number in use; -1: unknown, as the numbers are on the device."""
        return self._batch.max_page

    def judge(self, indices: Any, first: int, end: int, name: str) -> int:
        """Takes page numbers that the library could not read; entries [first, end) are in use. Returns the largest, -1
        if it is unknown."""
        indices = checks.tensor(tensor_memory.waited(indices), name, PlanError).resolve_neg()
        tensor_memory.address(indices, name, PlanError)
        count, dtype, place = indices.numel(), indices.dtype, indices.get_device()
        if indices.dim() != 1 or (dtype is not torch.int32 and dtype is not torch.int64):
            raise PlanError(
                f"{name} has shape {tuple(indices.shape)} and dtype {dtype}: pass int32 or int64 of one dimension."
            )
        if count < end and (end < 2**31 or first == end):  # otherwise the planner reports the error
            indptr = name.replace("indices", "indptr")
            raise PlanError(f"{name} has {count} entries but {indptr} ends at {end}: pass every page number.")
        if self.buffer is not None and self.buffer.shape[0] < end < 2**31:
            raise PlanError(
                f"{name} has {end} entries but the wrapper's indices buffer holds {self.buffer.shape[0]}. "
                "Make the buffer as large as the largest batch needs."
            )
        if place >= 0 and place != self._device_index:
            checks.same_device(indices, self.device, name, PlanError)
        return _check_range(indices, first, end, name) if place < 0 or self._check_on_device else -1

    def take(self, indices: torch.Tensor, end: int, max_page: int, non_blocking: bool) -> None:
        """Makes kernels read these, of which `end` entries are in use; after a plan, as captured launches see them."""
        indices = tensor_memory.waited(indices).resolve_neg()
        if self.buffer is not None:
            self._copy(indices, end, non_blocking)
            self.tensor = self.buffer
        else:
            is_there = indices.dtype is torch.int32 and indices.get_device() == self._device_index
            if not is_there or not indices.is_contiguous():
                waits = (
                    not non_blocking or self.device.type == "cpu"
                )  # an asynchronous copy to the host returns before it is complete
                indices = indices.to(device=self.device, dtype=torch.int32, non_blocking=not waits).contiguous()
            self.tensor = indices
        read = self.tensor
        if self.device.type == "cpu":
            read = self._make_room(end)
            read[:end].copy_(indices[:end])
        self._batch.page_numbers = read.data_ptr()
        self._batch.max_page = max_page

    def use_tables(self, tables: torch.Tensor, max_page: int) -> None:
        """Makes kernels read the tables in place: a request's pages begin where its row does."""
        self.tensor = tables
        self._batch.page_numbers, self._batch.max_page = (
            tensor_memory.address(tables, "block_tables", PlanError),
            max_page,
        )

    def from_tables(self, tables: Any, indptr: torch.Tensor | None, indices: torch.Tensor | None, name: str) -> Any:
        """The page numbers of `tables`, [requests, pages], if there are no `indices`; otherwise `indices`, which must
        be equal (checked on a card only with FLASHPAGE_CHECK_INDICES=on)."""
        batch = batch_of(indptr, name.replace("indices", "indptr"))
        if checks.tensor(tables, "block_tables", PlanError).dim() != 2 or tables.shape[0] < batch:
            raise PlanError(
                f"block_tables has shape {tuple(tables.shape)}: pass one row for each request, [{batch}, pages]."
            )
        if tables.dtype not in (torch.int32, torch.int64):
            raise PlanError(f"block_tables has dtype {tables.dtype}: pass int32 or int64.")
        ends = to_host(Lengths(kv_indptr=indptr)).kv_indptr.long()  # type: ignore[union-attr]
        first, counts = int(ends[0]), ends.diff()
        if first < 0 or bool((counts < 0).any()):
            return tables.new_zeros(0)  # no indptr: the planner reports it
        if batch and int(counts.max()) > tables.shape[1]:
            raise PlanError(
                f"block_tables has {tables.shape[1]} pages a request but request {int(counts.argmax())} has "
                f"{int(counts.max())}. "
                "Pass a column for every page."
            )
        places = torch.arange(int(counts.sum()), device="cpu")
        places += torch.repeat_interleave(
            torch.arange(batch, device="cpu") * tables.shape[1] - (ends[:-1] - first), counts
        )
        found = tables.reshape(-1)[places.to(tables.device)]
        if indices is None:
            return torch.cat([found.new_zeros(first), found])
        if isinstance(indices, torch.Tensor) and indices.dim() == 1 and indices.numel() >= int(ends[-1]):
            self._compare(found, indices[first : int(ends[-1])], first, name)
        return indices

    def _compare(self, found: torch.Tensor, used: torch.Tensor, first: int, name: str) -> None:
        if not (found.is_cpu and used.is_cpu) and not self._check_on_device:
            return
        differ = found != used.to(found.device)
        if bool(differ.any()):
            i = int(differ.nonzero()[0])
            raise PlanError(
                f"block_tables has page {int(found[i])} where {name}[{first + i}]={int(used[i])}. "
                f"Pass equal pages in both, or {name}=None."
            )

    def _copy(self, indices: torch.Tensor, end: int, non_blocking: bool) -> None:
        """Copies the page numbers in use to the buffer."""
        buffer = self.buffer
        assert buffer is not None
        if end == 0 or (indices.data_ptr() == buffer.data_ptr() and indices.dtype == buffer.dtype):
            return
        if indices.is_cpu and not buffer.is_cpu:
            if self._ring is None:
                self._ring = CopyRing(self._device_index, buffer.nbytes)
                self._batch.page_slots = self._ring.handle
            used = indices[:end].to(torch.int32).contiguous()
            self._ring.copy(used, buffer, torch._C._cuda_getCurrentRawStream(self._device_index))
        else:
            buffer[:end].copy_(indices[:end], non_blocking=non_blocking and not buffer.is_cpu)


def _check_range(indices: torch.Tensor, first: int, end: int, name: str) -> int:
    """Checks that every page number has 31 bits; returns the largest. On the device this costs one copy back."""
    if not 0 <= first < min(end, indices.shape[0]):  # none, or an error that the planner reports
        return -1
    used = indices if first == 0 and end == indices.shape[0] else indices[first:end]
    if used.is_cpu:  # numpy, as torch's threads wait milliseconds for each other on a busy machine
        if not used.numel():  # an indptr beyond 31 bits, which the planner reports
            return -1
        numbers = used.numpy()
        least, most = int(numbers.min()), int(numbers.max())
    else:
        least, most = torch.stack(torch.aminmax(used)).tolist()
    if least < 0 or most >= 2**31:
        where, found = (used.argmin(), least) if least < 0 else (used.argmax(), most)
        raise PlanError(
            f"{name}[{first + int(where)}]={found} is no page number: every page in use is 0 or more, and below 2^31."
        )
    return most


class MaskBits:
    """A custom mask as packed bits on the device; each request's q_len x kv_len bits start on a new byte."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.buffer: torch.Tensor | None = None  # graph mode
        self.tensor: torch.Tensor | None = None
        self.address: int | None = None

    def packed(self, mask: Mask, bits: torch.Tensor) -> torch.Tensor:
        """A mask as bytes, on any device; `bits`: q_len x kv_len of each request, int64 on the host."""
        name = "packed_custom_mask" if mask.is_packed else "custom_mask"
        checks.tensor(mask.values, name, PlanError)
        tensor_memory.address(mask.values, name, PlanError)
        packed = self._packed(mask.values, bits, name) if mask.is_packed else self._pack(mask.values, bits, name)
        if self.buffer is not None and packed.numel() > self.buffer.numel():
            raise PlanError(
                f"{name} needs {packed.numel()} bytes but custom_mask_buf holds {self.buffer.numel()}. "
                "Make the buffer as large as the largest batch needs."
            )
        return packed

    def set(self, packed: torch.Tensor | None, non_blocking: bool) -> None:
        """Takes the result of `packed`; None: no mask."""
        if packed is None:
            self.tensor = self.address = None
            return
        if self.buffer is None:
            is_on_host = self.device.type == "cpu"  # the CPU copies an already packed mask; a card reads it in place
            self.tensor = packed.to(self.device, non_blocking=non_blocking and not is_on_host, copy=is_on_host)
        else:
            self.tensor = self.buffer
            self.buffer[: packed.numel()].copy_(packed, non_blocking=non_blocking and not self.buffer.is_cpu)
        self.address = self.tensor.data_ptr()

    @staticmethod
    def _pack(mask: torch.Tensor, bits: torch.Tensor, name: str) -> torch.Tensor:
        expected = int(bits.sum())
        if mask.dtype not in (torch.bool, torch.uint8) or mask.numel() != expected:
            raise PlanError(
                f"{name} has {mask.numel()} values of {mask.dtype} but the batch needs {expected} of bool or uint8. "
                "Pass every request's q_len x kv_len values (True: visible), flattened and joined."
            )
        return mask_bits.pack_segments(mask.reshape(-1).ne(0).to(torch.uint8), bits, "little")[0]

    @staticmethod
    def _packed(mask: torch.Tensor, bits: torch.Tensor, name: str) -> torch.Tensor:
        expected = int(((bits + 7) // 8).sum())
        if mask.dtype != torch.uint8 or mask.dim() != 1 or mask.numel() < expected or not mask.is_contiguous():
            raise PlanError(
                f"{name} has {mask.numel()} values of {mask.dtype} but the batch needs {expected} bytes of uint8. "
                "Pass the result of segment_packbits(mask, indptr, bitorder='little')."
            )
        return mask
