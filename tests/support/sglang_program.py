"""Real SGLang engines in a process of its own: `python sglang_program.py JOB.json OUT.json`.

A job has `prompts`, and `engines`, each with options of `Engine`; the first is a Llama, the last a DeepSeek. An engine
may have an `answer`: "embed", "transcribe" sounds, or "alone", whether its log-probabilities depend on other requests.
SGLang's own kit of tests runs too. The output has each engine's tokens, or what else it was asked for, the class of the
pool of tokens that our backend got, and the kinds of steps that it planned; "" and none if the engine has another
backend.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import sys
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import alone_or_together
import pytest
import sglang_drafts
import torch
from encoder_models import sounds

NEW_TOKENS = 12
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "context_length": 512,
    "chunked_prefill_size": 128,  # longer prompts come in chunks
    "enable_mixed_chunk": True,  # next to decodes of others
    "max_running_requests": 8,
    "max_total_tokens": 4096,
    "cuda_graph_backend_prefill": "disabled",
    "cuda_graph_backend_decode": "disabled",
    "log_level": "error",
}


def made(**given: Any) -> tuple[Any, Any]:
    """SGLang's arguments, and a view of what it resolves them to, which newer versions leave to launchers."""
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.server_args import ServerArgs

    arguments = ServerArgs(**given)
    getattr(arguments, "resolve_once", lambda: None)()
    vars(arguments).pop("_resolution_finished", None)  # which seals them
    return arguments, resolved_view(arguments)


def published(given: dict[str, Any]) -> contextlib.AbstractContextManager[Any]:
    """In newer versions, makes arguments those of the process, which code reads that is given none."""
    from sglang.srt import runtime_context

    override = getattr(runtime_context.get_context(), "override_server_args", None)
    return contextlib.nullcontext() if override is None else override(**given)


def check_answers(model: str) -> None:
    """What SGLang asks before a model is loaded, and its own lists of names."""
    from sglang.srt.configs.model_config import AttentionArch
    from sglang.srt.speculative.draft_utils import DraftBackendFactory
    from sglang.srt.utils.common import support_triton

    from flashpage.engines.sglang.support import model_config_of

    assert not support_triton("flashpage")
    usual = {"model_path": model, "device": "cpu", "attention_backend": "flashpage"}
    arguments, view = made(**usual, enable_deterministic_inference=True)
    assert not view.disable_radix_cache
    arguments.check_server_args()
    config = model_config_of(arguments)
    config.attention_arch, config.kv_lora_rank, config.qk_rope_head_dim = AttentionArch.MLA, 512, 64
    config.hf_text_config.index_topk = 8
    refused(arguments.check_server_args, "DeepSeek sparse attention")
    arguments.kv_cache_dtype = "fp4_e2m1"
    refused(arguments.check_server_args, "--kv-cache-dtype fp4_e2m1")
    factory = DraftBackendFactory.__new__(DraftBackendFactory)
    vars(factory).update(draft_attn_backend="flashpage", speculative_num_steps=3, topk=1)
    steps = {"triton": factory._create_triton_decode_backend}
    factory.draft_model_runner = SimpleNamespace(model_config=config, page_size=1, server_args=arguments)
    names = "decode_attention_backend", steps, "{backend_type} is unknown"
    with published(usual):
        refused(lambda: factory._create_backend(*names), "DeepSeek sparse attention")  # by our backend: it was chosen


