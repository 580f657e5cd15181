"""vLLM's attention operators over its block layout."""
