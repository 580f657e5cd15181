"""The extend of a draft by SGLang's own runner of CUDA graphs, on the CPU, where a replay runs again what was captured.

Its kit of tests compares the answers of a replay, padded to a batch of four, with those of an eager step.
"""

from __future__ import annotations

import contextlib
import unittest
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

REPLAYED: list[Any] = []  # the shapes that were replayed


class _Graphs:
    """SGLang's backend of graphs without graphs."""

    def __init__(self, runner: Any) -> None:
        self._captured: dict[Any, tuple[Any, Callable[[], Any]]] = {}

    def capture_session(self, stream: None) -> Any:
        return contextlib.nullcontext()

    def capture_one(self, shape: Any, run: Callable[[], Any], **given: Any) -> None:
        from sglang.srt.model_executor.forward_context import get_forward_context

        self._captured[shape] = get_forward_context(), run
        run()

    def replay(self, shape: Any, batch: Any) -> Any:
        from sglang.srt.model_executor.forward_context import forward_context

        REPLAYED.append(shape)
        context, run = self._captured[shape]
        with forward_context(context):
            return run()


@contextlib.contextmanager
def _seeded(seed: int, *, device: str) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def check() -> None:
    """Both backends in SGLang's runner, and its worker, which starts that runner."""
    import stand_in

    stand_in.install("sgl_kernel", "sgl_kernel.sparse_flash_attn", "datasets")
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
    from sglang.srt.speculative import eagle_draft_extend_cuda_graph_runner as runner
    from sglang.test.kits.attention_unittest.attention_methods import dense_attention, mla_attention
    from sglang.test.kits.attention_unittest.runner_modes import speculative_draft_extend_runner as kit

    def write_rows(pool: Any, layer: Any, slots: Any, k: torch.Tensor, k_rope: torch.Tensor) -> None:
        pool.set_kv_buffer(layer, slots, torch.cat([k, k_rope], -1), None)

    mode, captured = dense_attention.ForwardMode.DRAFT_EXTEND_V2, runner.EAGLEDraftExtendCudaGraphRunner
    dense = dense_attention.DenseAttentionCase("drafts", "flashpage", mode, 4, 2, 16, (14, 15, 33), (3, 3, 3))
    latent = mla_attention.MLAAttentionCase("latent drafts", "flashpage", mode, 4, 16, (14, 33), (4, 4))
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
    no_graph = contextlib.nullcontext(SimpleNamespace(stream=None))
    with (
        torch.no_grad(),
        mock.patch.object(kit, "_seeded_rng", _seeded),
        mock.patch.object(kit, "_single_rank_graph_capture", lambda **given: no_graph),
        mock.patch.object(runner, "resolve_decode_backend", _Graphs),
        mock.patch.object(captured, "warmup", lambda self: None),
        mock.patch("torch.cpu.Event", lambda: SimpleNamespace(record=lambda: None), create=True),
        mock.patch.object(MLATokenToKVPool, "set_mla_kv_buffer", write_rows),  # SGLang's is Triton's
    ):
        kit.run_dense_eagle_draft_extend_v2_cuda_graph_runner_case(unittest.TestCase(), dense, device="cpu")
        kit.run_mla_eagle_draft_extend_v2_cuda_graph_runner_case(unittest.TestCase(), latent, device="cpu", **sizes)
    assert [shape.size for shape in REPLAYED] == [4, 4]
    check_worker()


def check_worker() -> None:
    """SGLang's worker captures the extend of our backends, as the hook is there since the factory made one."""
    import stand_in
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
    from sglang.srt.speculative import eagle_worker_v2 as eagle

    from flashpage.engines.sglang.backend import FlashpageBackend
    from flashpage.engines.sglang.latent import FlashpageLatentBackend

    stand_in.install(*(f"sglang.srt.layers.attention.{name}_backend" for name in ("dsa", "deepseek_v4", "flashmla")))
    original = eagle.EagleDraftWorker._capture_cuda_graphs.__wrapped__
    changed = {"_is_cuda": True, "EAGLEDraftExtendCudaGraphRunner": lambda worker: "a graph"}
    changed["get_batch_sizes_to_capture"] = lambda runner: ([4], None)
    with mock.patch.multiple(eagle, **changed):
        for kind, is_disabled, by_theirs, by_ours in (
            (FlashpageBackend, False, None, "a graph"),
            (FlashpageLatentBackend, False, None, "a graph"),
            (FlashpageBackend, True, None, None),
            (TritonAttnBackend, False, "a graph", "a graph"),
        ):
            worker = eagle.EagleDraftWorker.__new__(eagle.EagleDraftWorker)
            config = SimpleNamespace(decode=SimpleNamespace(backend="full"))
            vars(worker).update(
                server_args=SimpleNamespace(model_impl="auto", cuda_graph_config=config),
                draft_extend_attn_backend=kind.__new__(kind),
                target_worker=SimpleNamespace(device="cuda"),
                draft_runner=None,
                speculative_num_steps=1,  # no other graph
                speculative_num_draft_tokens=4,
                device="cpu",
                gpu_id=0,
                _specialized_graph_memory_usage={},
                _specialized_graph_time_usage={},
            )
            with mock.patch.object(eagle, "check_cuda_graph_backend", lambda *names, answer=is_disabled: answer):
                original(worker)
                assert worker.cuda_graph_runner_for_draft_extend == by_theirs, kind
                worker._capture_cuda_graphs()
                assert worker.cuda_graph_runner_for_draft_extend == by_ours, kind
    assert eagle.TritonAttnBackend is TritonAttnBackend
