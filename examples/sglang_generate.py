"""SGLang generates with flashpage as its attention, on the CPU or on a card; its tokens are those of transformers."""

import importlib.util
import sys
import tempfile

if importlib.util.find_spec("sglang") is None:
    sys.exit("SGLang is not installed: pip install -e '.[sglang]' in the checkout, or pip install sglang")

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

if __name__ == "__main__":  # SGLang starts processes that import this file
    import sglang

    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 2, "num_hidden_layers": 2}
    model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=512, **sizes), attn_implementation="eager").eval()
    prompts = [torch.randint(3, 512, (count,)).tolist() for count in (5, 40, 100)]
    on_cpu = {"device": "cpu", "cuda_graph_backend_prefill": "disabled", "cuda_graph_backend_decode": "disabled"}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        engine = sglang.Engine(
            model_path=folder,
            attention_backend="flashpage",
            skip_tokenizer_init=True,
            dtype="float32" if not torch.cuda.is_available() else "bfloat16",
            context_length=256,
            max_total_tokens=2048,
            log_level="error",
            **({} if torch.cuda.is_available() else on_cpu),
        )
    greedy = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    answers = engine.generate(input_ids=prompts, sampling_params=greedy)
    engine.shutdown()
    for prompt, answer in zip(prompts, answers, strict=True):
        given = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        alone = model.generate(torch.tensor([prompt]), **given)[0, len(prompt) :].tolist()
        print(f"prompt of {len(prompt)} tokens: equal to transformers': {answer['output_ids'] == alone}")
