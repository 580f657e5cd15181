"""Serves flashpage under FlashInfer's names, for programs whose imports cannot be changed."""
