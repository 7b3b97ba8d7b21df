"""The graph on vLLM's Model Runner V2 (the GPUs' runner)."""
