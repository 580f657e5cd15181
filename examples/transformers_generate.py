"""A model of transformers generates with a paged cache; its tokens are those of eager attention."""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import flashpage.hf

torch.manual_seed(0)
flashpage.hf.register()
config = LlamaConfig(vocab_size=512, hidden_size=256, intermediate_size=512, num_attention_heads=2, num_hidden_layers=2)
model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
ids = torch.randint(1, 512, (2, 9))
given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}

eager = model.generate(ids, **given)
model.set_attn_implementation(flashpage.hf.NAME)
cache = flashpage.hf.PagedCache(model.config, page_size=16)
paged = model.generate(ids, past_key_values=cache, **given)
print("new tokens of two rows:", tuple(paged[:, 9:].shape))
print("equal to eager attention's:", torch.equal(eager, paged))
