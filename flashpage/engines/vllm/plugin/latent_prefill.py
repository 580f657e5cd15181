"""Prompts of vLLM's layers with latent rows (MLA): expanded keys and values, and those of earlier tokens in chunks.

vLLM merges their results."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend

from ....plan.lengths import Lengths
from ....plan.page_indices import NO_PAGES
from ....wrappers.base import RAGGED, Attention
from ....wrappers.plan_arguments import Checked, PrefillArguments
from ...plugin.group_plans import Workspaces

_WORKSPACE_BYTES = {"cuda": 128 << 20, "cpu": 16 << 20}


class FlashpagePrefill(MLAPrefillBackend):
    """The step's new tokens have one plan, each chunk of earlier tokens one of its own; layers share them."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._checked = {is_causal: Checked() for is_causal in (False, True)}
        self._attentions: dict[int, Attention] = {}  # by chunk; -1: of the new tokens
        self._planned: set[int] = set()  # in this step

    @staticmethod
    def get_name() -> str:
        return "FLASHPAGE"

    @classmethod
    def supports_compute_capability(cls, device_capability: Any) -> bool:
        return device_capability is None or device_capability.major in (8, 9)

    def prepare_metadata(self, prefill_metadata: Any) -> None:
        """Begins a step."""
        super().prepare_metadata(prefill_metadata)
        self._planned.clear()

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
        found = self._run(-1, (starts, starts), q, k, v, return_softmax_lse, out)
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
        attention = self._attentions.get(number)
        if attention is None:
            workspace = Workspaces.of(self.vllm_config).at_least(_WORKSPACE_BYTES[q.device.type], q.device)
            attention = self._attentions[number] = Attention(workspace, names=RAGGED, owner="flashpage's vLLM backend")
        if number not in self._planned:
            arguments = PrefillArguments(
                *("ragged", q.shape[1], k.shape[1], q.shape[2], 0, v.shape[2]),
                causal=number < 0,
                sm_scale=self.scale,
                q_data_type=q.dtype,
            )
            checked = self._checked[number < 0].of(arguments)
            attention.plan(Lengths(*(indptr.to("cpu", torch.int32) for indptr in starts)), NO_PAGES, *checked)
            self._planned.add(number)
        found = attention.run_of("basee")(q, (k, v), out, None, has_lse)
        return (found[0], found[1].T.contiguous()) if has_lse else (found, None)


class FlashpagePrefillOnCpu(FlashpagePrefill):
    """On the CPU, which has float32 too."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
