"""PyTorch: its attention functions on flashpage's kernels."""
