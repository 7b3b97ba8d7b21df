"""Every place where vLLM is wrapped or patched, and nothing else."""