def check_hooks(llama: str, deepseek: str) -> None:
    """What SGLang refuses by lists of names, and admits with our hooks."""
    from sglang.srt.arg_groups import speculative_hook
    from sglang.srt.server_args import ServerArgs

    usual = {"device": "cpu", "attention_backend": "flashpage"}
    arguments, view = made(model_path=deepseek, **usual, enable_deterministic_inference=True)
    assert view.attention_backend == "flashpage" and not view.disable_radix_cache
    if hasattr(ServerArgs, "_handle_deterministic_inference"):  # newer versions ask a list that has our name
        original = ServerArgs._handle_deterministic_inference.__wrapped__
        refused(lambda: original(arguments), "deterministic inference with DeepSeek models")
    trees = {"speculative_num_steps": 3, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 4}
    drafts = {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": llama}
    arguments, view = made(model_path=llama, page_size=16, **usual, **drafts, **trees)
    arguments.check_server_args()
    assert view.attention_backend == "flashpage" and view.page_size == 16
    refused(lambda: speculative_hook._handle_eagle_family.__wrapped__(arguments), "with page_size > 1")
    arguments.device = "cuda"  # n-gram drafts need a card
    speculative_hook._handle_ngram(arguments)
    refused(lambda: speculative_hook._handle_ngram.__wrapped__(arguments), "with page_size(16) > 1")
    check_replacements(arguments)


def check_replacements(arguments: Any) -> None:
    """Where SGLang puts another backend in the place of ours."""
    from sglang.srt.arg_groups import overrides, speculative_hook

    resolve = speculative_hook._resolve_dflash_draft_attention_backend
    resolve(arguments)
    assert overrides.resolved_view(arguments).speculative_draft_attention_backend == "flashpage"
    if not hasattr(speculative_hook, "DRAFT_ATTENTION_BACKEND_CHOICES"):  # which has our name
        resolve.__wrapped__(arguments)
        assert arguments.speculative_draft_attention_backend == "flashinfer"
    graphs = SimpleNamespace(decode=SimpleNamespace(backend="full"))
    view = SimpleNamespace(
        dllm_algorithm="LowConfidence",
        attention_backend="flashpage",
        prefill_attention_backend=None,
        decode_attention_backend=None,
        cuda_graph_config=graphs,
    )
    assert overrides._dllm_attention_backend(view) == {}
    assert overrides._dllm_attention_backend.__wrapped__(view) == {"attention_backend": "flashinfer"}


def refused(call: Callable[[], object], reason: str) -> None:
    try:
        call()
    except (AssertionError, ValueError) as error:
        assert reason in str(error), error
    else:
        raise AssertionError(f"not refused: {reason}")


def check_kit() -> None:
    """The cases of SGLang's own kit for its attention backends."""
    from sglang.test.kits.attention_unittest.attention_methods import dense_attention as kit

    lists = kit.make_dense_cases, kit.make_swa_no_prefix_input_config_cases, kit.make_swa_prefix_input_config_cases
    cases = [case for make in lists for case in make("flashpage")]
    assert len(cases) >= 14
    for case in cases:
        with torch.no_grad():  # newer kits leave that to their program
            kit.run_dense_attention_case(unittest.TestCase(), case, device="cpu")


def allow_window_pools() -> None:
    """SGLang gives windows their own pool for few models, none of which is small. A model of a job gets one if its
    configuration says so, whatever SGLang's list says."""
    from sglang.srt.configs.model_config import ModelConfig

    derive = ModelConfig._derive_hybrid_model

    def derive_as_configured(self: Any) -> None:
        self.disable_hybrid_swa_memory = False
        derive(self)

    ModelConfig._derive_hybrid_model = derive_as_configured


def note_pools_and_steps(path: Path) -> None:
    """Our backend writes down its pool, and each new kind of step that it plans, also in the process of a scheduler."""
    from flashpage.engines.sglang.backend import FlashpageBackend

    make, plan = FlashpageBackend.__init__, FlashpageBackend.init_forward_metadata

    def make_and_note(self: Any, *args: Any, **given: Any) -> None:
        make(self, *args, **given)
        path.write_text(type(self.token_to_kv_pool).__name__)

    def plan_and_note(self: Any, forward_batch: Any) -> None:
        plan(self, forward_batch)
        noted = path.read_text()
        if (step := forward_batch.forward_mode.name) not in noted.split()[1:]:
            path.write_text(f"{noted} {step}")

    FlashpageBackend.__init__ = make_and_note
    FlashpageBackend.init_forward_metadata = plan_and_note


def rotate_llama4() -> None:
    """SGLang's Llama 4 takes rotated rows from where kernels for cards write them, and elsewhere from the result."""
    from sglang.srt.models import llama4

    llama4._is_npu = True


def hear_sounds() -> None:
    """Audio has a sound's number, as packages that decode files are not here."""
    from sglang.srt.multimodal.processors import whisper

    whisper.load_audio = lambda number: sounds(int(number) + 1)[-1]


@contextlib.contextmanager
def only_attention_depends_on_others() -> Iterator[None]:
    """The processes of an engine that is started here multiply each row by itself: deterministic mode, and "alone"."""
    import sglang.srt.batch_invariant_ops as operators

    from flashpage.engines.sglang import backend

    by_rows = alone_or_together.by_rows
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(operators, "enable_batch_invariant_mode", lambda: None)  # they are Triton's
        patched.setattr(torch.nn.functional, "linear", by_rows)
        patched.setattr(torch, "matmul", lambda x, transposed: by_rows(x, transposed.T))  # logits
        patched.setattr(backend, "SPLIT_TOKENS", alone_or_together.SPLIT_TOKENS)
        patched.setenv("FLASHPAGE_THREADS", alone_or_together.THREADS)
        yield


def answer(engine: Any, how: str, prompts: list[list[int]]) -> list[Any]:
    params = {"temperature": 0.0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    if how == "embed":
        return [found["embedding"] for found in engine.encode([" ".join(f"[{t}]" for t in p) for p in prompts])]
    if how == "transcribe":
        heard: Any = {"audio_data": [str(i) for i in range(len(prompts))]}
        return [found["output_ids"] for found in engine.generate(input_ids=prompts, sampling_params=params, **heard)]
    if how == "alone":

        def ask(some: list[list[int]]) -> list[Any]:
            found = engine.generate(input_ids=some, sampling_params=params, return_logprob=True, top_logprobs_num=3)
            engine.flush_cache()
            return [one["meta_info"]["output_top_logprobs"] for one in found]

        return alone_or_together.equal(ask)
    return [found["output_ids"] for found in engine.generate(input_ids=prompts, sampling_params=params)]


def main(job_path: str, out_path: str) -> None:
    import sglang.srt.models.registry  # noqa: F401, models are imported once, and not in each process
    from sglang.srt.entrypoints import engine
    from sglang.srt.plugins import load_plugins

    # SGLang would start its processes from nothing, and each imports it again: a quarter of a minute for each.
    multiprocessing.set_start_method("fork", force=True)
    engine.mp.set_start_method = lambda *args, **given: None
    with open(job_path) as file:
        job = json.load(file)
    load_plugins()
    allow_window_pools()
    notes = Path(out_path + ".notes")
    note_pools_and_steps(notes)
    check_answers(job["engines"][0]["model_path"])
    check_hooks(job["engines"][0]["model_path"], job["engines"][-1]["model_path"])
    hear_sounds()
    rotate_llama4()
    out = []
    for options in job["engines"]:
        how, prompts = options.pop("answer", "generate"), options.pop("prompts", job["prompts"])
        is_deterministic = how == "alone" or options.get("enable_deterministic_inference")
        with only_attention_depends_on_others() if is_deterministic else contextlib.nullcontext():
            found = engine.Engine(**OPTIONS | options)
        answers = answer(found, how, prompts)
        pool, *steps = notes.read_text().split() if notes.exists() else [""]
        notes.unlink(missing_ok=True)
        out.append({"tokens": answers, "pool": pool, "steps": steps})
        found.shutdown()
    check_kit()
    sglang_drafts.check()
    with open(out_path, "w") as file:
        json.dump(out, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
