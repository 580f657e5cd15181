"""Continuous batching of transformers over its own pages; decode steps read them by block tables."""

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig
from transformers.generation import ContinuousBatchingConfig
from transformers.utils import logging

import flashpage.hf

logging.set_verbosity_error()
torch.manual_seed(0)
flashpage.hf.register()
config = LlamaConfig(vocab_size=512, hidden_size=256, intermediate_size=512, num_attention_heads=2, num_hidden_layers=2)
model = AutoModelForCausalLM.from_config(config, attn_implementation="fpage").eval()
prompts = [torch.randint(1, 512, (length,)).tolist() for length in (9, 30, 3)]
generation = GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0)
batching = ContinuousBatchingConfig(page_size=16, num_blocks=16, max_batch_tokens=32, max_memory_percent=0.5)


def generated() -> list[list[int]]:
    outputs = model.generate_batch(prompts, generation_config=generation, continuous_batching_config=batching)
    return [output.generated_tokens for output in outputs.values()]


ours = generated()
model.set_attn_implementation("sdpa")
print("new tokens of three requests:", [len(tokens) for tokens in ours])
print("equal to sdpa's:", ours == generated())
