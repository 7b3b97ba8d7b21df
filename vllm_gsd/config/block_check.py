"""Checks the folder of a draft of whole blocks (DFlash, DFlash2, DSpark)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_gsd.config.draft_kind import kind_of_config
from vllm_gsd.config.draft_tensors import layer_tensors, states_problem, tensors_problem, trimmed_head
from vllm_gsd.config.source import shown

_QWEN3, _GEMMA4 = "qwen3", "gemma4_text"
_SHAPES = {_QWEN3: "Qwen3-shaped", _GEMMA4: "Gemma-4-shaped"}
# The architectures that vLLM builds as the model classes that gsd runs, and their "model_type". DeepSeek's drafts share
# the name DSparkDraftModel.
_ARCHITECTURES = {
    "dflash": {"DFlashDraftModel": _QWEN3},
    "dflash2": {"DFlash2DraftModel": _QWEN3},
    "dspark": {"Qwen3DSparkModel": _QWEN3, "DSparkDraftModel": _QWEN3, "Gemma4DSparkModel": _GEMMA4},
}
# Why others are refused, by what is in their names.
_OTHERS = {
    "laguna": "whose layers normalise the context with their own weights, gate their output and do not declare "
    "causality",
    "deepseek": "which uses multi-head latent attention (MLA)",
    "k3": "which uses multi-head latent attention (MLA)",
}
_MASK_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
_SLIDING = "sliding_attention"


def block_problem(folder: Path, config: dict[str, Any], target: dict[str, Any]) -> str | None:
    """What is wrong with a draft of whole blocks; arguments and result as for ``eagle3_problem``.

    Raises:
        LookupError, TypeError, ValueError, AttributeError: the config.json lacks keys, or they have other types.
    """
    kind = kind_of_config(config)
    keys = {**(config.get("transformer_layer_config") or {}), **(config.get("dflash_config") or {}), **config}
    if problem := _shape_problem(kind, config, keys) or states_problem(keys, target, layers_read(keys), first=1):
        return problem
    if keys.get("quantization_config") is not None:
        return None  # its tensors have other names
    return tensors_problem(folder, f"a whole {kind} draft", keys["vocab_size"], _expected(kind, keys))


def _shape_problem(kind: str, config: dict[str, Any], keys: dict[str, Any]) -> str | None:
    if problem := _class_problem(kind, config, keys) or _windows_problem(kind, keys):
        return problem
    if all(keys.get(key) is None for key in _MASK_KEYS):
        return f'lacks "mask_token_id" in its config.json, which a {kind} draft must have'
    if kind != "dspark" and keys.get("sample_from_anchor"):
        return f'is a {kind} draft with "sample_from_anchor", but only a dspark draft may have that'
    if kind == "dspark" and keys.get("markov_head_type", "vanilla") != "vanilla":
        return f'has "markov_head_type" {shown(keys["markov_head_type"])}, but must have "vanilla"'
    whole = kind == "dflash2" or _of_gemma4(keys)
    if whole and keys.get("draft_vocab_size") not in (None, keys["vocab_size"]):
        given = keys["draft_vocab_size"]
        return f'has "draft_vocab_size" {given}, but a {kind} draft of its shape must have the whole vocabulary'
    if kind != "dspark" and keys.get("quantization_config") is not None:
        return f"is a quantised {kind} draft, but must not be quantised"
    return None


def _class_problem(kind: str, config: dict[str, Any], keys: dict[str, Any]) -> str | None:
    names, known = config.get("architectures") or [], _ARCHITECTURES[kind]
    if "transformer_layer_config" in config:  # the speculators package names its own classes
        foreign = config["transformer_layer_config"].get("model_type", _QWEN3) != _QWEN3
    else:
        foreign = len(names) != 1 or known.get(names[0]) != keys.get("model_type")
    if not foreign:
        return None
    described = f"{' '.join(map(str, names))} {keys.get('model_type')}".lower()
    why = next((f", {reason}" for name, reason in _OTHERS.items() if name in described), "")
    shapes = " or ".join(f"{_SHAPES[shape]} ({name})" for name, shape in known.items())
    return f"is a {kind} draft of architecture {shown(names)}{why}, but must be {shapes}"


def _of_gemma4(keys: dict[str, Any]) -> bool:
    return keys.get("model_type") == _GEMMA4


def _windows_problem(kind: str, keys: dict[str, Any]) -> str | None:
    types = set(keys.get("layer_types") or ())
    if _of_gemma4(keys) and not (types == {"full_attention"} and keys.get("attention_k_eq_v")):
        return 'is a draft of Gemma 4\'s shape, but must have full attention and "attention_k_eq_v" in all layers'
    if len(types) > 1:
        return f"is a {kind} draft with sliding windows in some layers, but must have them in all or in none"
    # Qwen3's configuration drops "sliding_window" without "use_sliding_window".
    size = keys.get("swa_window_size") or (keys.get("use_sliding_window") and keys.get("sliding_window"))
    if (_SLIDING in types or keys.get("use_swa")) and not size:
        return f'is a {kind} draft with sliding windows, but must have "sliding_window" with "use_sliding_window"'
    return None


def layers_read(keys: dict[str, Any]) -> list[int]:
    """The target's layers whose output the draft reads, from 1. Most configurations count them from 0."""
    given = keys.get("eagle_aux_hidden_state_layer_ids") or keys.get("aux_hidden_state_layer_ids")
    return list(given) if given else [layer + 1 for layer in keys["target_layer_ids"]]


