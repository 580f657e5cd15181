"""The plans of a group of an engine's layers, and other parts that the plugins of vLLM and SGLang share."""
