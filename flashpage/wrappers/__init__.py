"""FlashInfer's classes and functions, as adapters of the library's own planning and running."""
