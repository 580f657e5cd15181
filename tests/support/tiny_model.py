"""Folders of tiny models with random weights under transformers' names, and prompts for them."""

from __future__ import annotations

import functools
import json
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 1000
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 512,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 40},
    "head_dim 80": {"head_dim": 80},
}


def write(folder: Path, name: str, **own: Any) -> Path:
    """Writes config.json, with fields of its own, and drawn weights, which depend on their names and shapes alone;
    returns the folder."""
    config = LLAMA | MODELS[name] | own
    hidden = config["hidden_size"]
    shapes = {"embed_tokens": (VOCABULARY, hidden), "norm": (hidden,), **_layer_shapes(config)}
    weights = {f"model.{name}.weight": _drawn(name, shape) for name, shape in shapes.items()}
    weights["lm_head.weight"] = _drawn("lm_head", (VOCABULARY, hidden))
    return _saved(folder, config, weights)


def write_eagle(folder: Path, name: str, engine: str = "sglang") -> Path:
    """A draft for EAGLE over one of these models: a layer of its own, and the model's embedding and head. vLLM puts its
    own word before the architecture's name, and has no bias."""
    config = LLAMA | MODELS[name] | {"num_hidden_layers": 1}
    if engine == "sglang":
        config["architectures"] = ["LlamaForCausalLMEagle"]
    hidden = config["hidden_size"]
    shapes = {"fc": (hidden, 2 * hidden), **_layer_shapes(config)}
    weights = {f"{name}.weight": _drawn(name, shape) for name, shape in shapes.items() if "input_" not in name}
    if engine == "sglang":
        weights["fc.bias"] = torch.zeros(hidden)
    return _saved(folder, config, weights)


def write_reference_windows(folder: Path, window: int) -> Path:
    """Unlimited-OCR's text model with the weights of "llama": vLLM's DeepSeek with plain attention and without experts,
    whose rows see the prompt, and of the tokens after it those of a window."""
    llama = LLAMA | MODELS["llama"]
    plain = {"qk_nope_head_dim": 0, "qk_rope_head_dim": 0, "v_head_dim": llama["head_dim"], "q_lora_rank": None}
    layers = {"first_k_dense_replace": llama["num_hidden_layers"], "n_routed_experts": 4, "moe_layer_freq": 1}
    names = {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2"}
    return write(folder, "llama", **names, **plain, **layers, rswa_window=window)


def _layer_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_rows, kv_rows = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(config["num_hidden_layers"]):
        shapes |= {f"layers.{i}.self_attn.{part}_proj": (kv_rows, hidden) for part in "kv"}
        shapes |= {f"layers.{i}.self_attn.q_proj": (q_rows, hidden), f"layers.{i}.self_attn.o_proj": (hidden, q_rows)}
        shapes |= {f"layers.{i}.mlp.{part}_proj": (inner, hidden) for part in ("gate", "up")}
        shapes |= {f"layers.{i}.mlp.down_proj": (hidden, inner)}
        shapes |= {f"layers.{i}.{part}_layernorm": (hidden,) for part in ("input", "post_attention")}
    return shapes


def _saved(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> Path:
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_gemma2(folder: Path) -> Path:
    """Gemma2 with layers that differ: a window of 32 tokens in every second one, and soft caps."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "query_pre_attn_scalar": 4}
    config = Gemma2Config(
        vocab_size=VOCABULARY,
        sliding_window=32,
        attn_logit_softcapping=5.0,
        max_position_embeddings=512,
        **sizes,
        **heads,
    )
    Gemma2ForCausalLM(config).save_pretrained(folder)
    return folder


def write_deepseek(folder: Path) -> Path:
    """DeepSeek-V3 with latent rows of the usual 512 + 64 columns, and without experts."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(0)
    DeepseekV3ForCausalLM(DeepseekV3Config(**_DEEPSEEK)).save_pretrained(folder)
    return folder


def write_deepseek_v32(folder: Path, listed: int) -> Path:
    """The same with an indexer, which lists so many tokens for each row."""
    from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

    torch.manual_seed(0)
    indexer = {"index_topk": listed, "index_n_heads": 4, "index_head_dim": 128}
    DeepseekV32ForCausalLM(DeepseekV32Config(**_DEEPSEEK, **indexer)).save_pretrained(folder)
    return folder


_DEEPSEEK: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048,
    "initializer_range": 0.15,  # so that greedy tokens differ from one another
    "tie_word_embeddings": False,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 2,
}


# Of models with a window of 32 tokens in some layers; weights are large, so that greedy tokens differ from one another.
_WINDOWED: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "sliding_window": 32,
    "max_position_embeddings": 1024,
    "initializer_range": 0.15,
}
# SGLang's names of Gemma 4's sizes, which it gives to checkpoints with images.
GEMMA4_NAMES: dict[str, Any] = {
    "head_dim": 64,
    "v_head_dim": 64,
    "swa_head_dim": 32,
    "swa_v_head_dim": 32,
    "swa_num_key_value_heads": 2,
}


