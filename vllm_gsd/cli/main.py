"""Entry point of ``vllm-gsd``. One function a subcommand; the work itself lives in the package."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_show_locals=False)

# Results go to stdout, everything else to stderr: `vllm-gsd models --json` is read by scripts.
out = Console()
err = Console(stderr=True)


# With a callback typer keeps "models" a subcommand even while it is the only one.
@app.callback()
def main() -> None:
    """Graph-structured speculative decoding for vLLM."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # its handler writes to stderr


@app.command()
def models(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    cache_dir: Annotated[
        Path | None,
        typer.Option(help="Keep the target here, not in $VLLM_GSD_CACHE or the user's cache."),
    ] = None,
) -> None:
    """Prepare the built-in pair of models and print where it lies."""
    from vllm_gsd.models import ModelsError, built_in_pair

    try:
        pair = built_in_pair(cache_dir)
    except ModelsError as error:
        fail(str(error))
    paths = {"target": str(pair.target), "draft": str(pair.draft)}
    if as_json:
        typer.echo(json.dumps(paths))
        return
    table = Table("role", "folder")
    for role, path in paths.items():
        table.add_row(role, path)
    out.print(table)


def fail(sentence: str) -> NoReturn:
    """End the command with one sentence on stderr and exit code 1."""
    err.print(sentence, style="red", soft_wrap=True, highlight=False, markup=False)
    raise typer.Exit(1)


if __name__ == "__main__":
    app()
