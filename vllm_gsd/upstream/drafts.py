"""What a draft model inside an engine changes of it, and what it takes from the target."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm_gsd.upstream.patching import replaced


@contextmanager
def tensor_parallel_group(group: Any) -> Iterator[None]:
    """While a model is built: its tensor-parallel group.

    Args:
        group: vLLM's ``GroupCoordinator``.
    """
    with replaced("vllm.distributed.parallel_state:_TP", lambda upstream: group):
        yield


def with_draft_config(vllm_config: Any, draft_model_config: Any) -> None:
    """Put a draft's ``ModelConfig`` where vLLM's EAGLE models look for their own shape.

    Args:
        vllm_config: the draft's own; the speculative config in it may be the target's, and stays as it is.
    """
    vllm_config.speculative_config = copy.copy(vllm_config.speculative_config)
    vllm_config.speculative_config.draft_model_config = draft_model_config


def share_ends(draft: Any, target: Any) -> None:
    """Give a draft of EAGLE's kind the target's embedding and LM head where it has none."""
    if not getattr(draft, "has_own_embed_tokens", False):
        embedding = target.model.embed_tokens
        draft.model.embed_tokens = getattr(embedding, "base_layer", embedding)  # without adapters
    if not getattr(draft, "has_own_lm_head", False):
        draft.lm_head = getattr(target.lm_head, "base_layer", target.lm_head)


def take_logits(model: Any) -> None:
    """Have a model's logits processor take logits, not hidden states."""
    model.logits_processor.logits_as_input = True
