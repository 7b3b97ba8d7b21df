"""Checks of drafts that read the target's hidden states: of which layers, and the drafts' tensors.

vLLM leaves missing tensors uninitialised, so they are found here.
"""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from vllm_gsd.config.safetensors_files import Stored, read_integers, stored_tensors
from vllm_gsd.config.source import shown


def states_problem(keys: dict[str, Any], target: dict[str, Any], layers: Any, first: int) -> str | None:
    """What is wrong with the hidden states that a draft reads, as the end of a sentence about it; None if nothing is.

    Args:
        keys: of its config.json, on one level.
        target: the target's text config; empty if it is not on this machine.
        layers: the layers that it reads, as its config.json counts them; None for the choice of vLLM's target class.
        first: the lowest of them that there is.
    """
    hidden = keys.get("target_hidden_size") or keys["hidden_size"]
    if hidden != target.get("hidden_size", hidden):
        return f"reads hidden states of {hidden} numbers, but must read the target's of {target['hidden_size']}"
    depth = target.get("num_hidden_layers")
    numbers = isinstance(layers, list) and len(layers) > 0 and all(type(layer) is int for layer in layers)
    inside = numbers and min(layers) >= first and (depth is None or max(layers) <= depth)
    if layers is not None and not (inside and len(set(layers)) == len(layers)):
        most = "the target's number of layers" if depth is None else f"{depth}, the target's number of layers"
        return f"reads the target's layers {shown(layers)}, but must name different ones from {first} to {most}"
    return None


def tensors_problem(folder: Path, what: str, vocab: int, expected: Iterable[tuple[str, list[int]]]) -> str | None:
    """What is wrong with a draft's tensors, as the end of a sentence about it; None if nothing is.

    Args:
        what: its kind, with an article.
        vocab: the size of the target's vocabulary.
        expected: names and shapes of the tensors that vLLM's class needs.
    """
    try:
        stored = stored_tensors(sorted(folder.glob("*.safetensors")))
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return "has a safetensors file that is damaged or cut off, but must be a whole model"
    if not stored or _lacks_files(folder):
        return None  # weights that are not here yet, or of another format
    found = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in stored.items()}
    for name, shape in expected:
        if name not in found:
            return f"lacks the tensor {name}, but must be {what}"
        if found[name].shape != shape:
            return f"has a tensor {name} of shape {found[name].shape}, but must have one of {shape}"
    return _mapping_problem(found["d2t"], vocab) if "d2t" in found else None


def _lacks_files(folder: Path) -> bool:
    """Whether some of a model's files are not here yet, as while it is downloaded."""
    index = folder / "model.safetensors.index.json"
    try:
        names = set(json.loads(index.read_text("utf-8"))["weight_map"].values()) if index.is_file() else set()
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return False
    return not all((folder / str(name)).is_file() for name in names)


def mtp_tensors_problem(folder: Path, num_layers: int) -> str | None:
    """What is wrong with the tensors of a model with an MTP module, as the end of a sentence about it.

    Args:
        num_layers: number of the model's layers, without the module's.
    """
    try:
        names = _tensor_names(folder)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None  # the target cannot be loaded either, which vLLM reports
    if not names or any(in_mtp_module(name, num_layers) for name in names):
        return None
    missing = "lacks the tensors of the MTP module that its config.json names, as some quantised copies do"
    return f"{missing}, but must have them or be another model"


def _tensor_names(folder: Path) -> list[str]:
    """The names of a model's tensors; empty if they are not known before vLLM has downloaded the weights."""
    index, files = folder / "model.safetensors.index.json", sorted(folder.glob("*.safetensors"))
    if index.is_file():
        return list(json.loads(index.read_text("utf-8"))["weight_map"])
    return [] if any("-of-" in file.name for file in files) else list(stored_tensors(files))


def in_mtp_module(name: str, num_layers: int) -> bool:
    """Whether a tensor belongs to an MTP module of a model with ``num_layers`` layers."""
    layer = re.search(r"\blayers\.(\d+)\.", name)
    return "mtp" in name or (layer is not None and int(layer[1]) >= num_layers)


def _mapping_problem(d2t: Stored, vocab: int) -> str | None:
    try:
        offsets = read_integers(d2t)
    except (OSError, ValueError):
        return "has a tensor d2t that is not readable as integers, but must be a whole model"
    tokens = np.arange(len(offsets)) + offsets
    if tokens.min() < 0 or tokens.max() >= vocab or len(np.unique(tokens)) < len(tokens):
        return f"maps its tokens (d2t) beyond {vocab} or twice, but must map them to different tokens"
    return None


def layer_tensors(prefix: str, keys: dict[str, Any], width: int) -> Iterator[tuple[str, list[int]]]:
    """Names and shapes of the tensors of a decoder layer.

    Args:
        prefix: of their names.
        keys: its configuration; "model_type" is "llama", "qwen3" or "gemma4_text".
        width: length of the rows that its attention reads.

    Raises:
        LookupError, TypeError, ValueError: the configuration lacks a key, which the message names, or it is malformed.
    """
    hidden, inner, heads = keys["hidden_size"], keys["intermediate_size"], keys["num_attention_heads"]
    if heads == 0:
        raise ValueError("num_attention_heads")
    size, groups = keys.get("head_dim") or hidden // heads, keys.get("num_key_value_heads") or heads
    of_gemma, norms = keys["model_type"] == "gemma4_text", ["input_layernorm", "post_attention_layernorm"]
    if of_gemma:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    for name, rows in {"q": heads, "k": groups, **({} if of_gemma else {"v": groups})}.items():
        yield f"{prefix}self_attn.{name}_proj.weight", [rows * size, width]
    yield f"{prefix}self_attn.o_proj.weight", [hidden, heads * size]
    for name in () if keys["model_type"] == "llama" else ("q_norm", "k_norm"):
        yield f"{prefix}self_attn.{name}.weight", [size]
    for name in ("gate", "up"):
        yield f"{prefix}mlp.{name}_proj.weight", [inner, hidden]
    yield f"{prefix}mlp.down_proj.weight", [hidden, inner]
    yield from ((f"{prefix}{name}.weight", [hidden]) for name in norms)


def trimmed_head(keys: dict[str, Any], drafted: int) -> Iterator[tuple[str, list[int]]]:
    """Names and shapes of the tensors that a draft with a vocabulary of ``drafted`` tokens needs if it is not whole."""
    if drafted != keys["vocab_size"]:
        yield "lm_head.weight", [drafted, keys["hidden_size"]]
        yield "d2t", [drafted]
