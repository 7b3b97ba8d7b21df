"""Entry point of ``vllm-gsd``. One function a subcommand; the work itself lives in the package."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from vllm_gsd.cli.bench import bench
from vllm_gsd.cli.check import check
from vllm_gsd.cli.console import fail
from vllm_gsd.cli.console import out as console

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_show_locals=False)

app.command()(bench)
app.command()(check)


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
    paths = {"target": str(pair.target), "draft": str(pair.draft), "draft_model": str(pair.draft_model)}
    if as_json:
        typer.echo(json.dumps(paths))
        return
    table = Table("role", "folder")
    for role, path in paths.items():
        table.add_row(role, path)
    console.print(table)


@app.command()
def distill(
    target: Annotated[Path, typer.Option(help="Folder of the target model, Llama-like.")],
    out: Annotated[Path, typer.Option(help="Folder to write the draft to.")],
    prompts: Annotated[
        Path | None, typer.Option(help='Requests, one JSON object a line with "prompt", "turns" or "messages".')
    ] = None,
    answers: Annotated[int, typer.Option(min=1, help="Answers of the target to learn from.")] = 8192,
    max_tokens: Annotated[int, typer.Option(min=2, help="Longest answer.")] = 160,
    longest: Annotated[
        int, typer.Option(min=16, help="Longest request with its answer; longer ones are left out.")
    ] = 640,
    minutes: Annotated[
        float | None, typer.Option(help="Time for all of it; fewer answers and steps where short.")
    ] = None,
    params: Annotated[int | None, typer.Option(help="Make a language model of at most so many parameters.")] = None,
    cost: Annotated[float | None, typer.Option(help="Most it may read a level, as a share of the target.")] = None,
    layers: Annotated[str, typer.Option(help='Make it of the target\'s own layers instead, such as "0,1,29".')] = "",
    init: Annotated[Path | None, typer.Option(help="Go on training this draft instead of a new one.")] = None,
    eagle: Annotated[
        bool | None,
        typer.Option(help="One layer on the target's hidden states. [default without --params, --cost, --layers]"),
    ] = None,
    vocab_size: Annotated[int, typer.Option(min=256, help="Tokens that its LM head computes.")] = 12288,
    epochs: Annotated[float, typer.Option(help="Passes over the answers.")] = 6.0,
    learning_rate: float = 1e-3,
    batch: Annotated[int, typer.Option(min=1, help="Requests that the target answers at once.")] = 96,
    seed: int = 0,
    engine: Annotated[bool, typer.Option(help="Measure the draft in the real engine at the end.")] = True,
    eager: Annotated[
        bool, typer.Option("--eager", help="Engines without torch.compile: they start sooner and run slower.")
    ] = False,
    work: Annotated[
        Path | None, typer.Option(help="Where a run keeps what it has done, to go on later. [OUT.work]")
    ] = None,
) -> None:
    """Distil a draft from a target. Started again with the same options, it goes on where it stopped."""
    from vllm_gsd.distill.run import DistillError, Options
    from vllm_gsd.distill.run import distill as run
    from vllm_gsd.distill.student import StudentError
    from vllm_gsd.eagle_folder import is_eagle
    from vllm_gsd.prompt_file import PromptsError

    try:
        chosen = tuple(int(layer) for layer in layers.split(",")) if layers else ()
    except ValueError:
        fail(f'--layers is "{layers}", but must be layers of the target separated by commas.')
    if eagle is None:
        eagle = is_eagle(init) if init is not None else not (params or cost or layers)
    options = Options(
        target=str(target),
        prompts=None if prompts is None else str(prompts),
        answers=answers,
        max_tokens=max_tokens,
        longest=longest,
        minutes=minutes,
        params=params,
        cost=cost,
        layers=chosen,
        init=None if init is None else str(init),
        eagle=eagle,
        vocab_size=vocab_size,
        epochs=epochs,
        learning_rate=learning_rate,
        batch=batch,
        seed=seed,
        engine=engine,
        eager=eager,
    )
    try:
        results = run(options, out, work or out.with_name(out.name + ".work"))
    except (DistillError, PromptsError, StudentError) as error:
        fail(str(error))
    except ModuleNotFoundError as error:
        fail(f"Distilling needs the package {error.name} (pip install 'vllm-gsd[distill]').")
    typer.echo(json.dumps({"draft": str(out), **results}))


if __name__ == "__main__":
    app()
