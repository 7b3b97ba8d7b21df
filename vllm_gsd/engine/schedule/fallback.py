"""Which requests are decoded without graph speculation."""

from typing import Any

from vllm_gsd.upstream import wire


def fallback_reason(request: Any) -> str | None:
    """Why a request is decoded without a token graph, as a metric label; None if it uses one.

    Args:
        request: the runner's request record, such as V1's ``CachedRequestState``.
    """
    params = request.sampling_params
    if params is None:
        return "no_sampling_params"
    if wire.opts_out(params):
        return "opt_out"
    if request.prompt_embeds is not None:
        return "prompt_embeds"
    if getattr(params, "thinking_token_budget", None) is not None:
        return "thinking_token_budget"
    return None
