from stand_in import install

__version__ = "0.0"

install("vllm._custom_ops")
