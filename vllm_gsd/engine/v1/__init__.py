"""Graph speculation on vLLM's Model Runner V1, which CPUs use."""
