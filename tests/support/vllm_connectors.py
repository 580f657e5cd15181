"""vLLM's connectors without a card. Its OffloadingConnector sees a block of the cache as bytes that follow each other.
vLLM's own worker copies them by the driver, and the worker below by torch."""

from __future__ import annotations

from collections import Counter
from typing import Any

import safetensors.torch
import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

_blocks = Counter[str]()  # copied, by direction
_tensors: list[int] = []  # of each cache that was registered: one holds all layers, or each has one


def loads_of(connector: str) -> Counter[str]:
    """Starts to count what a connector loads: blocks, or for ExampleConnector files, one a layer and request."""
    if connector == "OffloadingConnector":
        _blocks.clear()
        _blocks["tensors"] = _tensors[-1]
        return _blocks
    found, load = Counter[str](), safetensors.torch.load_file

    def load_and_count(*given: Any, **named: Any) -> Any:
        found["loaded"] += 1
        return load(*given, **named)

    safetensors.torch.load_file = load_and_count
    return found


class Spec(CPUOffloadingSpec):
    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            count = self.num_chunks if hasattr(self, "num_chunks") else self.num_blocks
            self._worker: Any = Worker(kv_caches, count)
        return self._worker


class Worker(OffloadingWorker):
    def __init__(self, kv_caches: CanonicalKVCaches, count: int) -> None:
        self._groups = kv_caches.group_data_refs
        self._cache = [each.tensor for each in kv_caches.tensors]
        self._stored = [torch.zeros(count, each.shape[1], dtype=torch.int8) for each in self._cache]
        self._done: list[TransferResult] = []
        _tensors.append(len(self._cache))

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, src_spec, dst_spec, (self._cache, self._stored), "stored")

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, dst_spec, src_spec, dst_spec, (self._stored, self._cache), "loaded")

    def _copy(self, job_id: int, blocks: Any, source: Any, target: Any, tensors: Any, direction: str) -> bool:
        begin = 0
        for size, references in zip(blocks.group_sizes, self._groups, strict=True):
            at = slice(begin, begin + size)
            for reference in references:
                source_rows, target_rows = (each[reference.tensor_idx] for each in tensors)
                columns = slice(reference.page_size_bytes)
                rows = source_rows[torch.from_numpy(source.block_ids[at]).long(), columns]
                target_rows[torch.from_numpy(target.block_ids[at]).long(), columns] = rows
            begin += size
        _blocks[direction] += begin
        self._done.append(TransferResult(job_id, True, 0, 0.0))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        pass
