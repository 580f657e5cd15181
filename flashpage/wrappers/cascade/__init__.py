"""Attention over levels of tokens that requests share."""
