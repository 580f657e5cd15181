"""What the plugins of vLLM and SGLang share: the plans of a group of an engine's layers."""
