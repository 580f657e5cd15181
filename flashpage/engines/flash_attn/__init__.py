"""flash-attn: its functions for inference."""
