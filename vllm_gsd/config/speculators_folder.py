"""Checks folders in the format of the speculators package, which state the draft's kind and its verifier (target).

vLLM's own ``SpeculatorsConfig`` translates them once they are accepted.
"""

import re
from typing import Any

from vllm_gsd.config.source import shown

# Versions of the format that were read: 0.1 to 0.9.
_NEWEST = (0, 9)
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def is_speculators(config: dict[str, Any]) -> bool:
    """Whether a config.json is in this format."""
    return "speculators_config" in config or "speculators_model_type" in config


def speculators_problem(config: dict[str, Any], target_name: str | None, target: dict[str, Any]) -> str | None:
    """What is wrong with such a config.json, as the end of a sentence about it; None if nothing is.

    Args:
        target_name: the target's hub id, if it has one.
        target: the target's config.json; empty if it is not on this machine.
    """
    version = re.match(r"(\d+)\.(\d+)", str(config.get("speculators_version")))
    if version is None or tuple(map(int, version.groups())) > _NEWEST:
        newest = ".".join(map(str, _NEWEST))
        return f'has "speculators_version" {shown(config.get("speculators_version"))}, but must have at most {newest}'
    for key in ("speculators_config", "transformer_layer_config"):
        if not isinstance(config.get(key), dict):
            return f'lacks "{key}" in its config.json, but must be a whole speculators folder'
    kind, algorithm = config["speculators_model_type"], config["speculators_config"].get("algorithm")
    if algorithm is not None and algorithm != kind:
        return f'is of the kind {shown(kind)} with "algorithm" {shown(algorithm)}, but must have one kind'
    verifier = config["speculators_config"].get("verifier")
    if not isinstance(verifier, dict) or "name_or_path" not in verifier:
        return 'lacks "verifier" in its "speculators_config", but must say which target it was made for'
    return _verifier_problem(verifier, target_name, target)


def _verifier_problem(verifier: dict[str, Any], target_name: str | None, target: dict[str, Any]) -> str | None:
    own, given = verifier.get("architectures") or [], target.get("architectures") or []
    if own and given and not any(name in given for name in own):
        return f"was made for a target of architecture {shown(own[0])}, but must be made for {shown(given[0])}"
    name = verifier["name_or_path"]
    if target_name is None or not (_HUB_ID.fullmatch(str(name)) and _HUB_ID.fullmatch(target_name)):
        return None  # the name of a folder says nothing
    # A quantised or renamed copy of the verifier has the verifier's name in its own.
    if str(name).partition("/")[2].lower() not in target_name.lower():
        return f"was made for the target {shown(name)}, but must be made for {shown(target_name)}"
    return None
