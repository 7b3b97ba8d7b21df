"""``vllm-gsd bench``."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table

from vllm_gsd.config.source import with_underscores
from vllm_gsd.tools.bench.methods import Drafts
from vllm_gsd.tools.bench.options import LONGEST, NOT_ENGINE_ARGS, Options, numbers
from vllm_gsd.tools.cli.console import err, fail, json_object, one_sentence
from vllm_gsd.tools.cli.options import takes

if TYPE_CHECKING:
    from vllm_gsd.tools.bench.turns import Work

LEAST_FREE = 0.01


@takes(Options)
def bench(**given: Any) -> None:
    """Compare the graph with plain vLLM and its drafters. Methods take turns, each at its best setting."""
    with one_sentence("The comparison needs the package {}, which comes with vLLM."):
        from vllm_gsd.tools.bench import run

        options = Options(**given)
        target, draft, other = _pair(options)
        keys = json_object(options.gsd, "--gsd", {"method": "--methods gives", "model": "--draft gives"})
        work = _work(options, target)
        settings = _settings(options, target, draft, work)
        report = run.bench(options, Drafts.of(draft, other), with_underscores(keys, "--gsd"), work, settings)
    table = Table("batch", "method, best setting", "tokens/s", "over plain", "over gsd-off", "tokens/step")
    for row in run.summary(report):
        table.add_row(*row)
    err.print(table)
    typer.echo(json.dumps({"report": str(options.out / "bench.json"), "page": str(options.out / "index.html")}))


def _work(options: Options, target: str) -> Work:
    import torch

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
            "model": target,
            "dtype": options.dtype,
            "max_model_len": options.max_model_len or positions_of(local_folder(target), LONGEST),
            "kv_cache_memory_bytes": 1 << 30,
            # Engines stand side by side on a GPU, and each starts only if this share of its memory is free.
            **({"gpu_memory_utilization": LEAST_FREE} if torch.cuda.is_available() else {}),
            "enable_prefix_caching": False,
            **json_object(options.engine_args, "--engine-args", NOT_ENGINE_ARGS),
        },
        logs=options.out / "logs",
        apart=options.apart,
        choose_with=options.choose_with,
    )


def _settings(options: Options, target: str, draft: str | None, work: Work) -> dict[str, Any]:
    """The head of the report."""
    from vllm_gsd.config.draft_check import kind_of_model

    models = {"target": target, "draft": draft}
    kept = ("limit", "max_tokens", "repeats", "modes", "chain_lengths", "gsd")
    kind = None if draft is None else kind_of_model(draft)
    return {
        **{role: os.path.abspath(name) if name and os.path.exists(name) else name for role, name in models.items()},
        "draft_kind": kind,
        "prompts": options.prompts.name,
        **{name: getattr(options, name) for name in kept},
        **{name: value for name, value in work.engine_args.items() if name != "model"},
    }


def _pair(options: Options) -> tuple[str, str | None, str | None]:
    """Paths of the target, its draft, and a draft that is a language model."""
    from vllm_gsd.config import GSDConfigError
    from vllm_gsd.config.draft_check import find_draft, kind_of_model
    from vllm_gsd.config.draft_kind import LANGUAGE_MODEL

    target, draft, other = (
        None if path is None else str(path) for path in (options.target, options.draft, options.draft_model)
    )
    try:
        if draft is not None:
            find_draft(draft)  # its config.json tells which of vLLM's methods can use it
    except GSDConfigError as error:
        fail(str(error).replace('"model"', "--draft", 1))
    if draft is not None and other is not None and kind_of_model(draft) == LANGUAGE_MODEL:
        fail(f'--draft-model is given, but "{draft}" is a language model; leave it out.')
    if target is not None:
        return target, draft, other
    from vllm_gsd.tools.models import built_in_pair

    pair = built_in_pair()
    return str(pair.target), draft or str(pair.draft), other or str(pair.draft_model)
