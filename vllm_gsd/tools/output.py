"""Places for results: tries them before the work, and writes whole files, so that hours of work are not lost."""

import os
import tempfile
from pathlib import Path

from vllm_gsd.tools.errors import ToolError


def make_folder(folder: Path, option: str) -> None:
    """Make a folder unless it exists, and try to write a file in it.

    Raises:
        ToolError: this fails.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise _refusal(option, folder, "must be a folder for new files", error) from None


def try_file(file: Path, option: str) -> None:
    """Try to open a file for writing. Its content stays, and it is not made.

    Raises:
        ToolError: this fails.
    """
    try:
        place = Path(os.path.realpath(file))  # a link to a file that is not there yet stays
        existed = place.exists()
        place.open("a").close()
        if not existed:
            place.unlink()
    except OSError as error:
        raise _refusal(option, file, "must be a file that can be written", error) from None


def write_whole(file: Path, text: str) -> None:
    """Write a file at once. A process that is killed meanwhile leaves the file as it was.

    What is not Unicode becomes a question mark, as in the name of a folder.
    """
    partial = file.with_name(f"{file.name}.partial")
    partial.write_text(text, "utf-8", "replace")
    partial.replace(file)


def _refusal(option: str, path: Path, must: str, error: OSError) -> ToolError:
    return ToolError(f'{option} is "{path}", but {must} ({error.strerror}).')
