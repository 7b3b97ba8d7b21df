"""Which requests are decoded without graph speculation."""

from typing import Any

from vllm_gsd.upstream import wire


def fallback_reason(request: Any) -> str | None:
    """Why a request is decoded without a graph, as a metric label; None if it uses one.

    The request is given as its runner's record, such as V1's ``CachedRequestState``.
    """
    if wire.opts_out(request.sampling_params):
        return "opt_out"
    if request.sampling_params.thinking_token_budget is not None:
        return "thinking_token_budget"
    return None
