"""vLLM's ranks of decode context parallelism."""

from __future__ import annotations

from typing import Any

import torch

from .context_parallel import Ranks


def ranks_of(impl: Any, vllm_config: Any) -> Ranks | None:
    """The ranks that share the layer's KV heads; None: it is alone."""
    if impl.dcp_world_size <= 1:
        return None
    from vllm.distributed.parallel_state import get_dcp_group

    parallel = vllm_config.parallel_config
    combine = _collective(getattr(parallel, "dcp_comm_backend", "ag_rs") == "a2a")

    def gather(rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = get_dcp_group().all_gather(rows, dim=1)
        return found

    def merge(out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found: tuple[torch.Tensor, torch.Tensor] = combine(
            out, lse, get_dcp_group(), return_lse=True, is_lse_base_on_e=False
        )
        return found

    stripe = parallel.cp_kv_cache_interleave_size
    return Ranks(impl.dcp_world_size, impl.dcp_rank, stripe, gather, merge)


def _collective(is_all_to_all: bool) -> Any:
    """The collective that merges partial outputs; vLLM 0.26 has each in a module of its own."""
    if is_all_to_all:
        try:
            from vllm.v1.attention.ops.dcp import dcp_a2a_lse_reduce
        except ImportError:
            from vllm.v1.attention.ops.dcp_alltoall import dcp_a2a_lse_reduce
        return dcp_a2a_lse_reduce
    try:
        from vllm.v1.attention.ops.dcp import cp_lse_ag_out_rs
    except ImportError:
        from vllm.v1.attention.ops.common import cp_lse_ag_out_rs
    return cp_lse_ag_out_rs
