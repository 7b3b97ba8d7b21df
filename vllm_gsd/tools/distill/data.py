"""The answers that students learn from, all in memory.

A file of answers is ``answers/{name}.parquet`` with ``input_ids`` (request and answer), ``prompt_len`` and ``text``.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vllm_gsd.tools.errors import ToolError

# Minimum tokens of an answer to learn from.
SHORTEST = 2


class Answer(NamedTuple):
    """A request with the target's answer."""

    input_ids: np.ndarray  # int64 [n], the request's tokens and the answer's
    prompt_len: int  # how many are the request's
    file: str  # the name of its file
    first: int  # the index of its first token among all of the file


def read_answers(file: Path) -> list[Answer]:
    """All answers of a file.

    Raises:
        ToolError: the file is damaged or holds something else.
    """
    from pyarrow import lib, parquet

    try:
        table = parquet.read_table(file, columns=["input_ids", "prompt_len"])
        ids = table["input_ids"].combine_chunks()
        ends = np.cumsum(ids.value_lengths().to_numpy())
        # PyTorch shares the memory of writable arrays only.
        texts = np.split(ids.flatten().to_numpy(zero_copy_only=False, writable=True), ends[:-1])
        rows = zip(texts, table["prompt_len"].to_pylist(), (ends - [len(text) for text in texts]).tolist(), strict=True)
        return [Answer(text, prompt_len, file.stem, first) for text, prompt_len, first in rows]
    except (lib.ArrowException, KeyError, AttributeError, ValueError) as error:
        raise ToolError(f"{str(file)!r} cannot be read as a file of answers ({error}).") from error


def load_answers(files: Sequence[Path], longest: int) -> list[Answer]:
    """The answers of all files, without those longer than ``longest`` tokens and those of a single token."""
    found = [answer for file in files for answer in read_answers(file)]
    return [answer for answer in found if answer.prompt_len + SHORTEST <= len(answer.input_ids) <= longest]


def count_tokens(data: list[Answer], vocab_size: int) -> np.ndarray:
    """How often each token occurs in the answers, int64 [vocab_size]."""
    tokens = [answer.input_ids[answer.prompt_len :] for answer in data]
    return np.bincount(np.concatenate(tokens), minlength=vocab_size)
