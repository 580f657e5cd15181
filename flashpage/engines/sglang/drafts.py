"""The steps of an EAGLE draft: one backend for each, all planned together before the first one runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from .backends import backend_of
from .planner import Branches


class FlashpageDraftSteps:
    """SGLang's interface of a draft of several steps. Step i has i + 1 tokens more than `seq_lens` says."""

    needs_cpu_seq_lens = False

    def __init__(self, runner: Any, topk: int, speculative_num_steps: int) -> None:
        self.topk, self.speculative_num_steps = topk, speculative_num_steps
        given = topk, speculative_num_steps
        steps = (Branches(*given, step, runner.page_size) for step in range(speculative_num_steps - 1))
        self.attn_backends = [backend_of(runner, branches) for branches in steps]

    def init_forward_metadata(self, forward_batch: Any) -> None:
        for backend in self.attn_backends:
            backend.init_forward_metadata(_as_decode(forward_batch))

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        for backend in self.attn_backends:
            backend.init_cuda_graph_state(max_bs, max_num_tokens)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Nothing is prepared outside of the graph."""

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        for backend in self.attn_backends:
            backend.init_forward_metadata_in_graph(_as_decode(forward_batch))

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1


def _as_decode(forward_batch: Any) -> Any:
    """The fields of a ForwardBatch that a plan reads; each step has one row for each branch, whatever its mode says."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    return SimpleNamespace(
        forward_mode=ForwardMode.DECODE,
        seq_lens=forward_batch.seq_lens,
        req_pool_indices=forward_batch.req_pool_indices,
        encoder_lens=None,
        spec_info=None,
    )
