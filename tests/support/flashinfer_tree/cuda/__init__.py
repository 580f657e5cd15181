"""Stands in for cuda-python, whose names `flashinfer.comm` imports and a CPU does not call."""
