"""Lists of tokens of two caches (DeepSeek V4): a row of q reads entries of one list for each, in one softmax."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .. import native
from ..base import checks, kv_view, tensor_memory
from ..base.errors import RunError
from ..run.checks import rows_of_pages
from .latent_run import latent_cache_of

if TYPE_CHECKING:
    from ..kernels.options import Options

_ALIGNMENT = 16  # bytes, of the parts of a row


class SecondLists(NamedTuple):
    """The second cache of a run and its lists, and the lengths of the first lists, which such a run reads, too."""

    cache: torch.Tensor  # [pages, page_size, bytes], its pages of any size
    indices: torch.Tensor  # [rows, topk] int32, of the second cache
    first_lengths: torch.Tensor | None  # [rows] int32, entries of the first lists that are used; None: all

    def read_from(self, params: native.AttentionParams, options: Options, first_columns: int) -> None:
        """Makes a launch read these lists and this cache; `first_columns`: entries of a row's first list."""
        view, second = self._view(options), params.second
        second.k.data = tensor_memory.address(self.cache, "extra_kv_cache", RunError)
        second.k.page_stride, second.k.token_stride = view.page_stride, view.token_stride
        second.page = native.make_fast_div(view.page_size)
        second.indices = tensor_memory.address(self.indices, "extra_indices", RunError)
        second.columns, second.first_columns = self.indices.shape[1], first_columns
        lengths = self.first_lengths
        second.first_lengths = None if lengths is None else tensor_memory.address(lengths, "topk_length", RunError)
        if second.k.data % _ALIGNMENT or view.page_stride % _ALIGNMENT:
            raise RunError(
                f"extra_kv_cache starts at {second.k.data:#x} and has pages {view.page_stride} bytes apart: pass a "
                f"cache whose pages start on {_ALIGNMENT} bytes."
            )

    def slots(self) -> int:
        """The tokens of the second cache."""
        return self.cache.shape[0] * self.cache.shape[1]

    def _view(self, options: Options) -> kv_view.View:
        packed = options.latent_row_format
        assert packed is not None
        if self.cache.dim() != 3:
            raise RunError(f"extra_kv_cache has shape {tuple(self.cache.shape)}: pass [pages, page_size, bytes].")
        views = kv_view.latent_views(self.cache, packed.row_bytes)
        view = rows_of_pages(views, packed, "extra_kv_cache")[0]
        if view.head_dim != packed.row_bytes or views[1].head_dim:
            raise RunError(
                f"extra_kv_cache has rows of {self.cache.shape[2]} bytes but the plan is for {packed.row_bytes}: pass "
                "a cache of the planned kv_row_format."
            )
        if view.num_pages == 0:
            raise RunError("extra_kv_cache has 0 pages: pass a cache of at least one.")
        return view


def second_of(
    options: Options, cache: Any, indices: torch.Tensor, first_lengths: torch.Tensor | None, device: torch.device
) -> SecondLists:
    """The second cache of a run and its lists, whose shape was checked."""
    found = latent_cache_of(options, checks.tensor(cache, "extra_kv_cache", RunError))
    assert isinstance(found, torch.Tensor)
    checks.same_device(found, device, "extra_kv_cache", RunError)
    if found.dtype != torch.float8_e4m3fn:
        raise RunError(f"extra_kv_cache has dtype {found.dtype}: pass rows of bytes (uint8), as kv_cache has.")
    return SecondLists(found, indices, first_lengths)
