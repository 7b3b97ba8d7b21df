"""The whole plan: predictions by batch size, the best gsd.json, replicas; and predictions against measurements."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from vllm_gsd.config.draft_kind import BLOCK_KINDS
from vllm_gsd.tools.errors import ToolError
from vllm_gsd.tools.output import make_folder, write_whole
from vllm_gsd.tools.plan.fleet import BUSY, replicas
from vllm_gsd.tools.plan.gpus import GPUS, machine_of
from vllm_gsd.tools.plan.model import Form, Model, Workload
from vllm_gsd.tools.plan.options import Options
from vllm_gsd.tools.plan.report import Report, checked_kind
from vllm_gsd.tools.plan.shapes import block_rows, read_shapes
from vllm_gsd.tools.plan.trace import observed

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
ASSUMPTIONS = [
    "All requests are of average length, arrive evenly, and are answered greedily or as in the report.",
    "Every request's graph is the average one; the planner gains a little more by drafting less for harder texts.",
    "Prefix caching, preemption and queueing are left out.",
]


def plan(options: Options) -> dict[str, Any]:
    """Write ``plan.json`` and ``plan.png`` into ``options.out``. Returns what is in the JSON.

    Raises:
        ToolError: the plan cannot be made as asked, or nothing can be written into ``options.out``.
    """
    import matplotlib  # noqa: F401  # if it is missing, this fails before anything is written

    if options.machine not in ("report", *GPUS):
        raise ToolError(f'--machine is "{options.machine}", but must be report or one of {", ".join(GPUS)}.')
    report = Report(options.report)
    draft = report.draft if options.draft is None else str(options.draft)
    kind = report.kind if options.draft is None else checked_kind(draft)
    make_folder(options.out, "--out")
    workload = report.workload()
    workload = Workload(options.prompt_tokens or workload.prompt, options.answer_tokens or workload.answer)
    if options.machine == "report":
        machine = report.machine(workload)
    else:
        if options.target is None:
            raise ToolError("--machine with a GPU needs --target, a folder with the target's config.json.")
        shapes = read_shapes(options.target), read_shapes(Path(draft), report.keys.get("draft_vocab_size"))
        machine = machine_of(options.machine, *shapes, workload)
    traced = observed(options.trace) if options.trace else None
    limits = report.form
    model = Model(machine, report.acceptance(traced), workload, _block(kind, draft, limits))
    most = min(BATCHES[-1], machine.most or BATCHES[-1])
    fleet: dict[str, Any] | None = None
    usual = 1
    if options.rate is not None:
        fleet = {
            name: replicas(model, form, options.rate, options.latency, most)
            for name, form in (("plain", None), ("graph", limits))
        }
        usual = fleet["graph"]["requests_at_once"]
    best = model.best_form(usual, limits)
    found = {
        "assumptions": [*machine.assumptions, *ASSUMPTIONS],
        "workload": asdict(workload),
        "batches": {str(batch): _row(model, batch, limits) for batch in BATCHES if batch <= most},
        "speculation_off_from": model.turns_off(limits, most),
        "most_requests": most,
        "gsd_json": {"method": "gsd", "model": draft, **report.keys, **asdict(best)},
        "for_requests_at_once": usual,
        "fleet": fleet and {**fleet, "requests_per_second": options.rate, "busy": BUSY},
    }
    write_whole(options.out / "plan.json", json.dumps(found, indent=1))
    _draw(found, options.out / "plan.png")
    return found


def _block(kind: str, draft: str, form: Form) -> int | None:
    """See ``Model.block``."""
    return block_rows(draft, form.num_speculative_tokens) if kind in BLOCK_KINDS else None


def _row(model: Model, batch: int, limits: Form) -> dict[str, float]:
    """Tokens per second at a batch size, the gains over plain vLLM, and the graph's own over our engine without it."""
    chain = replace(limits, top_k=1)
    speeds = {
        "plain": model.tokens_per_second(batch, None),
        "off": model.tokens_per_second(batch, None, off=True),
        "chain": model.tokens_per_second(batch, chain),
        "graph": model.tokens_per_second(batch, limits),
    }
    gains = {f"{name}_over_plain": speeds[name] / speeds["plain"] for name in ("off", "chain", "graph")}
    own = speeds["graph"] / speeds["off"]
    return {**speeds, **gains, "graph_over_off": own, "pays": model.pays(batch, limits)}


def validate(path: Path, learn: list[int]) -> list[dict[str, Any]]:
    """Learn from some batch sizes of a report and predict all.

    Returns:
        by batch size: ``batch``, ``learned`` (whether the model saw it), and for the gain over plain and over gsd-off
        the ``predicted`` and the ``measured`` one and the ``error``, predicted over measured minus 1.
    """
    report = Report(path, learn)
    workload = report.workload()
    block = _block(report.kind, report.draft, report.form)
    model = Model(report.machine(workload), report.acceptance(), workload, block)
    rows: list[dict[str, Any]] = []
    for batch, methods in sorted(report.all.items()):
        running = report.running(batch)
        ours = model.tokens_per_second(running, report.form)
        row: dict[str, Any] = {"batch": batch, "learned": batch in learn}
        for name, off in (("plain", False), ("off", True)):
            predicted = ours / model.tokens_per_second(running, None, off)
            measured = methods["gsd"][f"ratio_to_{name}"]["median"]
            row[name] = {"predicted": predicted, "measured": measured, "error": predicted / measured - 1}
        rows.append(row)
    return rows


def _draw(found: dict[str, Any], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (speeds, gains) = plt.subplots(1, 2, figsize=(12, 4.5))
    batches = [int(batch) for batch in found["batches"]]
    labels = {"plain": "plain vLLM", "off": "our engine, no speculation", "chain": "chain", "graph": "graph"}
    for axes in (speeds, gains):
        for place, (name, label) in enumerate(labels.items()):
            key = name if axes is speeds else f"{name}_over_plain"
            if all(key in row for row in found["batches"].values()):
                values = [row[key] for row in found["batches"].values()]
                axes.plot(batches, values, marker="o", color=f"C{place}", label=label)
        axes.set_xscale("log", base=2)
        axes.set_xticks(batches, [str(batch) for batch in batches])
        axes.set_xlabel("requests at once")
        axes.grid(alpha=0.3)
    speeds.legend()
    speeds.set_ylabel("tokens per second")
    gains.set_ylabel("speed over plain vLLM")
    gains.axhline(1.0, color="grey", linewidth=1)
    if (last := found["speculation_off_from"]) is not None:
        gains.axvline(last, color="grey", linestyle="--", linewidth=1)
        gains.annotate(f"no speculation\nfrom {last} on", (last, gains.get_ylim()[1]), va="top", fontsize=8)
    figure.savefig(file, dpi=120, bbox_inches="tight")
    plt.close(figure)
