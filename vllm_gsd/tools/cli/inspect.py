"""``vllm-gsd inspect``."""

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_gsd.tools.cli.console import err, fail, json_object, one_sentence, prints_to_stderr

if TYPE_CHECKING:
    from vllm_gsd.tools.inspect.trace import Trace

# Where an option belongs that was given with the other kind of input.
WITH = {True: "with --prompt, but is for traces", False: "with a trace, but is for --prompt"}


def inspect(
    context: typer.Context,
    trace: Annotated[
        Path | None,
        typer.Argument(help='A trace that an engine wrote (the "trace" of its gsd.json); or give --prompt.'),
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="Answer this prompt and show how.")] = None,
    out: Annotated[Path, typer.Option(help="The HTML file to write.")] = Path("inspect.html"),
    request: Annotated[
        str | None, typer.Option(help="The request of the trace, by its id or the id's beginning; by default the last.")
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="With --prompt: folder or hub id of the target; by default the built-in pair.")
    ] = None,
    draft: Annotated[str | None, typer.Option(help='With --prompt: the draft instead of the "model" of --gsd.')] = None,
    gsd: Annotated[str | None, typer.Option(help="With --prompt: path of a gsd.json, or its keys as JSON.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="With --prompt: most tokens of the answer.")] = 200,
    engine_args: Annotated[str, typer.Option(help="With --prompt: more arguments of vLLM's LLM, as JSON.")] = "{}",
    trace_to: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            help='With --prompt: a file to which the trace is appended; by default the "trace" of --gsd, if any.',
        ),
    ] = None,
) -> None:
    """Show what token graphs did for a request, as one HTML page: for a prompt, or from an engine's trace."""
    from vllm_gsd.tools.output import try_file

    if (trace is None) == (prompt is None):
        fail("Give either a trace or --prompt.")
    _refuse_others(context, prompt is not None)
    if out.resolve() in (file.resolve() for file in (trace, trace_to) if file is not None):
        fail(f'--out is "{out}", which is the trace; give another file.')
    with prints_to_stderr(), one_sentence("The inspector needs the package {}, which comes with vLLM."):
        try_file(out, "--out")
        from vllm_gsd.tools.inspect.page import inspect_page
        from vllm_gsd.tools.inspect.run import record

        if trace is not None:
            shown = _of_trace(trace, request)
        else:
            assert prompt is not None
            if trace_to is not None:
                try_file(trace_to, "--trace")
            with tempfile.TemporaryDirectory() as folder:
                chosen, keys = _pair(target, draft, gsd)
                kept = trace_to or keys.get("trace") or Path(folder, "trace.jsonl")
                keys["trace"] = str(Path(kept).absolute())
                others = {"model": "--target gives", "speculative_config": "--gsd gives"}
                shown = record(prompt, chosen, keys, max_tokens, json_object(engine_args, "--engine-args", others))
        page = inspect_page(shown)
    try:
        out.write_text(page, "utf-8")
    except OSError as error:
        fail(f'--out is "{out}", but that file cannot be written ({error.strerror}).')
    typer.echo(json.dumps({"page": str(out), "request": shown.request["request"], "steps": len(shown.steps)}))


def _of_trace(path: Path, request: str | None) -> "Trace":
    """The request of a trace to show; says so if there are others."""
    from vllm_gsd.tools.inspect.trace import choose, read_traces

    traces = read_traces(path)
    shown = choose(traces, request, path)
    if len(traces) > 1:
        said = f"The trace has {len(traces)} requests; this is {shown.request['request']}."
        err.print(said, highlight=False, markup=False)
    return shown


def _refuse_others(context: typer.Context, answers: bool) -> None:
    """Refuse options that would be ignored: those for --prompt with a trace, and --request with --prompt."""
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        given = source is not None and source.name == "COMMANDLINE"
        if given and parameter.name not in ("trace", "prompt", "out") and (parameter.name == "request") == answers:
            fail(f"{parameter.opts[0]} is given {WITH[answers]}; leave it out.")


def _pair(target: str | None, draft: str | None, gsd: str | None) -> tuple[str, dict[str, Any]]:
    """The target, and the keys of the gsd config."""
    from vllm_gsd.config import GSDConfig
    from vllm_gsd.config.source import origin_of, read
    from vllm_gsd.tools.models import built_in_pair

    keys: dict[str, Any] = {"method": "gsd"} if gsd is None else read(gsd)
    if target is None:
        pair = built_in_pair()
        target, keys = str(pair.target), {"model": str(pair.draft), **keys}
    elif gsd is None:
        keys["model"] = None
    if draft is not None:
        keys = {**keys, "model": draft}
    if not GSDConfig.load(keys, None if gsd is None else origin_of(gsd)).speculates:
        fail('"sources" in --gsd is empty, so there is no graph to show; name a source or leave it out.')
    return target, keys
