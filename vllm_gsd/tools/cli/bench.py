"""``vllm-gsd bench``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from vllm_gsd.config import GSDConfig
from vllm_gsd.tools.cli.console import err, fail


def bench(
    prompts: Annotated[
        Path, typer.Argument(help='One JSON object a line with "turns" (Spec-Bench), "messages" or "prompt".')
    ],
    out: Annotated[Path, typer.Option(help="Folder for bench.json, PNG files and index.html.")] = Path("out/bench"),
    target: Annotated[Path | None, typer.Option(help="Folder of the target; the built-in pair's without.")] = None,
    draft: Annotated[Path | None, typer.Option(help="Folder of the draft; the built-in one for its target.")] = None,
    draft_model: Annotated[
        Path | None,
        typer.Option(help="Draft for vLLM's draft_model where --draft is no language model; the built-in one without."),
    ] = None,
    methods: Annotated[
        str,
        typer.Option(
            help="Comma-separated. Ratios are to plain, those of graphs to gsd-off too: our engine without a graph."
        ),
    ] = "plain,draft_model,eagle,ngram,suffix,gsd-off,gsd,gsd-tree,gsd-chain",
    modes: Annotated[
        str, typer.Option(help="eager, compiled, or both: then the better one counts.")
    ] = "eager,compiled",
    chain_lengths: Annotated[str, typer.Option(help="Numbers of tokens that vLLM's chains may draft.")] = "1,2,3,4,5,6",
    gsd: Annotated[
        str,
        typer.Option(
            help=f"Keys of gsd.json for all forms of the graph, as JSON: {', '.join(GSDConfig.model_fields)}."
        ),
    ] = "{}",
    batch_sizes: Annotated[str, typer.Option(help="Requests at once, comma-separated.")] = "1",
    limit: Annotated[int | None, typer.Option(min=1, help="So many prompts, evenly over the file.")] = 12,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 96,
    repeats: Annotated[int, typer.Option(min=1, help="Turns of each method.")] = 5,
    choose_with: Annotated[int, typer.Option(min=1, help="Prompts with which best settings are chosen.")] = 4,
    dtype: str = "bfloat16",
    max_model_len: int = 2048,
    engine_args: Annotated[str, typer.Option(help="More arguments of vLLM's LLM, as JSON.")] = "{}",
    apart: Annotated[
        bool, typer.Option("--apart", help="Start an engine anew for each turn: memory holds not all of them.")
    ] = False,
    contexts: Annotated[
        str, typer.Option(help="Tokens of context, comma-separated: how a step grows with them, one request at a time.")
    ] = "",
    forms: Annotated[
        bool, typer.Option("--forms", help="Graph, tree and chain in turns in one engine, by category, with bounds.")
    ] = False,
    analyses: Annotated[
        bool, typer.Option("--analyses", help="The paper's ablations and re-occurring n-grams, too.")
    ] = False,
) -> None:
    """Compare the graph with plain vLLM and its drafters, taking turns, each at its best setting."""
    from vllm_gsd.tools.bench.methods import MODES, BenchError, Drafts
    from vllm_gsd.tools.bench.turns import Work
    from vllm_gsd.tools.prompt_file import PromptsError, read_requests, thinned

    try:
        from vllm_gsd.tools.bench.run import Plan, summary
        from vllm_gsd.tools.bench.run import bench as run
    except ModuleNotFoundError as error:
        fail(f"The comparison needs the package {error.name} (pip install 'vllm-gsd[bench]').")
    chosen_modes = modes.split(",")
    if wrong := [mode for mode in chosen_modes if mode not in MODES]:
        fail(f'--modes has "{wrong[0]}", but must be of {", ".join(MODES)}.')
    pair = _pair(target, draft, draft_model)
    work_args: dict[str, Any] = {
        "model": pair[0],
        "dtype": dtype,
        "max_model_len": max_model_len,
        "kv_cache_memory_bytes": 1 << 30,
        "enable_prefix_caching": False,
        **_object(engine_args, "--engine-args"),
    }
    try:
        work = Work(
            requests=thinned(read_requests(prompts), limit),
            batch_sizes=_numbers(batch_sizes, "--batch-sizes"),
            repeats=repeats,
            max_tokens=max_tokens,
            engine_args=work_args,
            logs=out / "logs",
            apart=apart,
            choose_with=choose_with,
        )
        plan = Plan(
            methods=methods.split(","),
            modes=chosen_modes,
            lengths=_numbers(chain_lengths, "--chain-lengths"),
            drafts=Drafts.of(pair[1], pair[2]),
            gsd=_object(gsd, "--gsd"),
            contexts=_numbers(contexts, "--contexts") if contexts else [],
            forms=forms,
            analyses=analyses,
        )
        settings = {
            "target": Path(pair[0]).name,
            "draft": pair[1] and Path(pair[1]).name,
            "prompts": prompts.name,
            "limit": limit,
            "max_tokens": max_tokens,
            "repeats": repeats,
            "dtype": dtype,
            "gsd": gsd,
        }
        report = run(plan, work, settings, out)
    except (BenchError, PromptsError) as error:
        fail(str(error))
    table = Table("batch", "method, best setting", "tokens/s", "over plain", "over gsd-off", "tokens/step")
    for row in summary(report):
        table.add_row(*row)
    err.print(table)
    typer.echo(json.dumps({"report": str(out / "bench.json"), "page": str(out / "index.html")}))


def _pair(target: Path | None, draft: Path | None, other: Path | None) -> tuple[str, str | None, str | None]:
    """Folders of the target, of the draft, and of one that is a language model."""
    if target is not None:
        return str(target), None if draft is None else str(draft), None if other is None else str(other)
    from vllm_gsd.tools.models import ModelsError, built_in_pair

    try:
        pair = built_in_pair()
    except ModelsError as error:
        fail(str(error))
    return str(pair.target), str(draft or pair.draft), str(other or pair.draft_model)


def _numbers(text: str, option: str) -> list[int]:
    try:
        numbers = sorted({int(number) for number in text.split(",")})
    except ValueError:
        numbers = []
    if not numbers or numbers[0] < 1:
        fail(f'{option} is "{text}", but must be whole numbers above 0 separated by commas.')
    return numbers


def _object(text: str, option: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        fail(f"{option} is '{text}', but must be a JSON object.")
    return value
