"""Draft KV of committed text for heads of one layer, whose keys and values depend on no other row.

The hidden state of such a head matters only where it drafts from it, at the end of a text. For all other rows, keys and
values suffice: less than a third of the head's products, and no attention.
"""

from typing import Any

import torch
from vllm.model_executor.models.llama_eagle import EagleLlamaForCausalLM
from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM

# Up to this many rows are as fast in the forward pass of the row to draft from.
FEW_ROWS = 32


class TextKV:
    """Writes the keys and values of ``model``, for which ``has_text_kv`` holds."""

    def __init__(self, model: Any):
        self.model = model.model
        self.layer = model.model.layers[0]

    def write(self, tokens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, features: torch.Tensor) -> None:
        """Compute the keys and values of rows and store them.

        Args:
            tokens: int32 [n]; positions, slots: int64 [n].
            features: the target's hidden states [n, hidden] of the tokens before the rows.
        """
        attention, attn = self.layer.self_attn, self.layer.self_attn.attn
        projected, _ = attention.qkv_proj(self._read(self.model.embed_input_ids(tokens), features))
        _, keys, values = projected.split([attention.q_size, attention.kv_size, attention.kv_size], dim=-1)
        keys, _ = attention.rotary_emb(positions, keys.contiguous(), None)
        heads = attention.num_kv_heads, attention.head_dim
        attn.impl.do_kv_cache_update(attn, keys.view(-1, *heads), values.view(-1, *heads), attn.kv_cache, slots)

    def _read(self, embeds: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """What the layer's attention reads."""
        if hasattr(self.layer, "hidden_norm"):  # an EAGLE-3 head
            return torch.cat([self.layer.input_layernorm(embeds), self.layer.hidden_norm(features)], dim=-1)
        return self.layer.input_layernorm(self.model.fc(torch.cat([embeds, features], dim=-1)))


def has_text_kv(model: Any) -> bool:
    """Whether a draft model is a head of one layer whose code in vLLM is known here."""
    if type(model) not in (EagleLlamaForCausalLM, Eagle3LlamaForCausalLM) or len(model.model.layers) > 1:
        return False
    return hasattr(model.model.layers[0].self_attn.attn.impl, "do_kv_cache_update")
