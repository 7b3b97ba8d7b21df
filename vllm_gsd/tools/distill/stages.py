"""The stages of a run: how long each takes, and what is kept in the work folder."""

import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm_gsd.tools.errors import ToolError
from vllm_gsd.tools.output import write_whole

logger = logging.getLogger("vllm_gsd.tools.distill")


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Log the time that the body took."""
    begun = time.perf_counter()
    yield
    logger.info("%s took %.1f seconds", name, time.perf_counter() - begun)


def kept(file: Path, make: Callable[[], Any]) -> Any:
    """The content of a JSON file. If the file is missing, it is written from what ``make`` returns, or not at all.

    Raises:
        ToolError: the file is damaged.
    """
    if not file.is_file():
        write_whole(file, json.dumps(make(), indent=1))
    return read_json(file)


def read_json(file: Path) -> Any:
    """The content of a JSON file; raises as ``kept`` does."""
    try:
        return json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise ToolError(f"{str(file)!r} is damaged ({error}); delete it, and it is made again.") from None


def files_of_answers(folder: Path) -> list[Path]:
    """The files of answers in a work folder, in order."""
    return sorted((folder / "answers").glob("*.parquet"))
