"""Whether log-probabilities of a vLLM engine depend on other requests: `python vllm_invariance.py MODEL OUT.json`.

With VLLM_BATCH_INVARIANT=1, in one process. On a card all operators are vLLM's own batch-invariant ones; on the CPU,
where it has none, plain ones take their place.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import alone_or_together
import torch
from vllm_program import OPTIONS


def use_plain_operators() -> None:
    from vllm.model_executor.determinism import batch_invariant
    from vllm.model_executor.layers import utils

    batch_invariant.enable_batch_invariant_mode = lambda: None  # its operators are Triton's, which the CPU has not
    utils.dispatch_cpu_unquantized_gemm = lambda layer, **given: setattr(layer, "cpu_linear", alone_or_together.by_rows)


def main(model: str, out_path: str) -> None:
    from vllm import LLM, SamplingParams

    from flashpage.engines.vllm.plugin import builder

    options = OPTIONS | {"max_model_len": alone_or_together.TOKENS, "max_num_batched_tokens": 512}
    if torch.cuda.is_available():
        options |= {"attention_backend": "CUSTOM", "load_format": "dummy", "dtype": "bfloat16", "block_size": 16}
    else:
        use_plain_operators()
    builder.SPLIT_TOKENS = alone_or_together.SPLIT_TOKENS
    llm = LLM(model=model, **options)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False, logprobs=3)

    def ask(prompts: list[list[int]]) -> list[Any]:
        given: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
        answers = [found.outputs[0].logprobs for found in llm.generate(given, params, use_tqdm=False)]
        llm.reset_prefix_cache()
        return [[sorted((token, one.logprob) for token, one in step.items()) for step in steps] for steps in answers]

    with open(out_path, "w") as file:
        json.dump(alone_or_together.equal(ask), file)


if __name__ == "__main__":
    main(*sys.argv[1:])
