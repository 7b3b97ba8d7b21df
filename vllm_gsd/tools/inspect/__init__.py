"""``vllm-gsd inspect``: a page that shows what token graphs did for a request."""
