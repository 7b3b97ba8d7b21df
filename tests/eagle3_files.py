"""Writes EAGLE-3 heads in the public formats; a test compares them with the speculators package."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

LAYERS = [0, 1, 2]  # for a target of two layers: its embedding and the outputs of both


def layer_config(target: dict, model_type: str) -> dict:
    """The config of a head's layer, with the target's sizes."""
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    other = {"model_type": model_type, "num_hidden_layers": 1, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6}
    rope = {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}
    return {**{key: target[key] for key in keys}, **other, **rope, "hidden_act": "silu", "attention_bias": False}


def random_head(layer: dict, flags: dict, drafted: int) -> dict[str, torch.Tensor]:
    """Random weights of a head that can draft ``drafted`` tokens, with the names of the speculators package.

    Args:
        layer: result of ``layer_config``.
        flags: config flags, of which norm_before_fc and fc_norm add weights.
        drafted: size of the draft's vocabulary.
    """
    vocab, hidden, inner, size = (layer[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "head_dim"))
    queries, keys = layer["num_attention_heads"] * size, layer["num_key_value_heads"] * size
    matrices = {
        "embed_tokens": (vocab, hidden),
        "fc": (hidden, len(LAYERS) * hidden),
        "layers.0.self_attn.q_proj": (queries, 2 * hidden),
        "layers.0.self_attn.k_proj": (keys, 2 * hidden),
        "layers.0.self_attn.v_proj": (keys, 2 * hidden),
        "layers.0.self_attn.o_proj": (hidden, queries),
        "layers.0.mlp.gate_proj": (inner, hidden),
        "layers.0.mlp.up_proj": (inner, hidden),
        "layers.0.mlp.down_proj": (hidden, inner),
        "lm_head": (drafted, hidden),
    }
    norms = ["input_layernorm", "hidden_norm", "post_attention_layernorm"]
    lengths = {"norm": hidden, **{f"layers.0.{name}": hidden for name in norms}}
    if layer["model_type"] == "qwen3":
        lengths |= {"layers.0.self_attn.q_norm": size, "layers.0.self_attn.k_norm": size}
    if flags.get("norm_before_fc"):
        lengths["input_norm"] = len(LAYERS) * hidden
    if flags.get("fc_norm"):
        lengths |= {f"fc_norm.{index}": hidden for index in range(len(LAYERS))}
    kept = torch.randperm(vocab)[:drafted].sort().values
    in_draft = torch.zeros(vocab, dtype=torch.bool)
    in_draft[kept] = True
    return {
        **{f"{name}.weight": 0.05 * torch.randn(shape) for name, shape in matrices.items()},
        **{f"{name}.weight": 1 + 0.05 * torch.randn(length) for name, length in lengths.items()},
        "d2t": kept - torch.arange(drafted),
        "t2d": in_draft,
    }


def write_speculators(folder: Path, tensors: dict, layer: dict, flags: dict, target: str | Path, **keys) -> None:
    """Write a head in the format of the speculators package, version 0.9.0."""
    config = {
        "architectures": ["Eagle3DraftModel"],
        "draft_vocab_size": len(tensors["lm_head.weight"]),
        "eagle_aux_hidden_state_layer_ids": LAYERS,
        "norm_before_residual": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": str(target)},
        },
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "tie_word_embeddings": False,
        "transformer_layer_config": layer,
        **flags,
        **keys,
    }
    _write(folder, config, tensors)


def write_midlayer(folder: Path, tensors: dict, layer: dict, flags: dict, target: str | Path, **keys) -> None:
    """Write a head in the format of EAGLE's own checkpoints, without embedding and LM head."""
    left_out = ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d")
    own = {name.replace("layers.0.", "midlayer."): tensors[name] for name in tensors if name not in left_out}
    eagle = {"eagle_aux_hidden_state_layer_ids": LAYERS, "use_aux_hidden_state": True}
    _write(folder, {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": eagle, **layer, **flags, **keys}, own)


def _write(folder: Path, config: dict, tensors: dict) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
