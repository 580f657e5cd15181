"""Prompts of vLLM's layers with latent rows (MLA): expanded keys and values, and those of earlier tokens in chunks.

vLLM merges their results."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend

from ...plugin.expanded_rows import OWN_TOKENS, ExpandedRows, ExpandedTensors
from ...plugin.group_plans import Workspaces


class FlashpagePrefill(MLAPrefillBackend):
    """flashpage as the backend of prompts."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._rows = ExpandedRows(Workspaces.of(self.vllm_config), "vLLM")

    @staticmethod
    def get_name() -> str:
        return "FLASHPAGE"

    @classmethod
    def supports_compute_capability(cls, device_capability: Any) -> bool:
        return device_capability is None or device_capability.major in (8, 9)

    def prepare_metadata(self, prefill_metadata: Any) -> None:
        """Begins a step."""
        super().prepare_metadata(prefill_metadata)
        self._rows.begin()

    def run_prefill_new_tokens(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        return_softmax_lse: bool,
        out: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
    ) -> Any:
        """Attention of q [rows, heads, dim] over k and v of the same tokens; LSEs are [heads, rows], base e."""
        if output_scale is not None:
            raise NotImplementedError("flashpage writes no quantized outputs for vLLM.")
        starts = self._prefill_metadata.query_start_loc
        found = self._run(OWN_TOKENS, (starts, starts), q, k, v, return_softmax_lse, out)
        return found if return_softmax_lse else found[0]

    def run_prefill_context_chunk(
        self,
        chunk: Any = None,
        q: Any = None,
        k: Any = None,
        v: Any = None,
        out: torch.Tensor | None = None,
        chunk_idx: int | None = None,  # vLLM 0.26, where every chunk has all requests
    ) -> Any:
        """Attention over a chunk of earlier tokens, all of which each row sees, and LSEs."""
        if chunk_idx is None:
            return self._run(chunk.index, (chunk.query_start_loc, chunk.cu_seq_lens), q, k, v, True, out)
        metadata = self._prefill_metadata
        lengths = metadata.query_start_loc, metadata.chunked_context.cu_seq_lens[chunk_idx]
        return self._run(chunk_idx, lengths, q, k, v, True, out)

    def _run(
        self, number: int, starts: tuple[Any, Any], q: Any, k: Any, v: Any, has_lse: bool, out: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        found, lse = self._rows.run(number, starts, ExpandedTensors(q, k, v, out), self.scale, has_lse)
        return found, None if lse is None else lse.T.contiguous()


class FlashpagePrefillOnCpu(FlashpagePrefill):
    """On the CPU, which has float32 too."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
