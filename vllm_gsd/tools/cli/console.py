"""Output of the commands: results go to stdout for scripts, everything else to stderr."""

from __future__ import annotations

import json
from typing import Any, NoReturn

import typer
from rich.console import Console

out = Console()
err = Console(stderr=True)


def fail(sentence: str) -> NoReturn:
    """End the command with one sentence on stderr and exit code 1."""
    err.print(sentence, style="red", soft_wrap=True, highlight=False, markup=False)
    raise typer.Exit(1)


def json_object(text: str, option: str) -> dict[str, Any]:
    """The JSON object in an option. The command fails if it is not one."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        fail(f"{option} is '{text}', but must be a JSON object.")
    return value
