"""Names in SGLang: the backend's own, and those that several modules compare."""

NAME = "flashpage"
# The fields of SGLang's ServerArgs that name the model's backends.
NAMING_FIELDS = "attention_backend", "prefill_attention_backend", "decode_attention_backend"
# Architectures with attention in chunks (Llama 4).
CHUNKED = "Llama4ForConditionalGeneration", "Llama4ForCausalLM"
