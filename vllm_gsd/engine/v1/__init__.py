"""The graph on vLLM's V1 model runner (the CPU's runner)."""
