"""Where the commands write: results to stdout, which scripts read, everything else to stderr."""

from __future__ import annotations

from typing import NoReturn

import typer
from rich.console import Console

out = Console()
err = Console(stderr=True)


def fail(sentence: str) -> NoReturn:
    """End the command with one sentence on stderr and exit code 1."""
    err.print(sentence, style="red", soft_wrap=True, highlight=False, markup=False)
    raise typer.Exit(1)
