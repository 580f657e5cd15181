"""Launches kernels on the tensors of a layer, once a layer."""
