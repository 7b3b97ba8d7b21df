"""The keys of ``gsd.json`` and every check of them that needs no engine. Imports neither torch nor vLLM."""

from vllm_gsd.config.schema import GSDConfig, GSDConfigError, allowed, check_draft_model, extra_of, is_gsd, read

__all__ = ["GSDConfig", "GSDConfigError", "allowed", "check_draft_model", "extra_of", "is_gsd", "read"]
