"""vLLM: its attention backend (plugin/), and its first operators over their block layout."""
