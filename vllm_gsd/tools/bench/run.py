"""The whole comparison: choose settings, take turns, analyse, and write JSON and a page."""

import json
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from vllm_gsd.config import GSDConfigError
from vllm_gsd.config.draft_check import check_draft, local_folder
from vllm_gsd.config.draft_kind import read_text_config
from vllm_gsd.tools.bench import contexts, forms
from vllm_gsd.tools.bench.analyses import analyse, num_runs
from vllm_gsd.tools.bench.methods import FORMS, OFF, Drafts, checked, missing_for, settings_of, with_off
from vllm_gsd.tools.bench.options import Options, numbers
from vllm_gsd.tools.bench.page import bench_page
from vllm_gsd.tools.bench.report import make_report
from vllm_gsd.tools.bench.turns import Engines, Work, choose, take_turns
from vllm_gsd.tools.errors import ToolError
from vllm_gsd.tools.output import make_folder, write_whole


def bench(
    options: Options, drafts: Drafts, gsd: dict[str, Any], work: Work, settings: dict[str, Any]
) -> dict[str, Any]:
    """Run the comparison and write ``bench.json`` and ``index.html`` into the folder. Returns the report.

    Args:
        gsd: the keys of ``options.gsd``.
        settings: what the report says about the options.

    Raises:
        ToolError, GSDConfigError: the comparison cannot run as asked, nothing can be written, or an engine died.
    """
    methods, modes, own = with_off(options.methods.split(",")), options.modes.split(","), drafts.own
    lengths = numbers(options.chain_lengths, "--chain-lengths")
    longer = numbers(options.contexts, "--contexts") if options.contexts else []
    skipped = {method: reason for method in methods if (reason := missing_for(method, drafts))}
    candidates = {
        method: settings_of(
            method, drafts=drafts, gsd=gsd, lengths=lengths, modes=modes, keeps_answers=not work.repeats_answers
        )
        for method in methods
        if method not in skipped
    }
    if not candidates:
        reasons = "; ".join(f"{method} {reason}" for method, reason in skipped.items())
        raise ToolError(f"No method can run: {reasons}.")
    _check(options, own, gsd, work, list(candidates))
    if longer:
        contexts.check(work, longer)
    make_folder(options.out, "--out")
    choices = sum(len(settings) for settings in candidates.values() if len(settings) > 1)
    ticks = choices + (work.repeats + 1) * len(work.batch_sizes) * len(candidates)
    ticks += work.repeats * (len(longer) * len(candidates) + options.forms)
    if options.analyses and own is not None:
        ticks += num_runs(own)
    with _progress(ticks) as tick, Engines(work) as engines:
        chosen = choose(candidates, work, tick)
        runs = take_turns(chosen, engines, tick)
        report = {"settings": settings, **make_report(chosen, runs, work, skipped)}
        _write(report, options.out)
        best = {method: by_batch[min(work.batch_sizes)]["setting"] for method, by_batch in chosen.items()}
        if longer:
            report["contexts"] = contexts.measure(best, engines, longer, tick)
            _write(report, options.out)
        if options.forms:
            report["forms_in_turns"] = forms.measure(best["gsd"], engines, tick)
            _write(report, options.out)
        if options.analyses and own is not None:
            report["analyses"] = analyse(own, gsd, "compiled" in modes, work, tick)
            _write(report, options.out)
    return report


def _check(options: Options, own: str | None, gsd: dict[str, Any], work: Work, methods: list[str]) -> None:
    """Refuse what would fail only after the comparison."""
    checked(own, gsd)  # even if no method reads it
    if "shared" in gsd.get("sources", []) and work.repeats_answers:
        raise ToolError(
            '--gsd has the source "shared", which would copy the answers on which it is timed: with it, a run needs '
            "one rank and at least twice as many prompts as requests at once; raise --limit or leave it out."
        )
    if own is not None and (options.analyses or {OFF, *FORMS} & set(methods)):
        _check_draft(str(work.engine_args["model"]), own, gsd)
    if options.analyses and own is None:
        raise ToolError("--analyses needs a draft model.")
    if options.analyses and (fixed := [key for key in ("sources", "budget") if key in gsd]):
        raise ToolError(f'--gsd has "{fixed[0]}", which --analyses sets itself; leave it out.')
    if options.forms and "gsd" not in methods:
        raise ToolError('--forms needs "gsd" among --methods.')
    if options.forms and (torch.cuda.is_available() or work.engine_args.get("tensor_parallel_size", 1) != 1):
        raise ToolError("--forms needs Model Runner V1 and one rank, so no GPU and no tensor_parallel_size.")


def _check_draft(target: str, draft: str, gsd: dict[str, Any]) -> None:
    """Refuse a draft that does not fit a target on this machine, before methods run that need none."""
    vocab_size = read_text_config(local_folder(target)).get("vocab_size")
    if isinstance(vocab_size, int):
        try:
            check_draft(draft, vocab_size, target, gsd.get("draft_vocab_size"))
        except GSDConfigError as error:
            raise ToolError(str(error).replace('"model"', "--draft", 1)) from None


def _write(report: dict[str, Any], out: Path) -> None:
    write_whole(out / "bench.json", json.dumps(report, indent=1))
    write_whole(out / "index.html", bench_page(report))


@contextmanager
def _progress(total: int):
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task("bench", total=total)

        def tick(done: str) -> None:
            progress.update(task, advance=1, description=done)

        yield tick


def summary(report: dict[str, Any]) -> list[tuple[str, ...]]:
    """Rows of a short table: batch size, setting, tokens/s, ratio to plain, ratio to gsd-off, tokens per step."""
    rows = []
    for batch, methods in report["batches"].items():
        for row in methods.values():
            ratios = [row.get(name) for name in ("ratio_to_plain", "ratio_to_off")]
            rows.append(
                (
                    batch,
                    row["setting"],
                    f"{row['tokens_per_second']['median']:.1f}",
                    *(f"{ratio['median']:.2f}" if ratio else "" for ratio in ratios),
                    f"{row['tokens_per_step']['median']:.2f}",
                )
            )
    return rows
