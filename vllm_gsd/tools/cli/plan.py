"""``vllm-gsd plan``."""

import json
from typing import Any, NoReturn

import typer
from rich.table import Table

from vllm_gsd.tools.bench.options import numbers
from vllm_gsd.tools.cli.console import err, one_sentence
from vllm_gsd.tools.cli.options import takes
from vllm_gsd.tools.plan.options import Options


@takes(Options)
def plan(**given: Any) -> None:
    """Predict from a bench report what speculation gives by batch size, and how many replicas a load needs."""
    from vllm_gsd.tools.plan.run import plan as run

    with one_sentence("The plan's plot needs the package {} (pip install 'vllm-gsd[bench]')."):
        options = Options(**given)
        if options.validate:
            _validate(options)
        found = run(options)
    table = Table("requests at once", "plain", "our engine", "chain", "graph", *GAINS, "speculate")
    for batch, row in found["batches"].items():
        speeds = [f"{row[name]:.0f}" for name in ("plain", "off", "chain", "graph")]
        gains = [f"{row[name]:.2f}" for name in GAINS.values()]
        table.add_row(batch, *speeds, *gains, "yes" if row["pays"] else "no")
    err.print(table)
    last = found["speculation_off_from"]
    losing = [batch for batch, row in found["batches"].items() if not row["pays"]]
    at = f"from {last}" if last else f"at {', '.join(losing)}"
    err.print(f"Speculation does not pay {at} requests at once." if losing else "Speculation pays at every batch size.")
    for name, row in (found["fleet"] or {}).items():
        if isinstance(row, dict):
            err.print(
                f"{name}: {row['replicas']} replicas with {row['requests_at_once']} requests at once, "
                f"{row['seconds_per_request']:.1f} s per request."
            )
    for sentence in found["assumptions"]:
        err.print(f"Assumed: {sentence}", highlight=False)
    typer.echo(json.dumps({"plan": str(options.out / "plan.json"), "gsd_json": found["gsd_json"]}))


def _validate(options: Options) -> NoReturn:
    """Compare predictions with the report."""
    from vllm_gsd.tools.plan.run import validate

    rows = validate(options.report, numbers(options.validate, "--validate"))
    table = Table("batch", "learned", *(f"{what} {over}" for over in ("over plain", "over gsd-off") for what in SHOWN))
    for row in rows:
        shown = [f"{row[over][name]:.2f}" for over in ("plain", "off") for name in SHOWN]
        table.add_row(str(row["batch"]), "yes" if row["learned"] else "", *shown)
    err.print(table)
    worst = max(abs(row[over]["error"]) for row in rows for over in ("plain", "off"))
    typer.echo(json.dumps({"rows": rows, "worst_error": worst}))
    raise typer.Exit(0 if worst <= options.within else 1)


SHOWN = ("predicted", "measured", "error")
# Columns with the gains of the graph, and their names in the plan.
GAINS = {"over plain": "graph_over_plain", "over our engine": "graph_over_off"}
