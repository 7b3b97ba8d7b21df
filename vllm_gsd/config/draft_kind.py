"""The kinds of drafts, told apart by the config.json in a draft's folder."""

import json
from pathlib import Path
from typing import Any

from vllm_gsd.config.speculators_folder import is_speculators

LANGUAGE_MODEL, EAGLE, EAGLE3, MTP = "language model", "eagle", "eagle3", "mtp module"
# Heads that run once per level, and for which hidden states of the target are stored.
EAGLE_KINDS = (EAGLE, EAGLE3, MTP)
# Drafts of a whole block in one forward pass.
BLOCK_KINDS = ("dflash", "dflash2", "dspark")
# Kinds that read hidden states of the target's inner layers.
AUX_KINDS = (EAGLE3, *BLOCK_KINDS)
# What the names of architectures contain, in lower case. The first that fits decides.
_IN_NAMES = ("dspark", "dflash2", "dflash", "peagle", EAGLE3, EAGLE, "medusa", "mtp")
# Keys that only EAGLE-3 heads have. Some of their checkpoints name the architecture of a language model.
_EAGLE3_KEYS = ("draft_vocab_size", "eagle_config", "eagle_aux_hidden_state_layer_ids")

# Targets whose own multi-token prediction (MTP) module can draft, and vLLM's name of the module.
_MTP_TARGETS = {
    "MiMoForCausalLM": "MiMoMTPModel",
    "Glm4MoeForCausalLM": "Glm4MoeMTPModel",
    "Ernie4_5_MoeForCausalLM": "ErnieMTPModel",
}
# How the config.json of a model with MTP modules counts them.
_MTP_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")


def has_mtp_modules(config: dict[str, Any]) -> bool:
    """Whether the model with this config.json has MTP modules."""
    return any(map(config.get, _MTP_KEYS))


def kind_of_config(config: dict[str, Any]) -> str:
    """The kind of the draft with this config.json: one of the names above, or of a kind that gsd cannot run.

    A folder in the format of the speculators package states its kind. EAGLE's own checkpoints name the architecture of
    the target, so they count as language models, as does everything else that is not recognised.
    """
    if is_speculators(config):
        return str(config.get("speculators_model_type"))
    names = str(config.get("architectures"))
    if has_mtp_modules(config) and any(name in names for pair in _MTP_TARGETS.items() for name in pair):
        return MTP
    names = names.lower()
    for kind in _IN_NAMES:
        if kind in names:
            return kind
    if "dflash_config" in config:
        return "dflash"
    return EAGLE3 if any(config.get(key) for key in _EAGLE3_KEYS) else LANGUAGE_MODEL


def kind_of(folder: Path) -> str:
    """The kind of the draft in a folder; a language model if its config.json cannot be read."""
    return kind_of_config(read_config(folder))


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json in a model's folder; empty if it cannot be read."""
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        return config if isinstance(config, dict) else {}
    except (OSError, ValueError, RecursionError):
        return {}


def read_text_config(folder: Path | None) -> dict[str, Any]:
    """The part of a model's config.json about its text model; empty without a folder, or if it cannot be read."""
    config = {} if folder is None else read_config(folder)
    text = config.get("text_config")
    return text if text and isinstance(text, dict) else config


def positions_of(folder: Path | None, most: int) -> int:
    """As many positions as the model in a folder has, at most ``most``, which is also the answer if it is unknown."""
    found = read_text_config(folder).get("max_position_embeddings")
    return min(most, found) if isinstance(found, int) and found > 0 else most
