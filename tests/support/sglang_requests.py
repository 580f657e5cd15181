"""Requests of SGLang without SGLang: their rows in its table of slots, and the ForwardBatch of a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import fake_sglang
import torch
from fake_sglang import ForwardMode

fake_sglang.install()
CONTEXT = 160  # tokens of a row of the table of slots


class Requests:
    """Requests that have `kv_lens` tokens with their `q_lens` new ones, in slots of a mixed order."""

    def __init__(self, q_lens: list[int], kv_lens: list[int], page: int, device: str, seed: int = 0) -> None:
        self.q_lens, self.kv_lens, self.device = q_lens, kv_lens, device
        self.drawn = torch.Generator().manual_seed(seed)
        count = len(kv_lens)
        self.requests = torch.randperm(count + 3, generator=self.drawn)[:count] + 1
        pages = torch.randperm(count * (CONTEXT // page), generator=self.drawn) + 1  # page 0 belongs to no request
        self.size = (len(pages) + 1) * page  # of a pool
        self.slots = torch.zeros(count + 5, CONTEXT, dtype=torch.int32)
        self.slots[self.requests] = (pages[:, None] * page + torch.arange(page)).view(count, CONTEXT).int()

    def slots_of(self, i: int, begin: int, end: int) -> torch.Tensor:
        """Slots of a request's tokens."""
        return self.slots[self.requests[i], begin:end].long().to(self.device)

    def batch(self, mode: ForwardMode, **more: Any) -> SimpleNamespace:
        """The ForwardBatch of a step."""
        new, lens = self.q_lens, self.kv_lens
        before = [n - m for m, n in zip(new, lens, strict=True)]
        slots = [self.slots_of(i, n - m, n) for i, (m, n) in enumerate(zip(new, lens, strict=True))]
        is_extend = mode in (ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.DLLM_EXTEND)
        found = {
            "forward_mode": mode,
            "batch_size": len(lens),
            "req_pool_indices": self.requests.to(self.device),
            "seq_lens": self.on_device(before if mode.is_target_verify() else lens),
            "out_cache_loc": torch.cat(slots),
            "positions": torch.zeros(sum(new), dtype=torch.int64, device=self.device),
            "input_ids": None,
            "extend_seq_lens": self.on_device(new),
            "extend_seq_lens_cpu": new if is_extend else None,
            "extend_prefix_lens_cpu": before if is_extend else None,
            "encoder_lens": None,
            "spec_info": None,
        }
        return SimpleNamespace(**found | more)

    def last_request(self, batch: SimpleNamespace) -> SimpleNamespace:
        """The ForwardBatch of a step that has only the last request of this one."""
        found = SimpleNamespace(**vars(batch))
        names = "req_pool_indices", "seq_lens", "extend_seq_lens", "extend_seq_lens_cpu", "extend_prefix_lens_cpu"
        for name in names:
            values = getattr(batch, name)
            setattr(found, name, None if values is None else values[-1:])
        found.positions = batch.positions[-self.q_lens[-1] :]
        return found

    def on_device(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)


def close(found: torch.Tensor, expected: torch.Tensor, least: float = 0.0) -> None:
    """Within two roundings of the output's type, relative to its largest value, or within `least` of that."""
    limit = max(least, 2.5 * torch.finfo(found.dtype).eps)
    assert not found.isnan().any()
    assert (found.cpu().double() - expected).abs().max().item() < limit * max(1.0, expected.abs().max().item())
