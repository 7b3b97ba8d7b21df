"""Checks the folder of an EAGLE-3 head. vLLM leaves missing tensors uninitialised, so they are found here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from vllm_gsd.config.safetensors_files import read_integers, stored_tensors
from vllm_gsd.config.source import shown

# Shapes of heads for which vLLM has a class.
_MODEL_TYPES = ("llama", "qwen3")
# Every source may propose up to 32 candidates ("top_k").
_MIN_VOCAB = 32


def flattened(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of a head's config.json, of its layer and of "eagle_config", on one level.

    Raises:
        TypeError, ValueError: one of the two is no dict.
    """
    return {**(config.get("transformer_layer_config") or {}), **(config.get("eagle_config") or {}), **_given(config)}


def _given(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if value is not None}


def eagle3_problem(folder: Path, keys: dict[str, Any], target: dict[str, Any]) -> str | None:
    """What is wrong with an EAGLE-3 head, as the end of a sentence about it; None if nothing is.

    Args:
        folder: the head's.
        keys: result of ``flattened``.
        target: the target's text config; empty if it is not on this machine.
    """
    kind = keys.get("model_type", "llama")
    if "transformer_layer_config" in keys:
        kind = keys["transformer_layer_config"].get("model_type", "llama")
    if kind not in _MODEL_TYPES:
        return f'has a layer of "model_type" {shown(kind)}, but must have one of "llama" or "qwen3"'
    hidden, vocab = keys.get("target_hidden_size") or keys["hidden_size"], keys["vocab_size"]
    if hidden != target.get("hidden_size", hidden):
        return f"reads hidden states of {hidden} numbers, but must read the target's of {target['hidden_size']}"
    drafted = keys.get("draft_vocab_size", vocab)
    if type(drafted) is not int or not _MIN_VOCAB <= drafted <= vocab:
        return f'has "draft_vocab_size" {shown(drafted)}, but must have {_MIN_VOCAB} to {vocab} tokens'
    layers = keys.get("eagle_aux_hidden_state_layer_ids")
    if layers is not None and (problem := _layers_problem(layers, target.get("num_hidden_layers"))):
        return problem
    if keys.get("quantization_config") is not None:
        return None  # its tensors have other names
    return _tensors_problem(folder, {**keys, "model_type": kind, "draft_vocab_size": drafted}, target)


def _layers_problem(layers: Any, depth: int | None) -> str | None:
    whole = isinstance(layers, list) and len(layers) > 0 and all(type(layer) is int and layer >= 0 for layer in layers)
    if not whole or len(set(layers)) < len(layers) or (depth is not None and max(layers) > depth):
        most = "the target's number of layers" if depth is None else f"{depth}, the target's number of layers"
        return f"reads the target's layers {shown(layers)}, but must name different ones from 0 to {most}"
    return None


def _tensors_problem(folder: Path, keys: dict[str, Any], target: dict[str, Any]) -> str | None:
    try:
        stored = stored_tensors(folder)
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return "has a safetensors file that is damaged or cut off, but must be a whole model"
    if not stored:
        return None  # weights that are not here yet, or of another format
    found = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in stored.items()}
    for name, shape in _expected(keys, target):
        if name not in found:
            return f"lacks the tensor {name}, but must be a whole EAGLE-3 head"
        if found[name].shape != shape:
            return f"has a tensor {name} of shape {found[name].shape}, but must have one of {shape}"
    if "d2t" not in found:
        return None
    try:
        offsets = read_integers(found["d2t"])
    except (OSError, ValueError):
        return "has a tensor d2t that is not readable as integers, but must be a whole model"
    tokens = np.arange(len(offsets)) + offsets
    if tokens.min() < 0 or tokens.max() >= keys["vocab_size"] or len(np.unique(tokens)) < len(tokens):
        return f"maps its tokens (d2t) beyond {keys['vocab_size']} or twice, but must map them to different tokens"
    return None


def _expected(keys: dict[str, Any], target: dict[str, Any]) -> Iterator[tuple[str, list[int]]]:
    """Names and shapes of the tensors that vLLM's class needs."""
    hidden, inner = keys["hidden_size"], keys["intermediate_size"]
    heads = keys["num_attention_heads"]
    size = keys.get("head_dim") or hidden // heads
    groups = keys.get("num_key_value_heads") or heads
    read = keys.get("target_hidden_size") or hidden
    if keys.get("use_aux_hidden_state", True):
        count = keys.get("num_aux_hidden_states") or len(keys.get("eagle_aux_hidden_state_layer_ids") or "123")
        yield "fc.weight", [hidden, count * read]
        if keys.get("norm_before_fc"):
            yield "input_norm.weight", [count * read]
        if keys.get("fc_norm"):
            yield from ((f"fc_norm.{index}.weight", [read]) for index in range(count))
    yield "norm.weight", [hidden]
    yield "layers.0.hidden_norm.weight", [hidden]
    for index in range(keys.get("num_hidden_layers", 1)):
        layer, width = f"layers.{index}.", hidden if index else 2 * hidden  # the first reads embedding and state
        for name, rows in (("q", heads), ("k", groups), ("v", groups)):
            yield f"{layer}self_attn.{name}_proj.weight", [rows * size, width]
        yield f"{layer}self_attn.o_proj.weight", [hidden, heads * size]
        for name in ("q_norm", "k_norm") if keys["model_type"] == "qwen3" else ():
            yield f"{layer}self_attn.{name}.weight", [size]
        for name in ("gate", "up"):
            yield f"{layer}mlp.{name}_proj.weight", [inner, hidden]
        yield f"{layer}mlp.down_proj.weight", [hidden, inner]
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{layer}{name}.weight", [hidden]
    if keys["draft_vocab_size"] != keys["vocab_size"]:
        yield "lm_head.weight", [keys["draft_vocab_size"], hidden]
        yield "d2t", [keys["draft_vocab_size"]]
    if hidden != target.get("hidden_size", hidden):
        yield "embed_tokens.weight", [keys["vocab_size"], hidden]
