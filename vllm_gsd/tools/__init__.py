"""The commands of ``vllm-gsd``."""
