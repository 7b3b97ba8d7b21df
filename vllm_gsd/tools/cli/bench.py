"""``vllm-gsd bench``."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table

from vllm_gsd.tools.bench.options import LONGEST, NOT_ENGINE_ARGS, Options
from vllm_gsd.tools.cli.console import err, fail, json_object, one_sentence
from vllm_gsd.tools.cli.options import takes

if TYPE_CHECKING:
    from vllm_gsd.tools.bench.run import Plan
    from vllm_gsd.tools.bench.turns import Work

# Paths of the target, its draft, and a draft that is a language model.
Pair = tuple[str, str | None, str | None]


@takes(Options)
def bench(**given: Any) -> None:
    """Compare the graph with plain vLLM and its drafters. Methods take turns, each at its best setting."""
    with one_sentence("The comparison needs the package {}, which comes with vLLM."):
        from vllm_gsd.tools.bench import run

        options = Options(**given)
        pair = _pair(options)
        plan, work = _plan(options, pair), _work(options, pair)
        report = run.bench(plan, work, _settings(options, pair, work), options.out)
    table = Table("batch", "method, best setting", "tokens/s", "over plain", "over gsd-off", "tokens/step")
    for row in run.summary(report):
        table.add_row(*row)
    err.print(table)
    typer.echo(json.dumps({"report": str(options.out / "bench.json"), "page": str(options.out / "index.html")}))


def _plan(options: Options, pair: Pair) -> Plan:
    from vllm_gsd.config.source import with_underscores
    from vllm_gsd.tools.bench.methods import Drafts
    from vllm_gsd.tools.bench.run import Plan

    others = {"method": "--methods gives", "model": "--draft gives"}
    return Plan(
        methods=options.methods.split(","),
        modes=options.modes.split(","),
        lengths=numbers(options.chain_lengths, "--chain-lengths"),
        drafts=Drafts.of(pair[1], pair[2]),
        gsd=with_underscores(json_object(options.gsd, "--gsd", others), "--gsd"),
        contexts=numbers(options.contexts, "--contexts") if options.contexts else [],
        forms=options.forms,
        analyses=options.analyses,
    )


def _work(options: Options, pair: Pair) -> Work:
    from vllm_gsd.config.draft_check import local_folder
    from vllm_gsd.config.draft_kind import positions_of
    from vllm_gsd.tools.bench.turns import Work
    from vllm_gsd.tools.prompt_file import read_requests, thinned

    return Work(
        requests=thinned(read_requests(options.prompts), options.limit),
        batch_sizes=numbers(options.batch_sizes, "--batch-sizes"),
        repeats=options.repeats,
        max_tokens=options.max_tokens,
        engine_args={
            "model": pair[0],
            "dtype": options.dtype,
            "max_model_len": options.max_model_len or positions_of(local_folder(pair[0]), LONGEST),
            "kv_cache_memory_bytes": 1 << 30,
            "enable_prefix_caching": False,
            **json_object(options.engine_args, "--engine-args", NOT_ENGINE_ARGS),
        },
        logs=options.out / "logs",
        apart=options.apart,
        choose_with=options.choose_with,
    )


def _settings(options: Options, pair: Pair, work: Work) -> dict[str, Any]:
    """The head of the report."""
    kept = ("limit", "max_tokens", "repeats", "modes", "chain_lengths", "gsd")
    target, draft = (name and (os.path.abspath(name) if os.path.exists(name) else name) for name in pair[:2])
    return {
        "target": target,
        "draft": draft,
        "prompts": options.prompts.name,
        **{name: getattr(options, name) for name in kept},
        **{name: value for name, value in work.engine_args.items() if name != "model"},
    }


def _pair(options: Options) -> Pair:
    from vllm_gsd.config.draft_check import kind_of_model
    from vllm_gsd.config.draft_kind import LANGUAGE_MODEL

    target, draft, other = (
        None if path is None else str(path) for path in (options.target, options.draft, options.draft_model)
    )
    if draft is not None and other is not None and kind_of_model(draft) == LANGUAGE_MODEL:
        fail(f'--draft-model is given, but "{draft}" is a language model or not on this machine; leave it out.')
    if target is not None:
        return target, draft, other
    from vllm_gsd.tools.models import built_in_pair

    pair = built_in_pair()
    return str(pair.target), draft or str(pair.draft), other or str(pair.draft_model)


def numbers(text: str, option: str) -> list[int]:
    """The whole numbers of an option, ascending. The command fails if it has others."""
    try:
        numbers = sorted({int(number) for number in text.split(",")})
    except ValueError:
        numbers = []
    if not numbers or numbers[0] < 1:
        fail(f'{option} is "{text}", but must be whole numbers above 0 separated by commas.')
    return numbers
