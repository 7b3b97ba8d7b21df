"""Checks the folder of a draft of whole blocks (DFlash, DFlash2, DSpark). vLLM leaves missing tensors uninitialised."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_gsd.config.draft_kind import kind_of_config
from vllm_gsd.config.safetensors_files import stored_tensors
from vllm_gsd.config.source import shown

# The architectures that vLLM builds as the model classes that gsd runs. DeepSeek's drafts share the last name.
_ARCHITECTURES = {
    "dflash": ("DFlashDraftModel",),
    "dflash2": ("DFlash2DraftModel",),
    "dspark": ("Qwen3DSparkModel", "DSparkDraftModel"),
}
_MASK_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")


def block_problem(folder: Path, config: dict[str, Any], target: dict[str, Any]) -> str | None:
    """What is wrong with a draft of whole blocks, as the end of a sentence about it; None if nothing is.

    Args:
        folder: the draft's.
        config: its config.json.
        target: the target's text config; empty if it is not on this machine.

    Raises:
        LookupError, TypeError, ValueError, AttributeError: the config.json lacks keys, or they have other types.
    """
    kind = kind_of_config(config)
    keys = {**(config.get("transformer_layer_config") or {}), **(config.get("dflash_config") or {}), **config}
    return _shape_problem(kind, config, keys) or _target_problem(keys, target) or _tensors_problem(folder, kind, keys)


def _shape_problem(kind: str, config: dict[str, Any], keys: dict[str, Any]) -> str | None:
    names = config.get("architectures") or []
    foreign = not set(names) <= set(_ARCHITECTURES[kind]) or keys.get("model_type") != "qwen3"
    if "transformer_layer_config" in config:  # the speculators package names its own classes
        foreign = config["transformer_layer_config"].get("model_type", "qwen3") != "qwen3"
    if foreign:
        return f"is a {kind} draft of architecture {shown(names)}, but must be Qwen3-shaped ({_ARCHITECTURES[kind][0]})"
    if "sliding_attention" in (keys.get("layer_types") or ()) or keys.get("use_swa"):
        return f"is a {kind} draft with sliding-window attention, but must have full attention"
    if all(keys.get(key) is None for key in _MASK_KEYS):
        return f'lacks "mask_token_id" in its config.json, which a {kind} draft must have'
    if kind != "dspark" and keys.get("sample_from_anchor"):
        return f'is a {kind} draft with "sample_from_anchor", but only a dspark draft may have that'
    if kind == "dspark" and keys.get("markov_head_type", "vanilla") != "vanilla":
        return f'has "markov_head_type" {shown(keys["markov_head_type"])}, but must have "vanilla"'
    if kind == "dflash2" and keys.get("draft_vocab_size") not in (None, keys["vocab_size"]):
        return f'has "draft_vocab_size" {keys["draft_vocab_size"]}, but a dflash2 draft must have the whole vocabulary'
    if kind != "dspark" and keys.get("quantization_config") is not None:
        return f"is a quantised {kind} draft, but must not be quantised"
    return None


def _target_problem(keys: dict[str, Any], target: dict[str, Any]) -> str | None:
    hidden = keys.get("target_hidden_size") or keys["hidden_size"]
    if hidden != target.get("hidden_size", hidden):
        return f"reads hidden states of {hidden} numbers, but must read the target's of {target['hidden_size']}"
    layers, depth = layers_read(keys), target.get("num_hidden_layers")
    most = max(layers) + 1 if depth is None else depth
    if not layers or min(layers) < 1 or max(layers) > most or len(set(layers)) < len(layers):
        return f"reads the target's layers {shown(layers)}, but must name different ones from 1 to {most}"
    return None


def layers_read(keys: dict[str, Any]) -> list[int]:
    """The target's layers whose output the draft reads, from 1. Most configurations count them from 0."""
    given = keys.get("eagle_aux_hidden_state_layer_ids") or keys.get("aux_hidden_state_layer_ids")
    return list(given) if given else [layer + 1 for layer in keys["target_layer_ids"]]


def _tensors_problem(folder: Path, kind: str, keys: dict[str, Any]) -> str | None:
    if keys.get("quantization_config") is not None:
        return None  # its tensors have other names
    try:
        stored = stored_tensors(folder)
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return "has a safetensors file that is damaged or cut off, but must be a whole model"
    if not stored:
        return None  # weights that are not here yet, or of another format
    for name, shape in _expected(kind, keys):
        if name not in stored:
            return f"lacks the tensor {name}, but must be a whole {kind} draft"
        if stored[name].shape != shape:
            return f"has a tensor {name} of shape {stored[name].shape}, but must have one of {shape}"
    return None


def _expected(kind: str, keys: dict[str, Any]) -> Iterator[tuple[str, list[int]]]:
    """Names and shapes of the tensors that vLLM's class needs."""
    hidden, vocab, heads = keys["hidden_size"], keys["vocab_size"], keys["num_attention_heads"]
    size, groups = keys.get("head_dim") or hidden // heads, keys.get("num_key_value_heads") or heads
    inner, drafted = keys["intermediate_size"], keys.get("draft_vocab_size") or vocab
    if keys.get("use_aux_hidden_state", True):
        yield "fc.weight", [hidden, len(layers_read(keys)) * (keys.get("target_hidden_size") or hidden)]
    yield "hidden_norm.weight", [hidden]
    yield "norm.weight", [hidden]
    for index in range(keys["num_hidden_layers"]):
        layer = f"layers.{index}."
        for name, rows in (("q", heads), ("k", groups), ("v", groups)):
            yield f"{layer}self_attn.{name}_proj.weight", [rows * size, hidden]
        yield f"{layer}self_attn.o_proj.weight", [hidden, heads * size]
        for name in ("q_norm", "k_norm"):
            yield f"{layer}self_attn.{name}.weight", [size]
        for name in ("gate", "up"):
            yield f"{layer}mlp.{name}_proj.weight", [inner, hidden]
        yield f"{layer}mlp.down_proj.weight", [hidden, inner]
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{layer}{name}.weight", [hidden]
        for name in ("attention_conv", "mlp_conv") if kind == "dflash2" else ():
            yield f"{layer}{name}.base_kernel", [2, keys["conv_kernel_size"], hidden]
    if kind == "dflash2":
        yield "candidate_selector.predecessor_codebook", [vocab, keys["selector_rank"]]
        yield "candidate_selector.successor_codebook", [vocab, keys["selector_rank"]]
        yield "candidate_selector.hidden_projection.weight", [keys["selector_rank"], hidden]
    if kind == "dspark":
        yield "markov_head.markov_w1.weight", [vocab, keys["markov_rank"]]
        yield "markov_head.markov_w2.weight", [drafted, keys["markov_rank"]]
    if drafted != vocab:
        yield "lm_head.weight", [drafted, hidden]
        yield "d2t", [drafted]
