"""The trimmed vocabulary of a draft: the tokens whose logits its LM head computes (FR-Spec, Zhao et al. 2025).

A draft need not propose every token, since the target can still produce all of them. The LM head is most of what a
level of a small draft reads, and a few thousand tokens make up most text.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from vllm_gsd.config.source import fail

# In a draft's folder: {"token_ids": [...]}, most frequent first.
FILE = "draft_vocab.json"


def write_draft_vocab(folder: Path, token_ids: np.ndarray) -> None:
    """Store a draft's trimmed vocabulary, int [n], most frequent first, in its folder."""
    (folder / FILE).write_text(json.dumps({"token_ids": token_ids.tolist()}) + "\n", "utf-8")


def read_draft_vocab(folder: Path) -> Any:
    """Content of the file in a draft's folder: None without a file, and ``"damaged"`` if it is unreadable."""
    try:
        return json.loads((folder / FILE).read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError):
        return "damaged"


def choose_draft_vocab(stored: Any, vocab_size: int, wanted: int | None) -> np.ndarray | None:
    """Choose the tokens whose logits the draft's LM head computes.

    Args:
        stored: result of ``read_draft_vocab``.
        vocab_size: size of the full vocabulary.
        wanted: ``draft_vocab_size``; None for the tokens that the file lists, or all without a file.

    Returns:
        int64 [n], ascending, or None for the full vocabulary.

    Raises:
        GSDConfigError: ``wanted`` exceeds the vocabulary, or the file is damaged.
    """
    if wanted is not None and wanted > vocab_size:
        fail(f'"draft_vocab_size" is {wanted}, but must be at most {vocab_size}, the size of the vocabulary')
    # In a BPE vocabulary low ids are early merges, hence frequent tokens.
    ranking = np.arange(vocab_size, dtype=np.int64)
    if stored is not None:
        listed = _checked(stored, vocab_size)
        ranking = np.concatenate([listed, np.setdiff1d(ranking, listed)])
        wanted = wanted or len(listed)
    chosen = np.sort(ranking[:wanted])
    return None if len(chosen) == vocab_size else chosen


def _checked(stored: Any, vocab_size: int) -> np.ndarray:
    try:
        ids = np.asarray(stored["token_ids"])
    except (LookupError, TypeError, ValueError):
        ids = np.zeros(0)
    whole = ids.ndim == 1 and len(ids) > 0 and np.issubdtype(ids.dtype, np.integer)
    if not whole or ids.min() < 0 or ids.max() >= vocab_size or len(np.unique(ids)) != len(ids):
        fail(f'"model" has a file {FILE} that does not list different tokens of its vocabulary under "token_ids"')
    return ids.astype(np.int64)
