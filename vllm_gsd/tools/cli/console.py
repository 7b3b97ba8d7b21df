"""Output of the commands: results go to stdout for scripts, everything else to stderr."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import typer
from rich.console import Console

from vllm_gsd.config import GSDConfigError
from vllm_gsd.tools.errors import ToolError

out = Console()
err = Console(stderr=True)


def fail(sentence: str) -> NoReturn:
    """End the command with one sentence on stderr and exit code 1."""
    err.print(sentence, style="red", soft_wrap=True, highlight=False, markup=False)
    raise typer.Exit(1)


@contextmanager
def prints_to_stderr() -> Iterator[None]:
    """Send what libraries and the processes they start print to stderr. vLLM logs to stdout."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)


@contextmanager
def one_sentence(missing: str = "This needs the package {}.") -> Iterator[None]:
    """End the command with one sentence if it refuses something or cannot use a file or package.

    ``missing`` is the sentence for a package.
    """
    try:
        yield
    except (GSDConfigError, ToolError) as error:
        fail(str(error))
    except ModuleNotFoundError as error:
        fail(missing.format(error.name))
    except OSError as error:  # such as a full disk, or a folder that this user may not enter
        file = f'"{error.filename}"' if error.filename else "A file"
        fail(f"{file} cannot be used ({error.strerror or ' '.join(str(error).split())}).")


def json_object(text: str, option: str, others: dict[str, str]) -> dict[str, Any]:
    """The JSON object in an option. The command fails if it is none, or has a key that comes from elsewhere.

    ``others`` has these keys and where they come from, as "--target gives".
    """
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        fail(f"{option} is '{text}', but must be a JSON object.")
    for key in filter(others.get, value):
        fail(f'{option} has "{key}", which {others[key]}; leave it out.')
    return value
