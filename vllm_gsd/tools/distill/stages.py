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
    return _read(file)


def options_of(work: Path) -> dict[str, Any]:
    """The options of the run in a work folder.

    Raises:
        ToolError: there are none, or the file is damaged.
    """
    if not (stored := work / "options.json").is_file():
        raise ToolError(f"{str(work)!r} has no options.json, so it is not the work folder of a run.")
    options: dict[str, Any] = _read(stored)
    return options


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise ToolError(f"{str(file)!r} is damaged ({error}); delete it, and it is made again.") from None


def files_of_answers(folder: Path) -> list[Path]:
    """The files of answers in a work folder, in order."""
    return sorted((folder / "answers").glob("*.parquet"))
