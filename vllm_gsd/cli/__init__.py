"""The ``vllm-gsd`` command."""
