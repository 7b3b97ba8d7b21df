"""Changes to vLLM's configuration and models that a draft model needs inside the target's engine."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from vllm import _custom_ops as ops
from vllm.model_executor.models.interfaces import supports_multimodal

from vllm_gsd.cpu.linear import linear, pack_weight
from vllm_gsd.upstream.patching import replaced

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.distributed.parallel_state import GroupCoordinator


# What the names of a draft's layers begin with, because the target may have layers of the same names.
PREFIX = "draft_model"


def tensor_parallel_group(group: GroupCoordinator) -> AbstractContextManager[None]:
    """Build models inside this context with ``group`` as their tensor-parallel group."""
    return replaced("vllm.distributed.parallel_state:_TP", lambda upstream: group)


def with_draft_config(vllm_config: VllmConfig, draft_model_config: ModelConfig, block_depth: int | None = None) -> None:
    """Store the draft's ``ModelConfig`` where vLLM's EAGLE and DFlash models read their shape.

    DFlash drafts also read ``block_depth`` there, the number of tokens that they predict at once.
    """
    # The target may have the same object.
    vllm_config.speculative_config = copy.copy(vllm_config.speculative_config)
    vllm_config.speculative_config.draft_model_config = draft_model_config
    if block_depth is not None:
        vllm_config.speculative_config.num_speculative_tokens = block_depth


def name_layers_as_stored(quant_config: Any) -> None:
    """Make the quantisation config of a draft see layers by their names in the checkpoint, without ``PREFIX``.

    By these it finds layers that are not quantised, or otherwise than the others.
    """
    upstream = quant_config.get_quant_method

    def get_quant_method(layer: torch.nn.Module, prefix: str) -> Any:
        return upstream(layer, prefix.removeprefix(f"{PREFIX}."))

    quant_config.get_quant_method = get_quant_method


def share_ends(draft: Any, target: Any) -> None:
    """Give a draft the target's embedding and LM head where it has none of its own, and an MTP module in any case.

    A copy of the embedding is replaced by it, too.

    Args:
        draft: an EAGLE or DFlash draft, or an MTP module, of which the checkpoint may hold copies of the target's ends.
        target: the target, which may be multimodal.
    """
    target = target.get_language_model() if supports_multimodal(target) else target
    # Without LoRA adapters.
    embedding, head = (getattr(end, "base_layer", end) for end in (target.model.embed_tokens, target.lm_head))
    # Gemma 4's drafts have both and say nothing else; MTP modules say nothing.
    has_both = not getattr(draft, "dspark_shares_target_embeddings", True)
    own = draft.model.embed_tokens.weight
    if not getattr(draft, "has_own_embed_tokens", has_both) or torch.equal(own, embedding.weight):
        draft.model.embed_tokens = embedding
    if getattr(draft, "has_own_lm_head", has_both):
        return
    draft.lm_head = head
    for module in draft.model.modules():
        if hasattr(module, "shared_head"):  # some MTP modules have the LM head in their layer
            module.shared_head.head = head


def keep_all_keys(layers: Iterable[Any]) -> None:
    """Make attention layers keep the keys and values of all tokens; their sliding windows still limit the attention.

    All layers of an engine share one block table, whose blocks hold the whole text.
    """
    for layer in layers:
        layer.sliding_window = None


def normalise_keys_by_layer(model: Any) -> None:
    """Make a draft of whole blocks normalise the keys of its context with each layer's own weights on CPUs.

    vLLM's kernel for CPUs takes those of the first layer for all.
    """
    inner = model.model

    def normalise(keys: torch.Tensor) -> torch.Tensor:
        """Keys [layers, n, heads, head size]; the weights are [layers, head size]."""
        found = torch.empty_like(keys)
        for out, rows, weight in zip(found, keys, inner._k_norm_weights, strict=True):
            ops.rms_norm(out, rows, weight, inner._rms_norm_eps)
        return found

    inner._normalize_context_k = normalise


def pack_context_projections(model: Any, packs: Callable[[torch.Tensor], bool]) -> None:
    """Make a draft of whole blocks compute the keys and values of its context with ``vllm_gsd.cpu.linear``.

    vLLM multiplies the weights of all layers at once. Only if they are quantised does it call the projection of each
    layer, and these can be replaced. Weights that ``packs`` does not accept stay as they are.
    """
    inner = model.model
    weight = getattr(inner, "_fused_kv_weight", None)  # Gemma 4's drafts compute both from other weights
    if weight is None or inner._fused_kv_bias is not None:
        return
    parts = weight.chunk(inner._num_attn_layers)
    if not packs(parts[0]):
        return

    def projection(packed: torch.Tensor) -> Callable[[torch.Tensor], tuple[torch.Tensor, None]]:
        return lambda states: (linear(states, packed), None)

    inner._fused_kv_weight = None
    inner._context_qkv_projs = [projection(pack_weight(part)) for part in parts]
    inner._context_q_sizes = [0] * len(parts)


def take_logits(model: Any) -> None:
    """Make a model's logits processor take logits instead of hidden states."""
    model.logits_processor.logits_as_input = True
