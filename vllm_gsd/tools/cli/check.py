"""``vllm-gsd check``."""

import json
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Column, Table

from vllm_gsd.tools.cli.console import fail, json_object, out
from vllm_gsd.tools.cli.options import finite

COLOURS = {"ok": "green", "note": "yellow", "unknown": "yellow", "failed": "red"}


def check(
    target: Annotated[
        str | None, typer.Option(help="Folder of the target, or its hub id if it is in the hub's cache.")
    ] = None,
    draft: Annotated[
        str | None, typer.Option(help='Folder or hub id of the draft. By default the "model" of --gsd.')
    ] = None,
    gsd: Annotated[str | None, typer.Option(help="Path of a gsd.json, or its keys as JSON.")] = None,
    engine_args: Annotated[str, typer.Option(help="More arguments of vLLM's EngineArgs, as JSON.")] = "{}",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    timeout: Annotated[
        float, typer.Option(min=1, max=86_400, callback=finite, help="Seconds for each process that imports vLLM.")
    ] = 120,
) -> None:
    """Check whether this installation and this pair of models can serve gsd. The exit code is 1 if not."""
    from vllm_gsd.tools.check.run import check as run

    others = {"model": "--target gives", "speculative_config": "--gsd gives"}
    extra = json_object(engine_args, "--engine-args", others)
    if target is None and (draft is not None or extra):
        option = "--engine-args" if draft is None else "--draft"
        fail(f"{option} is checked together with a target; give --target, too.")
    report = run(target, draft, gsd, extra, timeout)
    if as_json:
        typer.echo(json.dumps(report))
    else:
        table = Table("checked", "", Column("found", overflow="fold"))
        for finding in report["findings"]:
            status = finding["status"]
            table.add_row(finding["topic"], f"[{COLOURS[status]}]{status}[/]", escape(finding["detail"]))
        out.print(table)
    raise typer.Exit(0 if report["ok"] else 1)
