"""vLLM generates with flashpage as its attention, on the CPU or on a card; its tokens are those of transformers."""

import importlib.util
import os
import sys
import tempfile

if importlib.util.find_spec("vllm") is None:
    sys.exit("vLLM is not installed: pip install -e '.[vllm]' in the checkout, or pip install vllm")
# On the CPU vLLM takes no name of a backend: flashpage stands in place of CPU_ATTN. On a card, "CUSTOM" chooses it.
os.environ["FLASHPAGE_VLLM"] = "on"
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

if __name__ == "__main__":  # vLLM starts processes that import this file
    from vllm import LLM, SamplingParams

    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 2, "num_hidden_layers": 2}
    model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=512, **sizes), attn_implementation="eager").eval()
    prompts = [torch.randint(3, 512, (count,)).tolist() for count in (5, 40, 100)]
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        llm = LLM(
            folder,
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            max_model_len=256,
            kv_cache_memory_bytes=32 << 20,
        )
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    answers = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], greedy, use_tqdm=False)
    for prompt, answer in zip(prompts, answers, strict=True):
        given = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        alone = model.generate(torch.tensor([prompt]), **given)[0, len(prompt) :].tolist()
        print(f"prompt of {len(prompt)} tokens: equal to transformers': {list(answer.outputs[0].token_ids) == alone}")
