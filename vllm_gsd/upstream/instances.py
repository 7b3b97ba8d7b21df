"""Changes to single objects, such as one model runner's model state."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.request import Request
    from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder
    from vllm.v1.spec_decode.metrics import SpecDecodingStats
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
    from vllm.v1.worker.gpu.model_states.interface import ModelState


def wrap(owner: ModelState | CudaGraphManager, name: str, wrapper: Callable[..., Any]) -> None:
    """Let a method of a V2 runner's model state or CUDA-graph manager call ``wrapper(upstream's method, ...)``."""
    setattr(owner, name, functools.partial(wrapper, getattr(owner, name)))


def count_thinking_as_without_speculation(thinking_budget: ThinkingBudgetStateHolder) -> None:
    """Make the thinking budget expect one row per request instead of a row per draft token."""
    thinking_budget.in_spec_mode = False


def count_draft_tokens(spec_decoding_stats: SpecDecodingStats, count: int) -> None:
    """Add ``count`` to the number of draft tokens."""
    spec_decoding_stats.num_draft_tokens += count


def end_before_last_token(request: Request) -> None:
    """Count no more computed tokens of a scheduler's ``Request`` than plain decoding has: all but the last one."""
    request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
