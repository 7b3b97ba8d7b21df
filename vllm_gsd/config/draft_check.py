"""Checks whether a draft model fits a target, from its small files, before any weights are loaded."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import NoReturn

from vllm_gsd.config.block_check import refused_block
from vllm_gsd.config.draft_kind import LANGUAGE_MODEL, is_eagle, kind_of
from vllm_gsd.config.draft_vocab import choose_draft_vocab, read_draft_vocab
from vllm_gsd.config.source import fail, shown

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def check_draft(
    model: str,
    target_vocab_size: int,
    target: str | os.PathLike[str] | None = None,
    draft_vocab_size: int | None = None,
) -> None:
    """Check that a draft model exists and has the target's vocabulary.

    Args:
        model: the draft's path or hub id.
        target_vocab_size: the target's ``vocab_size``.
        target: the target's path or hub id. The tokenizers are compared if both are on this machine.
        draft_vocab_size: number of tokens that its LM head computes; None for what its folder says.

    Raises:
        GSDConfigError: the draft is missing or incomplete, has another vocabulary, or cannot be trimmed as asked.
    """
    draft = local_folder(model)
    if draft is None and os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true"):
        return  # vLLM downloads it from a hub for which we have no client, and reports what is missing
    draft = draft or _from_hub(model)
    if not (draft / "config.json").is_file():
        what = "is a folder without config.json" if draft.is_dir() else "is no folder"
        _refuse(model, f"{what}, but must be the folder of a Hugging Face model")
    size = _vocab_size(model, draft)
    if size != target_vocab_size:
        _refuse(model, f"has {size} tokens in its vocabulary, but must have the target's {target_vocab_size}")
    target_folder = local_folder(target) if target is not None else None
    if target_folder is not None and is_eagle(draft):
        own, wanted = _hidden_size(draft), _hidden_size(target_folder)
        if own != wanted:
            _refuse(model, f"reads hidden states of {own} numbers, but must read the target's of {wanted}")
    if target_folder is not None and _tokenizers_differ(model, draft, target_folder):
        _refuse(model, "gives tokens other ids than the target does, but must have the same tokenizer")
    if (clause := refused_block(draft, target_folder, draft_vocab_size)) is not None:
        _refuse(model, clause)
    choose_draft_vocab(read_draft_vocab(draft), size, draft_vocab_size)


def kind_of_model(model: str) -> str:
    """The kind of a draft, by path or hub id; a language model if its folder is not on this machine."""
    folder = local_folder(model)
    return LANGUAGE_MODEL if folder is None else kind_of(folder)


def reads_features(model: str) -> bool:
    """Whether a draft, by path or hub id, is an EAGLE head, which reads the target's hidden states."""
    folder = local_folder(model)
    return folder is not None and is_eagle(folder)


def _hidden_size(folder: Path) -> int | None:
    try:
        return json.loads((folder / "config.json").read_text("utf-8")).get("hidden_size")
    except (OSError, ValueError, AttributeError):
        return None


def _refuse(model: str, clause: str) -> NoReturn:
    fail(f'"model" is {shown(model, limit=200)}, which {clause}')


def local_folder(name: str | os.PathLike[str]) -> Path | None:
    """The folder of a model on this machine: the path itself or a snapshot in the hub's cache."""
    name = os.fspath(name)
    if os.path.exists(name):
        return Path(name)
    if not _HUB_ID.fullmatch(name):
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def _from_hub(model: str) -> Path:
    if not _HUB_ID.fullmatch(model):
        _refuse(model, "does not exist, but must be a folder or a hub id")
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

    try:
        # A single request, since the download would retry for half a minute and the usual cause is a misspelt folder.
        get_hf_file_metadata(hf_hub_url(model, "config.json"), timeout=10)
        return Path(hf_hub_download(model, "config.json")).parent
    except Exception as error:  # the hub client and its HTTP library raise many kinds
        reason = type(error).__name__
        _refuse(model, f"is no folder here and could not be had from the hub ({reason})")


def _vocab_size(model: str, folder: Path) -> int:
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        return int(config.get("vocab_size") or config["text_config"]["vocab_size"])
    except (OSError, ValueError, AttributeError, LookupError, TypeError, RecursionError):
        _refuse(model, "has a config.json that is not readable or lacks vocab_size, but must be a whole model")


def _tokenizers_differ(model: str, one: Path, other: Path) -> bool:
    files = [folder / "tokenizer.json" for folder in (one, other)]
    if not all(file.is_file() for file in files):
        return False
    try:
        first, second = (file.read_bytes() for file in files)
        # Parsing a large vocabulary takes up to a second, and the files are usually equal.
        return first != second and _vocabulary(first) != _vocabulary(second)
    except (OSError, ValueError, AttributeError, LookupError, TypeError, RecursionError):
        _refuse(model, "cannot be compared with the target, as one tokenizer.json of the two is not readable")


def _vocabulary(tokenizer_json: bytes) -> dict[str, int]:
    tokenizer = json.loads(tokenizer_json)
    vocab = tokenizer["model"]["vocab"]
    if isinstance(vocab, list):  # Unigram: pairs of token and score; the index is the id
        vocab = {token: index for index, (token, _) in enumerate(vocab)}
    return {**vocab, **{token["content"]: token["id"] for token in tokenizer.get("added_tokens", [])}}
