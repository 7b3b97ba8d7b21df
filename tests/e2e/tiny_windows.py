"""Tiny targets and drafts whose layers have sliding windows, capped scores or attention sinks."""

import torch
from tiny_pair import VOCAB_SIZE

WINDOW = 24  # prompts and answers are longer
NODES = 16
SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "initializer_range": 0.12,
    "eos_token_id": None,
    "sliding_window": WINDOW,
}
# Family in transformers, and the keys that only it has.
FAMILIES = {
    "every layer": ("Mistral", {}),
    "every other layer, capped": ("Gemma2", {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 4}),
    "all but every third layer": (
        "Gemma3",
        {"layer_types": ["sliding_attention"] * 2 + ["full_attention"] + ["sliding_attention"]},
    ),
    # gpt-oss is a mixture of experts, and each head has a sink: a logit in the softmax without a value.
    "every other layer, with sinks": ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}


def build(folder, family, keys):
    """A random target, and a draft that mostly agrees with it."""
    import transformers

    kind = "Gemma3Text" if family == "Gemma3" else family
    torch.manual_seed(3)
    config = getattr(transformers, f"{kind}Config")(**SHAPE, **keys)
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(".sinks"):
                weight.normal_(2.0, 1.0)  # a sink then weighs as much as several keys
    model.save_pretrained(folder / "target")
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight += 0.04 * weight.std() * torch.randn_like(weight)
    model.save_pretrained(folder / "draft")
    return folder / "target", folder / "draft"
