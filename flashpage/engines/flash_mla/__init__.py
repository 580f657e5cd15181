"""FlashMLA: its functions for inference."""