def write_gpt_oss(folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """gpt-oss with four experts, and sinks that matter. SGLang gives some layers the type that the configuration
    names, whatever the engine's is."""
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(0)
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    rope = {"rope_type": "default", "rope_theta": 1e4}
    limit = {"swiglu_limit": 7.0}  # transformers' own, which older versions do not write down
    model = GptOssForCausalLM(GptOssConfig(num_hidden_layers=4, rope_parameters=rope, **limit, **experts, **_WINDOWED))
    for layer in model.model.layers:
        sinks = torch.nn.init.normal_(layer.self_attn.sinks, 2.0)
        sinks.data.copy_(sinks.data.bfloat16())  # the type that SGLang's have
    model.to(dtype).save_pretrained(folder)
    return folder


def write_exaone4(folder: Path) -> Path:
    """EXAONE 4 with windows in two of three layers; the third has no rotation."""
    from transformers import Exaone4Config, Exaone4ForCausalLM

    torch.manual_seed(0)
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    rope = {"rope_type": "default", "rope_theta": 1e6}
    config = Exaone4Config(
        num_hidden_layers=3,
        layer_types=kinds,
        sliding_window_pattern="LLG",
        rope_parameters=rope,
        tie_word_embeddings=False,
        **_WINDOWED,
    )
    Exaone4ForCausalLM(config).save_pretrained(folder)
    return folder


def write_llama4(folder: Path) -> Path:
    """Llama 4 without experts: three layers see chunks of 40 tokens, the fourth sees all and has no rotation. A folder
    in it, `halves`, has the model for a rotation of a head's halves, not of neighbours: SGLang's alone."""
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    torch.manual_seed(0)
    config = Llama4TextConfig(
        num_hidden_layers=4,
        attention_chunk_size=40,
        interleave_moe_layer_step=100,
        intermediate_size_mlp=512,
        attn_temperature_tuning=False,
        use_qk_norm=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        tie_word_embeddings=False,
        **{name: value for name, value in _WINDOWED.items() if name != "sliding_window"},
    )
    model = Llama4ForCausalLM(config)
    model.save_pretrained(folder)
    with torch.no_grad():
        for layer in model.model.layers:
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                pairs = projection.weight.view(-1, config.head_dim // 2, 2, config.hidden_size)
                projection.weight.copy_(pairs.transpose(1, 2).reshape(projection.weight.shape))
    model.save_pretrained(folder / "halves")
    return folder


def write_sdar(folder: Path) -> Path:
    """SDAR, a diffusion model of blocks of four tokens, which has the weights of a Qwen 3. SGLang knows the number of
    its mask's token, and transformers no such model."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    own = {"vocab_size": 151680, "hidden_size": 32, "initializer_range": 0.3, "num_hidden_layers": 2}
    rope = {"rope_type": "default", "rope_theta": 1e4}
    kept = {name: value for name, value in _WINDOWED.items() if name != "sliding_window"}
    config = Qwen3Config(**kept | own, rope_parameters=rope, tie_word_embeddings=False)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": ["SDARForCausalLM"]}))
    return folder


def write_gemma4(folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Gemma 4 with wider heads in layers without a window; the last two layers read the K and V of earlier ones."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    torch.manual_seed(0)
    config = Gemma4TextConfig(
        num_hidden_layers=6,
        layer_types=["sliding_attention", "full_attention"] * 3,
        num_kv_shared_layers=2,
        global_head_dim=64,
        hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=VOCABULARY,
        use_double_wide_mlp=False,
        **_WINDOWED,
    )
    model = Gemma4ForCausalLM(config)
    with torch.no_grad():  # small, as they are the output's weights too, and would repeat the last token
        model.model.embed_tokens.weight.mul_(0.1)
        model.model.embed_tokens_per_layer.weight.mul_(0.3)
    model.to(dtype).save_pretrained(folder)
    return folder


def _drawn(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Random weights, large enough for attention to decide the next token; norms are 1."""
    if len(shape) == 1:
        return torch.ones(shape)
    gain = shape[1] ** 0.5 if "embed" in name else 1.4 if name.endswith(("q_proj", "k_proj")) else 1.0
    drawn = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=drawn) * (gain / shape[1] ** 0.5)


def prompts() -> list[list[int]]:
    """Prompts of 3 to 364 tokens; every second one begins with the same 64."""
    drawn = random.Random(3)
    shared = [drawn.randrange(3, VOCABULARY) for _ in range(64)]
    lengths = (3, 17, 40, 64, 100, 150, 200, 300)
    return [
        (shared if i % 2 else []) + [drawn.randrange(3, VOCABULARY) for _ in range(n)] for i, n in enumerate(lengths)
    ]


def prompts_with_prefix() -> list[list[int]]:
    """As many requests as vLLM wants for a cascade; they begin with the same 300 tokens."""
    drawn = random.Random(5)
    shared = [drawn.randrange(3, VOCABULARY) for _ in range(300)]
    return [shared + [drawn.randrange(3, VOCABULARY) for _ in range(1 + 3 * i)] for i in range(8)]


def expected_tokens(folder: Path, count: int, given_prompts: list[list[int]] | None = None) -> list[list[int]]:
    """Greedy tokens by transformers with its plain attention, one prompt after the other."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    found = []
    for prompt in given_prompts or prompts():
        given = torch.tensor([prompt])
        with torch.no_grad():
            out = model.generate(given, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0)
        found.append(out[0, len(prompt) :].tolist())
    return found


def answers_in_windows(
    folder: Path, asked: list[list[int]], count: int, window: int, device: str = "cpu"
) -> list[dict[str, Any]]:
    """Greedy tokens in fp32, and the log-probabilities of the best five, of a Llama whose rows see their prompt, and of
    the tokens after it those of a window."""
    from transformers import LlamaForCausalLM

    given = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = LlamaForCausalLM.from_pretrained(folder, **given).eval().to(device)

    def masked(ids: torch.Tensor, seen: int) -> torch.Tensor:
        t = torch.arange(ids.shape[1], device=device)
        is_seen = (t <= t[:, None]) & ((t < seen) | (t[:, None] - t < window))
        mask = torch.where(is_seen, 0.0, torch.finfo(torch.float32).min)[None, None]
        return model(input_ids=ids, attention_mask=mask, use_cache=False).logits

    return [greedy(functools.partial(masked, seen=len(prompt)), prompt, count, device) for prompt in asked]


def greedy(
    logits_of: Callable[[torch.Tensor], torch.Tensor], prompt: list[int], count: int, device: str
) -> dict[str, Any]:
    """Tokens after a prompt, and the log-probabilities of the best five at each step, by a model that is called with
    all tokens so far."""
    tokens, steps = list(prompt), []
    with torch.no_grad():
        for _ in range(count):
            logits = logits_of(torch.tensor([tokens], device=device))[0, -1]
            best = logits.float().log_softmax(-1).topk(5)
            tokens.append(int(best.indices[0]))
            steps.append(dict(zip(map(str, best.indices.tolist()), best.values.tolist(), strict=True)))
    return {"tokens": tokens[len(prompt) :], "logprobs": steps}


def expected_tokens_in_windows(folder: Path, count: int, window: int) -> list[list[int]]:
    """As expected_tokens, under that mask."""
    return [answer["tokens"] for answer in answers_in_windows(folder, prompts(), count, window)]
