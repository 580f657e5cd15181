"""FlashInfer's classes and functions, over the planning and running of the rooms below."""
