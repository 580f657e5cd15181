"""Private names of FlashInfer's wrappers that engines read and write."""
