"""The keys of ``gsd.json`` and all checks that need no engine. Imports neither torch nor vLLM."""

from vllm_gsd.config.schema import GSDConfig, allowed, check_draft_model, extra_of, is_gsd
from vllm_gsd.config.source import GSDConfigError, read

__all__ = ["GSDConfig", "GSDConfigError", "allowed", "check_draft_model", "extra_of", "is_gsd", "read"]
