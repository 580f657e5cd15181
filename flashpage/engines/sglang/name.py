"""The name of the backend in SGLang."""

NAME = "flashpage"
# The fields of SGLang's ServerArgs that name the model's backends.
NAMING_FIELDS = "attention_backend", "prefill_attention_backend", "decode_attention_backend"
