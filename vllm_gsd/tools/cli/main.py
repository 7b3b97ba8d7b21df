"""Entry point of ``vllm-gsd``, with one function per subcommand."""

import json
import logging
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Column, Table

from vllm_gsd.tools.cli.bench import bench
from vllm_gsd.tools.cli.check import check
from vllm_gsd.tools.cli.console import one_sentence, prints_to_stderr
from vllm_gsd.tools.cli.console import out as console
from vllm_gsd.tools.cli.inspect import inspect
from vllm_gsd.tools.cli.options import takes
from vllm_gsd.tools.cli.plan import plan
from vllm_gsd.tools.distill.options import INSTALL, Options

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_show_locals=False)

app.command()(bench)
app.command()(check)
app.command()(plan)
app.command()(inspect)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"vllm-gsd {version('vllm-gsd')}")
        raise typer.Exit()


@app.callback()
def main(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Graph-structured speculative decoding for vLLM."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # its handler writes to stderr


@app.command()
def models(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    cache_dir: Annotated[
        Path | None, typer.Option(help="Folder for the target instead of $VLLM_GSD_CACHE or the user's cache.")
    ] = None,
) -> None:
    """Prepare the built-in pair of models and print its folders."""
    from vllm_gsd.tools.models import built_in_pair

    with one_sentence():
        pair = built_in_pair(cache_dir)
    paths = {"target": str(pair.target), "draft": str(pair.draft), "draft_model": str(pair.draft_model)}
    if as_json:
        typer.echo(json.dumps(paths))
        return
    table = Table("role", Column("folder", overflow="fold"))
    for role, path in paths.items():
        table.add_row(role, escape(path))
    console.print(table)


@app.command()
@takes(Options)
def distill(
    out: Annotated[Path, typer.Option(help="Folder to write the draft to.")],
    work: Annotated[
        Path | None, typer.Option(help="Folder for intermediate results, to resume a run; by default OUT.work.")
    ] = None,
    **given: Any,
) -> None:
    """Distil a draft from a target. Run it again with the same options to resume."""
    with prints_to_stderr(), one_sentence(f"Distilling needs the package {{}}; run: {INSTALL}"):
        from vllm_gsd.tools.distill.run import distill as run

        folder = out.absolute()  # "." has no name
        results = run(Options(**given), folder, work or Path(f"{folder}.work"))
    typer.echo(json.dumps({"draft": str(out), **results}))


if __name__ == "__main__":
    app()
