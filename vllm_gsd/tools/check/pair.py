"""Whether a draft fits a target, and how much memory it takes."""

from pathlib import Path
from typing import Any

from vllm_gsd.config import GSDConfig, GSDConfigError, check_draft_model
from vllm_gsd.config.draft_check import kind_of_model, local_folder
from vllm_gsd.config.draft_kind import EAGLE, EAGLE_KINDS, MTP
from vllm_gsd.tools.check.model_files import (
    DTYPE_BYTES,
    FP8,
    computed_dtype,
    kv_bytes_per_token,
    read_shape,
    weight_bytes,
)
from vllm_gsd.tools.check.probes import Finding
from vllm_gsd.tools.errors import ToolError


def check_pair(
    target: str, config: GSDConfig, dtype: str = "auto", kv_dtype: str = "auto"
) -> tuple[list[Finding], dict[str, Any]]:
    """Compare the draft that ``config`` names with a target, by path or hub id, by their configuration files.

    Args:
        dtype: that of vLLM's engine arguments.
        kv_dtype: their ``kv_cache_dtype``.

    Returns:
        the findings, and the memory of the draft (empty if unknown).
    """
    try:
        vocab_size, target_config = _target(target)
    except ToolError as error:
        return [Finding("target", "failed", str(error))], {}
    if vocab_size is None:
        unknown = "its config.json does not say vocab_size, so the draft is compared with the engine's"
        return [Finding("target", "note", f"{target}; {unknown}")], {}
    found = [Finding("target", "ok", f"{target}, {vocab_size} tokens in its vocabulary")]
    if config.model is None:
        graphs = "graphs are made of copied text" if config.speculates else "nothing is drafted"
        return [*found, Finding("draft", "note", f'none ("model" is null): {graphs}')], {}
    try:
        check_draft_model(config, vocab_size, target)
    except GSDConfigError as error:
        return [*found, Finding("draft", "failed", str(error))], {}
    kind = kind_of_model(config.model)
    known = {EAGLE: "one layer on the target's hidden states, as EAGLE's", MTP: "whose MTP module drafts"}
    what = known.get(kind, f"a draft of the kind {kind}")
    found.append(Finding("draft", "ok", f"{config.model}, {what}; the vocabularies are the same"))
    draft = local_folder(config.model)
    if draft is None:
        return [*found, Finding("memory of the draft", "unknown", "it is not on this machine")], {}
    if why := _without_headers(config.model, draft):
        return [*found, Finding("weights of the draft", "note", f"their size is not known, because {why}")], {}
    try:
        dtype = computed_dtype(target_config, dtype)
        memory = draft_memory(draft, dtype, FP8 if kv_dtype.startswith(FP8) else dtype, kind)
    except ToolError as error:
        return [*found, Finding("weights of the draft", "failed", str(error))], {}
    return [*found, *_memory_findings(memory)], memory


def draft_memory(draft: Path, dtype: str, kv_dtype: str, kind: str) -> dict[str, Any]:
    """The memory that a draft adds to an engine whose target computes in ``dtype`` and has a KV cache of ``kv_dtype``.

    Raises:
        ToolError: the draft's files do not tell its sizes.
    """
    config = read_shape(draft)
    modules = {"num_hidden_layers": config.get("num_nextn_predict_layers", 1)} if kind == MTP else {}
    try:
        return {
            "dtype": dtype,
            "kv_dtype": kv_dtype,
            "weight_bytes": weight_bytes(draft, behind=config["num_hidden_layers"] if kind == MTP else None),
            "kv_bytes_per_token": kv_bytes_per_token({**config, **modules}, kv_dtype),
            "feature_bytes_per_token": config["hidden_size"] * DTYPE_BYTES[dtype] if kind in EAGLE_KINDS else 0,
        }
    except LookupError as error:
        raise ToolError(f"{draft / 'config.json'} does not say {error.args[0]}.") from None


def _without_headers(model: str, draft: Path) -> str:
    """Why there are no safetensors files although vLLM will find weights; empty if it is not known to."""
    if any(draft.glob("*.safetensors")):
        return ""
    if any(draft.glob("*.bin")):
        return "they are no safetensors files"
    return "" if Path(model).exists() else "vLLM downloads them when it starts"


def _target(target: str) -> tuple[int | None, dict[str, Any]]:
    """The size of its vocabulary, None if its class has a default, and its text config."""
    folder = local_folder(target)
    if folder is None:
        where = "no folder and no model in the hub's cache on this machine"
        raise ToolError(f"The target {target} is {where}; download it first.")
    config = read_shape(folder)
    if config.get("vocab_size") is None and "model_type" in config:
        return None, config
    try:
        return int(config["vocab_size"]), config
    except (LookupError, TypeError, ValueError):
        raise ToolError(f"{folder / 'config.json'} does not say vocab_size.") from None


def _memory_findings(memory: dict[str, Any]) -> list[Finding]:
    weights = f"{memory['weight_bytes'] / 2**20:.1f} MiB as stored"
    kv = f"{memory['kv_bytes_per_token']} bytes a token of the KV cache ({memory['kv_dtype']})"
    found = [Finding("weights of the draft", "ok", weights), Finding("KV of the draft", "ok", kv)]
    if memory["feature_bytes_per_token"]:
        kept = f"{memory['feature_bytes_per_token']} bytes a token of the KV cache, for the target's hidden states"
        found.append(Finding("features of the draft", "ok", kept))
    return found
