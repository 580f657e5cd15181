"""Prompts of vLLM's layers with latent rows (MLA): expanded keys and values, and those of earlier tokens in chunks.

vLLM merges their results."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm import envs
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend

from ....plan.lengths import starts_of
from ...plugin.expanded_rows import OWN_TOKENS, ExpandedRows, ExpandedTensors
from ...plugin.group_plans import Workspaces


class FlashpagePrefill(MLAPrefillBackend):
    """flashpage as the backend of prompts."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        workspaces, is_batch_invariant = Workspaces.of(self.vllm_config), bool(envs.VLLM_BATCH_INVARIANT)
        self._rows = ExpandedRows(workspaces, "vLLM", is_batch_invariant=is_batch_invariant)
        self._starts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by chunk, on the host
        self._all_starts: torch.Tensor | None = None

    @staticmethod
    def get_name() -> str:
        return "FLASHPAGE"

    @classmethod
    def supports_compute_capability(cls, device_capability: Any) -> bool:
        return device_capability is None or bool(device_capability.major >= 8)

    def prebuild(self, device: torch.device) -> None:
        """Builds the kernels. flashpage's builder of decodes calls this; with another one they are built at first
        use."""
        heads, dim = (self.num_heads, self.num_heads), self.qk_nope_head_dim + self.qk_rope_head_dim
        self._rows.prebuild(heads, (dim, self.v_head_dim), self.vllm_config.model_config.dtype, device)

    def take_starts(self, query_start_loc_cpu: torch.Tensor) -> None:
        """Where the rows of all requests of the next step begin, which flashpage's builder of decodes knows on the
        host: prompts are the last ones."""
        self._all_starts = query_start_loc_cpu

    def prepare_metadata(self, prefill_metadata: Any) -> None:
        """Begins a step."""
        super().prepare_metadata(prefill_metadata)
        self._rows.begin()
        self._starts.clear()
        starts = prefill_metadata.query_start_loc
        if self._all_starts is None:  # another builder's step: the copy waits for the card
            own = starts.to("cpu", torch.int32)
        else:
            own = self._all_starts[-len(starts) :]
            own = own - own[0]
        self._starts[OWN_TOKENS] = own, own

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
        found = self._run(OWN_TOKENS, q, k, v, return_softmax_lse, out)
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
        number = chunk.index if chunk_idx is None else chunk_idx
        if number not in self._starts:
            self._starts[number] = self._starts_of_chunk(chunk, number)
        return self._run(number, q, k, v, True, out)

    def _starts_of_chunk(self, chunk: Any, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        own = self._starts[OWN_TOKENS][0]
        if chunk is None:
            return own, starts_of(self._prefill_metadata.chunked_context.seq_lens[number])
        requests = chunk.request_slice
        rows = own[requests.start : requests.stop + 1]
        return rows - rows[0], starts_of(chunk.seq_lens)

    def _run(
        self, number: int, q: Any, k: Any, v: Any, has_lse: bool, out: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        tensors = ExpandedTensors(q, k, v, out)
        found, lse = self._rows.run(number, self._starts[number], tensors, self.scale, has_lse)
        return found, None if lse is None else lse.T.contiguous()


class FlashpagePrefillOnCpu(FlashpagePrefill):
    """On the CPU, which has float32 too."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
