"""Tokens that all requests share, read once: all rows as one request over them, each request's own tokens after them,
and one merge."""

from __future__ import annotations

from typing import Any

import torch

from ....plan.lengths import Lengths
from ....plan.page_indices import Pages
from ...plugin.group_plans import GroupPlans, TableRows, Use
from ...plugin.parts import SharedPrefix

LEAST_TOKENS, LEAST_REQUESTS = 256, 8  # vLLM's thresholds


def plan(plans: GroupPlans, common: Any, prefix_len: int) -> SharedPrefix:
    """Plans a step whose requests begin with the same `prefix_len` tokens. The host knows the first plan's lengths, the
    device those of the second."""
    requests, rows, page_size = common.num_reqs, common.num_actual_tokens, plans.sizes.page_size
    pages = prefix_len // page_size
    tables = common.block_table_tensor
    lengths = Lengths(*(torch.tensor([0, count], dtype=torch.int32, device="cpu") for count in (rows, pages)))
    lengths = lengths._replace(kv_lens=torch.tensor([prefix_len], dtype=torch.int32, device="cpu"))
    shared = plans.of(Use.PREFIX)
    for kind, attention in shared.items():
        attention.plan(lengths, Pages(tables[0, :pages]), *plans.options(Use.PREFIX, kind, False))
    own_rows = TableRows(
        (common.seq_lens[:requests] - prefix_len).contiguous(),
        tables[:requests, pages:],
        common.query_start_loc[: requests + 1],
        rows,
    )
    return SharedPrefix(shared, plans.plan_tables(Use.SUFFIX, own_rows, True), rows)


def is_worth(
    prefix_len: int, query_lens: Any, num_heads: int, num_kv_heads: int, has_window: bool, num_sms: int
) -> bool:
    """vLLM's heuristic for its FLASH_ATTN backend: `query_lens` is an array of the rows of each request."""
    requests, tile = len(query_lens), 128
    if prefix_len < LEAST_TOKENS or has_window or requests < LEAST_REQUESTS:
        return False
    if num_heads == num_kv_heads or not bool((query_lens == 1).all()):
        return True
    prefix_tiles = -(-prefix_len // tile)
    cascade_waves = -(-num_heads * -(-requests // tile) // num_sms)
    decode_waves = -(-requests * num_kv_heads * -(-(num_heads // num_kv_heads) // tile) * prefix_tiles // num_sms)
    return cascade_waves * prefix_tiles < decode_waves
