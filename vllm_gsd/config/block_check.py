"""Checks drafts of whole blocks (DFlash, DFlash2, DSpark) by the config.json in their folders."""

import json
from pathlib import Path
from typing import Any

from vllm_gsd.config.draft_kind import BLOCK_KINDS, kind_of_config

# The architectures that vLLM builds as the model classes that gsd runs. The last one is also DeepSeek's.
_ARCHITECTURES = {
    "dflash": ("DFlashDraftModel",),
    "dflash2": ("DFlash2DraftModel",),
    "dspark": ("Qwen3DSparkModel", "DSparkDraftModel"),
}
_MASK_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")


def refused_block(draft: Path, target: Path | None, draft_vocab_size: int | None) -> str | None:
    """Why gsd cannot run a draft of whole blocks, as a clause about it; None if it can, or is of another kind.

    Args:
        draft: the draft's folder, with a readable config.json.
        target: the target's folder; None if it is not on this machine.
        draft_vocab_size: the key in gsd.json.
    """
    config = json.loads((draft / "config.json").read_text("utf-8"))
    kind = kind_of_config(config)
    if kind not in BLOCK_KINDS:
        return None
    if draft_vocab_size is not None:
        return f'predicts whole blocks ({kind}) and so must be used without "draft_vocab_size"'
    return _refused(kind, config) or _refused_target(kind, config, target)


def _refused(kind: str, config: dict[str, Any]) -> str | None:
    own = config.get("dflash_config") or {}
    if "speculators_model_type" not in config:
        allowed, names = _ARCHITECTURES[kind], config.get("architectures") or []
        if not set(names) <= set(allowed) or ("DSparkDraftModel" in names and config.get("model_type") != "qwen3"):
            return f"is a {kind} draft with architectures {names}, but must be Qwen3-shaped ({allowed[0]})"
    if not any(key in known for key in _MASK_KEYS for known in (own, config)):
        return f"is a {kind} draft without mask_token_id, which its config.json must have"
    if kind != "dspark" and (own.get("sample_from_anchor") or config.get("sample_from_anchor")):
        return f"is a {kind} draft with sample_from_anchor, which only dspark drafts may have"
    if kind == "dspark" and (head := config.get("markov_head_type")) not in (None, "vanilla"):
        return f"is a dspark draft with the Markov head {head!r}, but must have a vanilla one"
    size = config.get("draft_vocab_size") or config.get("vocab_size")
    if kind == "dflash2" and config.get("vocab_size") not in (None, size):
        return f"is a dflash2 draft with draft_vocab_size {size}, but must predict the whole vocabulary"
    return None


def _refused_target(kind: str, config: dict[str, Any], target: Path | None) -> str | None:
    """Whether it reads other hidden states than the target has."""
    wanted = None if target is None else _read(target / "config.json")
    if not wanted:
        return None
    wanted = wanted.get("text_config") or wanted
    shape = {**(config.get("transformer_layer_config") or {}), **config}
    own, size = shape.get("target_hidden_size") or shape.get("hidden_size"), wanted.get("hidden_size")
    if own != size:
        return f"reads hidden states of {own} numbers, but must read the target's of {size}"
    own_config = config.get("dflash_config") or {}
    layers = config.get("target_layer_ids") or own_config.get("target_layer_ids") or []
    deepest, count = max(layers, default=0), wanted.get("num_hidden_layers", 0)
    if deepest >= count:
        return f"reads layer {deepest} of its target, but must read one of this target's {count}"
    return None


def _read(file: Path) -> dict[str, Any] | None:
    try:
        return json.loads(file.read_text("utf-8"))
    except (OSError, ValueError):
        return None
