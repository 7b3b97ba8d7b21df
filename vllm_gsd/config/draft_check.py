"""Checks whether a draft model fits a target, from its small files, before any weights are loaded."""

import json
import os
import re
from pathlib import Path
from typing import NoReturn

from vllm_gsd.config.block_check import block_problem
from vllm_gsd.config.draft_kind import (
    AUX_KINDS,
    BLOCK_KINDS,
    EAGLE,
    EAGLE3,
    EAGLE_KINDS,
    LANGUAGE_MODEL,
    MTP,
    has_mtp_modules,
    kind_of,
    kind_of_config,
    read_config,
    read_text_config,
)
from vllm_gsd.config.draft_tensors import mtp_tensors_problem
from vllm_gsd.config.draft_vocab import FILE, choose_draft_vocab, read_draft_vocab
from vllm_gsd.config.eagle3_folder import eagle3_problem, flattened
from vllm_gsd.config.source import fail, shown
from vllm_gsd.config.speculators_folder import is_speculators, speculators_problem

# The kinds of drafts that gsd runs.
KINDS = (LANGUAGE_MODEL, *EAGLE_KINDS, *BLOCK_KINDS)
_ALLOWED = "a language model, an EAGLE or EAGLE-3 head, or a DFlash, DFlash2 or DSpark draft"
# Kinds of the speculators package besides AUX_KINDS.
_REFUSED_KINDS = ("peagle", "mtp")
_UNREADABLE = "has a config.json that is not readable or lacks vocab_size, but must be a whole model"
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
    draft = find_draft(model)
    if draft is None:
        return
    _check_folder(model, draft)
    if not (config := read_config(draft)):
        _refuse(model, _UNREADABLE)
    target_folder = local_folder(target) if target is not None else None
    target_config = {} if target_folder is None else read_config(target_folder)
    kind = kind_of_config(config)
    name = None if target is None else os.fspath(target)
    hub_name = None if target is None or os.path.exists(target) else name
    if is_speculators(config) and (problem := _speculators_problem(kind, config, hub_name, target_config)):
        _refuse(model, problem)
    if kind not in KINDS:
        _refuse(model, f"is a draft of the kind {shown(kind)}, but must be {_ALLOWED}")
    if has_mtp_modules(config):
        is_target = name == model or (target_folder is not None and target_folder.samefile(draft))
        _check_mtp(model, kind, is_target)
        if kind == MTP and (problem := _mtp_problem(draft, config, draft_vocab_size)):
            _refuse(model, problem)
    size = _vocab_size(model, config)
    if size != target_vocab_size:
        _refuse(model, f"has {size} tokens in its vocabulary, but must have the target's {target_vocab_size}")
    text_config = read_text_config(target_folder)
    if kind in AUX_KINDS and (problem := _aux_problem(kind, draft, config, text_config, draft_vocab_size)):
        _refuse(model, problem)
    own, wanted = config.get("hidden_size"), text_config.get("hidden_size")
    if kind == EAGLE and target_folder is not None and own != wanted:
        _refuse(model, f"reads hidden states of {own} numbers, but must read the target's of {wanted}")
    if target_folder is not None and _tokenizers_differ(model, draft, target_folder):
        _refuse(model, "gives tokens other ids than the target does, but must have the same tokenizer")
    choose_draft_vocab(read_draft_vocab(draft), size, draft_vocab_size)


def _check_folder(model: str, draft: Path) -> None:
    try:
        if (draft / "config.json").is_file():
            return
        what = "is a folder without config.json" if draft.is_dir() else "is not a folder"
    except PermissionError:
        what = "may not be read by this user"
    _refuse(model, f"{what}, but must be the folder of a Hugging Face model")


def kind_of_model(model: str) -> str:
    """The kind of a draft, by path or hub id; a language model if it is not on this machine."""
    folder = local_folder(model)
    return LANGUAGE_MODEL if folder is None else kind_of(folder)


def _speculators_problem(kind: str, config: dict, name: str | None, target: dict) -> str | None:
    if kind not in (*AUX_KINDS, *_REFUSED_KINDS):
        return f"is of the speculators kind {shown(kind)}, but must be of one that gsd knows, such as {shown(EAGLE3)}"
    return speculators_problem(config, name, target)


def _check_mtp(model: str, kind: str, is_target: bool) -> None:
    """Check that a model with MTP modules drafts for itself only."""
    if kind == MTP and not is_target:
        _refuse(model, "has an MTP module, which drafts for its own model only, but must be the target or have none")
    if kind != MTP and is_target:
        _refuse(model, "is the target, whose MTP modules gsd cannot run, but must be another model")


def _mtp_problem(draft: Path, config: dict, draft_vocab_size: int | None) -> str | None:
    if draft_vocab_size is not None:
        return f'drafts with an MTP module, for which "draft_vocab_size" must be left out, not {draft_vocab_size}'
    if read_draft_vocab(draft) is not None:
        return f"drafts with an MTP module, which cannot be trimmed, but has a {FILE}, which must go"
    return mtp_tensors_problem(draft, config.get("num_hidden_layers", 0))


def _aux_problem(kind: str, draft: Path, config: dict, target: dict, draft_vocab_size: int | None) -> str | None:
    trimmed = read_draft_vocab(draft) is not None
    if kind in BLOCK_KINDS and draft_vocab_size is not None:
        return f'drafts whole blocks, for which "draft_vocab_size" must be left out, not {draft_vocab_size}'
    if kind in BLOCK_KINDS and trimmed:
        return f"drafts whole blocks, which cannot be trimmed, but has a {FILE}, which must go"
    try:
        if kind in BLOCK_KINDS:
            return block_problem(draft, config, target)
        keys = flattened(config)
        if problem := eagle3_problem(draft, keys, target):
            return problem
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        return f"has a config.json in which {error} is missing or malformed, but must be a whole draft of kind {kind}"
    own = keys.get("draft_vocab_size", keys["vocab_size"])
    if draft_vocab_size is not None and own != keys["vocab_size"]:
        return f'has a vocabulary of {own} tokens of its own, but must have all tokens for "draft_vocab_size"'
    if trimmed and own != keys["vocab_size"]:
        return f"has a vocabulary of {own} tokens of its own, but also a {FILE}, which must go"
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


def find_draft(model: str) -> Path | None:
    """The folder of a draft, whose config.json is downloaded if it is not on this machine.

    Returns:
        None with ModelScope, for which we have no client: vLLM downloads the draft and reports what is missing.

    Raises:
        GSDConfigError: there is no such draft.
    """
    draft = local_folder(model)
    if draft is None and os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true"):
        return None
    return draft or _from_hub(model)


def _from_hub(model: str) -> Path:
    if not _HUB_ID.fullmatch(model):
        _refuse(model, "does not exist, but must be a folder or a hub id")
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

    try:
        # A single request, since the download would retry for half a minute and the usual cause is a misspelt folder.
        get_hf_file_metadata(hf_hub_url(model, "config.json"), timeout=10)
        return Path(hf_hub_download(model, "config.json")).parent
    except Exception as error:  # the hub client and its HTTP library raise many kinds
        # An error of a file is about the cache, which this user may not write.
        file = getattr(error, "filename", None)
        reason = f"{error}" if file else type(error).__name__
        _refuse(model, f"is not a local folder and could not be read from the hub ({reason})")


def _vocab_size(model: str, config: dict) -> int:
    try:
        text = config.get("text_config") or config.get("transformer_layer_config") or {}
        return int(config.get("vocab_size") or text["vocab_size"])
    except (ValueError, AttributeError, LookupError, TypeError):
        _refuse(model, _UNREADABLE)


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
