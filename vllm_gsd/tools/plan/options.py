"""The options of ``vllm-gsd plan``, each with its type, default and help."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from vllm_gsd.tools.cli.options import finite, flag
from vllm_gsd.tools.errors import ToolError


@dataclass(frozen=True)
class Options:
    """What a plan was asked for. The command takes its options from these fields."""

    report: Annotated[
        Path,
        Argument(help="bench.json of vllm-gsd bench --methods plain,gsd-off,gsd with the batch sizes of interest."),
    ]
    out: Annotated[Path, Option(help="Folder for plan.json and plan.png.")] = Path("out/plan")
    trace: Annotated[
        Path | None, Option(help="Trace of real requests, whose acceptance counts instead of the report's.")
    ] = None
    machine: Annotated[
        str, Option(help='"report" for the machine that was measured, or a GPU: a10, l4, l40s, a100, h100, h200, b200.')
    ] = "report"
    target: Annotated[Path | None, Option(help="With a GPU: folder (no hub id) with the target's config.json.")] = None
    draft: Annotated[
        Path | None,
        Option(help="With a GPU: folder (no hub id) with the draft's config.json; by default the report's."),
    ] = None
    prompt_tokens: Annotated[int | None, Option(min=1, help="Mean tokens of a prompt, if not the report's.")] = None
    answer_tokens: Annotated[int | None, Option(min=1, help="Mean tokens of an answer, if not the report's.")] = None
    rate: Annotated[
        float | None, Option(min=0, callback=finite, help="Requests per second of a fleet, to count its replicas.")
    ] = None
    latency: Annotated[
        float | None,
        Option(min=0, callback=finite, help="With --rate: longest time of an average request, in seconds."),
    ] = None
    validate: Annotated[
        str,
        Option(help="Batch sizes of the report to learn from, comma-separated: predict all and compare with measured."),
    ] = ""
    within: Annotated[
        float,
        Option(min=0, callback=finite, help="With --validate: largest relative error. Above it the exit code is 1."),
    ] = 0.1

    def __post_init__(self) -> None:
        given = [field.name for field in fields(self) if getattr(self, field.name) != field.default]
        without = {
            "latency": (self.rate is None, "is only for a fleet; give --rate, too, or leave it out"),
            "within": (not self.validate, "is only for --validate; leave it out"),
        }
        for model in ("target", "draft"):
            without[model] = (self.machine == "report", "is only for a GPU; give --machine, too, or leave it out")
        for name in given:
            if self.validate and name not in ("report", "validate", "within"):
                raise ToolError(f"{flag(name)} is given with --validate, which only reads the report; leave it out.")
            ignored, sentence = without.get(name, (False, ""))
            if ignored:
                raise ToolError(f"{flag(name)} {sentence}.")
