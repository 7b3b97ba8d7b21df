"""Methods and attributes that are replaced on single objects of a model runner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]


def wrap_prepare_attn(model_state: Any, wrapper: Wrapper) -> None:
    """Wrap ``prepare_attn`` of a V2 runner's model state, which makes attention metadata."""
    model_state.prepare_attn = wrapper(model_state.prepare_attn)


def wrap_dispatch(cudagraph_manager: Any, wrapper: Wrapper) -> None:
    """Wrap ``dispatch`` of a V2 runner's CUDA-graph manager, which chooses the graph of a step."""
    cudagraph_manager.dispatch = wrapper(cudagraph_manager.dispatch)


def count_thinking_as_without_speculation(thinking_budget: Any) -> None:
    """Let a ``ThinkingBudgetStateHolder`` take rows for one a request, not for drafts."""
    thinking_budget.in_spec_mode = False


def count_draft_tokens(spec_decoding_stats: Any, count: int) -> None:
    """Add to the draft tokens of a ``SpecDecodingStats``."""
    spec_decoding_stats.num_draft_tokens += count
