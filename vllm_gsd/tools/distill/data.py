"""The answers that students learn from, all in memory.

A file of answers is ``answers/{name}.parquet`` with ``input_ids`` (request and answer), ``prompt_len``, ``chat`` (the
request in JSON) and ``text`` (the answer).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vllm_gsd.tools.distill.stages import logger
from vllm_gsd.tools.errors import ToolError

# Minimum tokens of an answer to learn from.
SHORTEST = 2
# The answers to one request in this many are held out.
HELD_OUT = 40


class Answer(NamedTuple):
    """A request with the target's answer."""

    input_ids: np.ndarray  # int64 [n], the request's tokens and the answer's
    prompt_len: int  # how many are the request's
    file: str  # the name of its file
    first: int  # the index of its first token among all of the file


def read_columns(file: Path, *names: str) -> list[list[Any]]:
    """Columns of a file of answers, row by row.

    Raises:
        ToolError: the file is damaged or holds something else.
    """
    from pyarrow import lib, parquet

    try:
        return [[row[name] for name in names] for row in parquet.read_table(file, columns=[*names]).to_pylist()]
    except (lib.ArrowException, KeyError) as error:
        raise ToolError(f"{str(file)!r} cannot be read as a file of answers ({error}).") from error


def read_answers(file: Path) -> list[Answer]:
    """All answers of a file; raises as ``read_columns`` does."""
    found, first = [], 0
    for ids, prompt_len in read_columns(file, "input_ids", "prompt_len"):
        if not isinstance(ids, list):
            raise ToolError(f"{str(file)!r} cannot be read as a file of answers (its input_ids are no lists).")
        found.append(Answer(np.array(ids, np.int64), prompt_len, file.stem, first))
        first += len(ids)
    return found


def load_answers(files: Sequence[Path], longest: int) -> list[Answer]:
    """The answers of all files, cut to ``longest`` tokens with their requests. Too short ones are left out."""
    found = [answer for file in files for answer in read_answers(file)]
    cut = [answer._replace(input_ids=answer.input_ids[:longest]) for answer in found]
    kept = [answer for answer in cut if answer.prompt_len + SHORTEST <= len(answer.input_ids)]
    if len(kept) < len(found):
        logger.warning(
            "%d of %d answers are left out, because they have fewer than %d tokens within --longest %d",
            len(found) - len(kept), len(found), SHORTEST, longest,
        )  # fmt: skip
    if not kept:
        raise ToolError(f"--longest is {longest}, but no request with an answer of two tokens fits into it; raise it.")
    return kept


def divided(data: list[Answer]) -> tuple[list[Answer], list[Answer]]:
    """The answers to learn from, and those that are held out.

    Requests may repeat, and the answers to one must not be on both sides. With a single request they are.
    """
    requests = [answer.input_ids[: answer.prompt_len].tobytes() for answer in data]
    chosen = set(list(dict.fromkeys(requests))[::HELD_OUT])
    sides: tuple[list[Answer], list[Answer]] = [], []
    for answer, request in zip(data, requests, strict=True):
        sides[request in chosen].append(answer)
    return sides[0] or data, sides[1]


def count_tokens(data: list[Answer], vocab_size: int) -> np.ndarray:
    """How often each token occurs in the answers, int64 [vocab_size]."""
    tokens = [answer.input_ids[answer.prompt_len :] for answer in data]
    return np.bincount(np.concatenate(tokens), minlength=vocab_size)
