"""Checks the folder of an EAGLE-3 head."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_gsd.config.draft_tensors import layer_tensors, states_problem, tensors_problem, trimmed_head
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
    given = {key: value for key, value in config.items() if value is not None}
    return {**(config.get("transformer_layer_config") or {}), **(config.get("eagle_config") or {}), **given}


def eagle3_problem(folder: Path, keys: dict[str, Any], target: dict[str, Any]) -> str | None:
    """What is wrong with an EAGLE-3 head, as the end of a sentence about it; None if nothing is.

    Args:
        keys: result of ``flattened``.
        target: the target's text config; empty if it is not on this machine.
    """
    kind = keys.get("model_type", "llama")
    if "transformer_layer_config" in keys:
        kind = keys["transformer_layer_config"].get("model_type", "llama")
    if kind not in _MODEL_TYPES:
        return f'has a layer of "model_type" {shown(kind)}, but must have one of "llama" or "qwen3"'
    vocab = keys["vocab_size"]
    drafted = keys.get("draft_vocab_size", vocab)
    if type(drafted) is not int or not _MIN_VOCAB <= drafted <= vocab:
        return f'has "draft_vocab_size" {shown(drafted)}, but must have {_MIN_VOCAB} to {vocab} tokens'
    if problem := states_problem(keys, target, keys.get("eagle_aux_hidden_state_layer_ids"), first=0):
        return problem
    if keys.get("quantization_config") is not None:
        return None  # its tensors have other names
    expected = _expected({**keys, "model_type": kind, "draft_vocab_size": drafted}, target)
    return tensors_problem(folder, "a whole EAGLE-3 head", vocab, expected)


def _expected(keys: dict[str, Any], target: dict[str, Any]) -> Iterator[tuple[str, list[int]]]:
    hidden = keys["hidden_size"]
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
    for index in range(keys.get("num_hidden_layers", 1)):  # the first reads embedding and state
        yield from layer_tensors(f"layers.{index}.", keys, hidden if index else 2 * hidden)
    yield from trimmed_head(keys, keys["draft_vocab_size"])
    if hidden != target.get("hidden_size", hidden):
        yield "embed_tokens.weight", [keys["vocab_size"], hidden]