def _expected(kind: str, keys: dict[str, Any]) -> Iterator[tuple[str, list[int]]]:
    hidden, vocab, drafted = keys["hidden_size"], keys["vocab_size"], keys.get("draft_vocab_size") or keys["vocab_size"]
    if keys.get("use_aux_hidden_state", True):
        yield "fc.weight", [hidden, len(layers_read(keys)) * (keys.get("target_hidden_size") or hidden)]
    yield "hidden_norm.weight", [hidden]
    yield "norm.weight", [hidden]
    for index in range(keys["num_hidden_layers"]):
        layer = f"layers.{index}."
        yield from layer_tensors(layer, keys_of_layer(keys, index), hidden)
        for name in ("attention_conv", "mlp_conv") if kind == "dflash2" else ():
            yield f"{layer}{name}.base_kernel", [2, keys["conv_kernel_size"], hidden]
    if kind == "dflash2":
        yield "candidate_selector.predecessor_codebook", [vocab, keys["selector_rank"]]
        yield "candidate_selector.successor_codebook", [vocab, keys["selector_rank"]]
        yield "candidate_selector.hidden_projection.weight", [keys["selector_rank"], hidden]
    if kind == "dspark":
        yield "markov_head.markov_w1.weight", [vocab, keys["markov_rank"]]
        yield "markov_head.markov_w2.weight", [drafted, keys["markov_rank"]]
    yield from trimmed_head(keys, drafted)
    if _of_gemma4(keys):
        yield from ((f"{name}.weight", [vocab, hidden]) for name in ("embed_tokens", "lm_head"))


def keys_of_layer(keys: dict[str, Any], index: int) -> dict[str, Any]:
    """The configuration of a layer; those of Gemma 4 without windows have heads of another shape."""
    if not _of_gemma4(keys):
        return {**keys, "model_type": _QWEN3}
    if _SLIDING in (keys.get("layer_types") or ())[index : index + 1]:
        return keys
    if "per_layer_config" in keys:
        return {**keys, **keys["per_layer_config"].get(str(index), {})}
    groups = keys.get("num_global_key_value_heads") or keys.get("num_key_value_heads")
    return {**keys, "head_dim": keys.get("global_head_dim") or 512, "num_key_value_heads": groups}
