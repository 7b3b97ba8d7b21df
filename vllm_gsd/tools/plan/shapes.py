"""What a forward of a model reads and computes, from its config.json."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_gsd.config.draft_kind import BLOCK_KINDS, EAGLE, EAGLE3, LANGUAGE_MODEL, kind_of_config, read_config
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
    """The shapes of a Llama-like dense model, of an EAGLE or EAGLE-3 head, or of a draft of whole blocks.

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
    # Blocks join several states of the target.
    kind = kind_of_config(config)
    joins = {EAGLE: 2 * hidden * hidden, EAGLE3: hidden * (size * heads + kv)}.get(kind, 0)
    if kind in BLOCK_KINDS:
        joins = len(config.get("aux_hidden_state_layer_ids") or config.get("target_layer_ids") or ()) * hidden * hidden
    apart = kind == LANGUAGE_MODEL and not config.get("tie_word_embeddings", False)
    embedding = float(vocab * hidden) if apart else 0.0
    return Shapes(float(layers * layer + vocab * hidden + joins), float(2 * layers * kv), layers, embedding)


def block_rows(draft: str, most: int) -> int:
    """Rows of the forward pass of a draft of whole blocks, at most ``most`` of which are behind the root's.

    Raises:
        ToolError: the draft is no folder on this machine, or its config.json does not say how long a block is.
    """
    config = flattened(read_config(Path(draft)) or {})
    size = config.get("block_size") or config.get("dspark_block_size")
    if not isinstance(size, int):
        raise ToolError(f'{draft} has no config.json with the "block_size" of its blocks here; give it with --draft.')
    anchored = kind_of_config(config) == "dspark" and config.get("sample_from_anchor", True)
    return min(size, most + (not anchored))
