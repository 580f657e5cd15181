"""The graphs of continuous batching on the CPU: a capture keeps a step's arguments, and a replay runs them again."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch
import transformers
from transformers.generation.continuous_batching import initialization, model_runner

from flashpage.engines.transformers import decode, prompts

HAS_TABLES = hasattr(initialization, "ATTN_TYPE_TO_ALLOCATOR")  # of the version, for names other than FlashAttention's


class Graph:
    """Replays see the tensors of the capture, with what they hold now, and nothing else that is new."""

    def __init__(self, step: Callable[[], None], is_decode: bool, replays: list[Graph]) -> None:
        self.step, self.is_decode, self.replays = step, is_decode, replays

    def replay(self) -> None:
        self.replays.append(self)
        for module in (decode, prompts):  # what a forward keeps for its layers
            module._local.__dict__.clear()
        self.step()

    def reset(self) -> None:
        pass


def use_graphs(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """Lets `generate_batch` capture steps on the CPU; returns the list of replays."""
    replays: list[Graph] = []

    def capture(self: Any, forward: Callable[..., None], stream: Any, *args: Any) -> None:
        forward(*args)
        inputs = self.inputs_and_outputs
        inputs.set_graph(Graph(lambda: forward(*args), inputs.use_block_table, replays))

    monkeypatch.setattr(model_runner.ModelRunner, "_capture_graph", capture)
    for name in ("get_memory_pools", "get_cuda_pools"):  # of newer versions, and of older ones
        monkeypatch.setattr(model_runner, name, lambda: (None, 0), raising=False)
    if hasattr(initialization, "get_accelerator_graph_name"):
        monkeypatch.setattr(initialization, "get_accelerator_graph_name", lambda: "CUDAGraph")
    else:
        monkeypatch.setattr(initialization, "decide_use_cuda_graphs", lambda **given: None)
    return replays


def planned_by_the_host(*args: Any, **given: Any) -> NoReturn:
    """In the place of Attention.plan: fails the requests of the step."""
    raise AssertionError("the host plans a step that is captured")


def resolved(config: Any, device: str, **given: Any) -> Any:
    """A ContinuousBatchingConfig with what transformers chooses for it."""
    resolve = initialization.resolve_continuous_batching_config
    more = {"device": torch.device(device)} if "device" in inspect.signature(resolve).parameters else {}
    batching = transformers.generation.ContinuousBatchingConfig(**given)
    return resolve(config, batching, None, has_logit_processors=False, **more)
