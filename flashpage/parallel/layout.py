"""Context parallel caches: which tokens of a request lie on which rank."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch

from ..base import checks
from ..base.errors import PlanError

ORDERS = ("interleaved", "contiguous")


class LocalPages(NamedTuple):
    """A rank's share of a batch, as the paged wrappers take it; a request without tokens on this rank has no pages."""

    indptr: torch.Tensor  # [batch + 1], host
    indices: torch.Tensor  # [indptr[-1]] page numbers, on the device of the given list
    seq_lens: torch.Tensor  # [batch] int32, host: tokens on this rank

    def last_page_len(self, page_size: int) -> torch.Tensor:
        """Tokens in each request's last page on this rank, [batch]; 0: it has none."""
        return torch.where(self.seq_lens > 0, (self.seq_lens - 1) % page_size + 1, 0)


@dataclasses.dataclass(frozen=True)
class ContextLayout:
    """Where the tokens of requests lie in a group of ranks. Tokens keep their order on each rank.

    Args:
        rank, world_size: this process's rank in the group, and the number of ranks.
        page_size: tokens a page.
        order: "interleaved": `interleave` tokens on rank 0, the next ones on rank 1, and so on in rounds; a token stays
            on its rank as its request grows. "contiguous": `world_size` runs of a request's pages, as even as whole
            pages allow; for requests that do not grow.
        interleave: tokens; 0: one page. vLLM and SGLang use single tokens (1), blocks, or sizes between them.
    """

    rank: int
    world_size: int
    page_size: int
    order: str = "interleaved"
    interleave: int = 0

    def __post_init__(self) -> None:
        checks.whole("world_size", self.world_size, 1)
        checks.whole("rank", self.rank, 0, self.world_size - 1)
        checks.whole("page_size", self.page_size, 1)
        checks.whole("interleave", self.interleave, 0)
        if self.order not in ORDERS:
            raise PlanError(f"order={self.order!r} is unknown: pass 'interleaved' or 'contiguous'.")
        if self.interleave and self.order == "contiguous":
            raise PlanError(
                f"interleave={self.interleave} with order='contiguous': pass 0, as runs are not interleaved."
            )

    def tokens(self, seq_lens: torch.Tensor) -> torch.Tensor:
        """Tokens of each request on this rank, int64; `seq_lens` counts whole requests."""
        return self.tokens_before(checks.tensor(seq_lens, "seq_lens", PlanError), seq_lens)

    def tokens_before(self, positions: torch.Tensor, seq_lens: torch.Tensor) -> torch.Tensor:
        """Number of this rank's tokens before each position; for a token on this rank, its place there.

        Args:
            positions: positions in the whole request, at most its length.
            seq_lens: length of the whole request for each position.
        """
        checks.tensor(positions, "positions", PlanError)
        positions, seq_lens = positions.long(), checks.tensor(seq_lens, "seq_lens", PlanError).long()
        if self.order == "contiguous":
            pages = (seq_lens + self.page_size - 1) // self.page_size
            begin, end = (pages * r // self.world_size * self.page_size for r in (self.rank, self.rank + 1))
            return torch.minimum(positions, end).sub(begin).clamp(min=0)
        run = self.interleave or self.page_size
        rounds, rest = positions // (run * self.world_size), positions % (run * self.world_size)
        return rounds * run + (rest - self.rank * run).clamp(0, run)

    def is_local(self, positions: torch.Tensor, seq_lens: torch.Tensor) -> torch.Tensor:
        """Whether the tokens at these positions lie on this rank, which then appends them at `tokens_before`."""
        checks.tensor(positions, "positions", PlanError)
        return self.tokens_before(positions + 1, seq_lens) > self.tokens_before(positions, seq_lens)

    def pages(self, kv_indptr: torch.Tensor, kv_indices: torch.Tensor, seq_lens: torch.Tensor) -> LocalPages:
        """This rank's share of lists that name every page of a request, by its number on the rank that holds it.

        Args:
            kv_indptr: [batch + 1], where each request's pages begin in `kv_indices`; on the host.
            kv_indices: page numbers, on the host or the device.
            seq_lens: [batch], tokens of the whole requests; on the host.
        """
        if self.interleave % self.page_size:
            raise PlanError(
                f"interleave={self.interleave} is not a multiple of page_size={self.page_size}, so pages are cut. "
                "Pass pages='own' with lists of this rank's pages, or a multiple of page_size."
            )
        for name, tensor in (("kv_indptr", kv_indptr), ("kv_indices", kv_indices), ("seq_lens", seq_lens)):
            checks.tensor(tensor, name, PlanError)
        check_lists(kv_indptr, kv_indices)
        begin, seq_lens = kv_indptr[:-1].long(), seq_lens.long()
        counts = (seq_lens + self.page_size - 1) // self.page_size
        short = (counts > kv_indptr[1:].long() - begin).nonzero().flatten()
        if len(short):
            i = int(short[0])
            room = int(kv_indptr[i + 1] - begin[i]) * self.page_size
            raise PlanError(
                f"seq_lens[{i}]={int(seq_lens[i])} exceeds the {room} tokens of the request's pages. "
                "Pass more pages or a smaller length, or pages='own' if the lists name only this rank's pages."
            )
        request = torch.repeat_interleave(torch.arange(len(counts), device="cpu"), counts)
        page = torch.arange(len(request), device="cpu") - (counts.cumsum(0) - counts)[request]
        is_here = self.is_local(page * self.page_size, seq_lens[request])
        chosen = (begin[request] + page)[is_here]
        indptr = torch.zeros(len(counts) + 1, dtype=torch.int32, device="cpu")
        indptr[1:] = torch.bincount(request[is_here], minlength=len(counts)).cumsum(0)
        return LocalPages(indptr, kv_indices[chosen.to(kv_indices.device)], self.tokens(seq_lens).int())


def check_lists(kv_indptr: torch.Tensor, kv_indices: torch.Tensor) -> None:
    """Checks that the lists, which begin where kv_indptr says, lie within kv_indices."""
    if kv_indices.dim() != 1 or kv_indices.dtype not in (torch.int32, torch.int64):
        raise PlanError(
            f"kv_indices has shape {tuple(kv_indices.shape)} and dtype {kv_indices.dtype}: "
            "pass int32 or int64 of one dimension."
        )
    if int(kv_indptr[0]) < 0:
        raise PlanError(f"kv_indptr[0]={int(kv_indptr[0])} is negative: start at 0 (or at the request's offset).")
    if len(kv_indices) < int(kv_indptr[-1]):
        raise PlanError(
            f"kv_indices has {len(kv_indices)} entries but kv_indptr ends at {int(kv_indptr[-1])}: "
            "pass every page number."
        )
