"""What a forward of a model reads and computes, from its config.json."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_gsd.config.draft_kind import EAGLE, EAGLE3, LANGUAGE_MODEL, kind_of_config
from vllm_gsd.config.eagle3_folder import flattened
from vllm_gsd.tools.errors import ToolError


@dataclass(frozen=True)
class Shapes:
    """What a model reads and keeps, at two bytes a number."""

    parameters: float  # that a forward multiplies by
    kv_bytes: float  # keys and values of a token
    layers: int = 0
    embedding: float = 0.0  # parameters of an input embedding of its own, of which a forward reads single rows


def read_shapes(folder: Path, drafted: int | None = None) -> Shapes:
    """The shapes of a Llama-like dense model, or of an EAGLE or EAGLE-3 head.

    Args:
        drafted: tokens that its LM head computes ("draft_vocab_size"); None for what its folder says.

    Raises:
        ToolError: there is no config.json, or it is not of that kind.
    """
    try:
        config = flattened(json.loads((folder / "config.json").read_text("utf-8")))
        if drafted is not None:
            config["vocab_size"] = drafted
        elif (trimmed := folder / "draft_vocab.json").exists():
            config["vocab_size"] = len(json.loads(trimmed.read_text())["token_ids"])
        shapes = shapes_of(config)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise ToolError(
            f"{folder} has no config.json of a Llama-like model ({error!r}); give a folder, not a hub id."
        ) from error
    if any(name in config for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        raise ToolError(f"{folder} is a mixture of experts, but plans from data sheets are for dense models only.")
    return shapes


def shapes_of(config: dict[str, Any]) -> Shapes:
    """The shapes that a config.json describes."""
    hidden, layers, heads = (config[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    inner, vocab = config["intermediate_size"], config.get("draft_vocab_size") or config["vocab_size"]
    size = config.get("head_dim") or hidden // heads
    kv = 2 * size * (config.get("num_key_value_heads") or heads)
    layer = hidden * (2 * size * heads + kv) + 3 * hidden * inner
    # EAGLE projects a token's embedding and state to one row. In EAGLE-3 queries, keys and values read both.
    kind = kind_of_config(config)
    joins = {EAGLE: 2 * hidden * hidden, EAGLE3: hidden * (size * heads + kv)}.get(kind, 0)
    apart = kind == LANGUAGE_MODEL and not config.get("tie_word_embeddings", False)
    embedding = float(vocab * hidden) if apart else 0.0
    return Shapes(float(layers * layer + vocab * hidden + joins), float(2 * layers * kv), layers, embedding)
