"""Token graphs on vLLM's Model Runner V2."""
