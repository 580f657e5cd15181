"""A real vLLM engine in a process of its own: `python vllm_program.py JOB.json OUT.json`.

A job has `prompts`, `options` of `LLM`, and `models`, each with options of its own. The output has each model's tokens,
and the modules of its layers' attention, as the processes that run the model say.
"""

from __future__ import annotations

import itertools
import json
import sys
from typing import Any

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
    parts = [(layer.impl, getattr(layer, "prefill_backend", None)) for layer in layers]
    return sorted({type(part).__module__ for both in parts for part in both if part is not None})


def main(job_path: str, out_path: str) -> None:
    from vllm import LLM, SamplingParams

    with open(job_path) as file:
        job = json.load(file)
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    out = []
    for model in job["models"]:
        llm = LLM(**OPTIONS | job["options"] | model)
        answers = llm.generate(prompts, params, use_tqdm=False)
        modules = sorted(set(itertools.chain(*llm.collective_rpc(attention_modules))))
        out.append({"tokens": [list(answer.outputs[0].token_ids) for answer in answers], "attention": modules})
        del llm
    with open(out_path, "w") as file:
        json.dump(out, file)


if __name__ == "__main__":  # vLLM starts processes that import this file
    main(*sys.argv[1:])
