"""A real vLLM engine in a process of its own: `python vllm_program.py JOB.json OUT.json`.

A job has `prompts`, `options` of `LLM`, and `models`, each with options of its own. A model may have `prompts` of its
own too, `is_cascading` (vLLM 0.26 has cascades, and switches them off on the CPU), and `answer`: "embed", "transcribe"
sounds, or "see" images. With `connector` it answers `again`, and the output has what the connector `loaded` for that,
and how many `tensors` of whole blocks it sees. With `ray_cards` workers are actors of a Ray with so many. The output
has each model's tokens, or embeddings; the modules of its layers' attention and the tokens of a block, as the processes
that run the model say; and what our builder was asked for and planned, and how many guesses were accepted, if all is
one process.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections import Counter
from types import ModuleType
from typing import Any

from encoder_models import RATE, sounds
from image_models import images

NEW_TOKENS = 12
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_batched_tokens": 128,  # longer prompts come in chunks, next to decodes of others
    "max_num_seqs": 8,
    "block_size": 32,  # CPU_ATTN needs multiples of it
    "enable_prefix_caching": True,
    "kv_cache_memory_bytes": 48 << 20,
}


def attention_modules(worker: Any) -> list[str]:
    layers = worker.model_runner.compilation_config.static_forward_context.values()
    parts = [(getattr(layer, "impl", None), getattr(layer, "prefill_backend", None)) for layer in layers]
    return sorted({type(part).__module__ for both in parts for part in both if part is not None})


def tokens_of_blocks(worker: Any) -> list[int]:
    layers = worker.model_runner.compilation_config.static_forward_context.values()
    caches = [getattr(layer, "kv_cache", None) for layer in layers]
    return sorted({cache.shape[-2] for cache in caches if hasattr(cache, "shape") and cache.dim() > 2})


def count_plans() -> Counter[str]:
    """Counts calls of our classes by their names, and the parts of a builder's steps by theirs."""
    from flashpage.engines.plugin.listed_plans import ListedPlans
    from flashpage.engines.vllm.plugin.builder import FlashpageBuilder
    from flashpage.engines.vllm.plugin.latent_prefill import FlashpagePrefill
    from flashpage.engines.vllm.plugin.planner import GroupPlanner

    found = Counter[str]()

    def counted(name: str, function: Any) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            found[name] += 1
            return function(*given, **named)

        return call

    for owner, names in (
        (FlashpageBuilder, ("build_for_drafting", "update_block_table")),
        (FlashpagePrefill, ("run_prefill_new_tokens", "run_prefill_context_chunk")),
        (ListedPlans, ("of",)),
    ):
        for name in names:
            setattr(owner, name, counted(f"{owner.__name__}.{name}", getattr(owner, name)))
    plan = GroupPlanner.plan

    def plan_and_count(*given: Any, **named: Any) -> Any:
        step = plan(*given, **named)
        found.update(type(part).__name__ for part in step.parts)
        found["not causal"] += not step.causal
        return step

    GroupPlanner.plan = plan_and_count  # type: ignore[method-assign]
    return found


def inspect_models_here() -> None:
    """vLLM imports a model's file in a new process first, lest CUDA starts here: seconds for each architecture."""
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda function: function()


def leave_out_pixtral() -> None:
    """vLLM compares an image encoder with Pixtral's, whose file needs a package of Mistral's."""
    from transformers import PixtralVisionConfig

    module: Any = ModuleType("vllm.model_executor.models.pixtral")
    module.PixtralHFEncoderInfo, module.PixtralVisionConfig = object, PixtralVisionConfig
    sys.modules[module.__name__] = module


def start_cascades(worker: Any) -> None:
    worker.model_runner.cascade_attn_enabled, worker.model_runner.num_sms = True, 4


def start_ray(cards: int) -> None:
    """Its processes know no variable of ours, like those of a cluster that was started before."""
    import ray

    ours = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("FLASHPAGE_")}
    ray.init(num_gpus=cards, num_cpus=cards, include_dashboard=False, log_to_driver=False)
    os.environ.update(ours)


def answer_again(llm: Any, prompts: list[list[int]], connector: str) -> dict[str, Any]:
    """The answers after the blocks of earlier ones have left the cache."""
    from vllm_connectors import loads_of

    llm.reset_prefix_cache()
    loads = loads_of(connector)
    return {"again": answer(llm, "generate", prompts), **loads}


def answer(llm: Any, how: str, prompts: list[list[int]]) -> list[list[Any]]:
    from vllm import SamplingParams

    given: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
    if how == "embed":
        return [found.outputs.embedding for found in llm.embed(given, use_tqdm=False)]
    if how == "transcribe":
        audio = [{"prompt": "", "multi_modal_data": {"audio": (sound, RATE)}} for sound in sounds(len(prompts))]
        given = [{"encoder_prompt": a, "decoder_prompt": b} for a, b in zip(audio, given, strict=True)]
    if how == "see":
        from PIL import Image

        for prompt, pixels in zip(given, images(len(prompts)), strict=True):
            if pixels is not None:
                prompt["multi_modal_data"] = {"image": Image.fromarray(pixels)}
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    return [list(found.outputs[0].token_ids) for found in llm.generate(given, params, use_tqdm=False)]


def main(job_path: str, out_path: str) -> None:
    from vllm import LLM

    with open(job_path) as file:
        job = json.load(file)
    if "ray_cards" in job:
        start_ray(job["ray_cards"])
    inspect_models_here()
    plans, out = count_plans(), []
    for model in job["models"]:
        prompts, how = model.pop("prompts", job["prompts"]), model.pop("answer", "generate")
        is_cascading, connector = model.pop("is_cascading", False), model.pop("connector", None)
        if connector:
            model["kv_transfer_config"] = {"kv_role": "kv_both", **connector}
        if how == "see":
            leave_out_pixtral()
        llm = LLM(**OPTIONS | job["options"] | model)
        if is_cascading:
            llm.collective_rpc(start_cascades)
        plans.clear()
        found: dict[str, Any] = {"tokens": answer(llm, how, prompts), "plans": dict(plans)}
        found["attention"] = sorted(set(itertools.chain(*llm.collective_rpc(attention_modules))))
        found["block tokens"] = sorted(set(itertools.chain(*llm.collective_rpc(tokens_of_blocks))))
        if connector:
            found |= answer_again(llm, prompts, connector["kv_connector"])
        if model.get("speculative_config"):
            counts = {one.name: one.value for one in llm.get_metrics() if hasattr(one, "value")}
            found |= {name: counts[f"vllm:spec_decode_num_{name}_tokens"] for name in ("draft", "accepted")}
        out.append(found)
        if "ray_cards" in job:
            llm.llm_engine.engine_core.shutdown()  # at exit vLLM would end its actors when Ray has ended
        del llm
        if connector:
            from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

            ensure_kv_transfer_shutdown()  # a process has one connector
    with open(out_path, "w") as file:
        json.dump(out, file)


if __name__ == "__main__":  # vLLM starts processes that import this file
    main(*sys.argv[1:])
