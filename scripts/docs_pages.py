"""Generates the parts of the documentation that come from the code, such as keys, refusals, metrics and modules.

Each page has a region between two comments, which this program fills. ``check_docs.py`` fails if a page is out of date.
"""

import ast
import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from pydantic_core import PydanticUndefined  # noqa: E402

from vllm_gsd.config import GSDConfig, allowed, extra_of  # noqa: E402
from vllm_gsd.engine.refusals import REFUSALS  # noqa: E402
from vllm_gsd.upstream.inventory import PATCHES  # noqa: E402

DOCS = ROOT / "docs"
COLUMNS = {"v1-cpu": ("V1", "CPU"), "v2-cpu": ("V2", "CPU"), "v2-gpu": ("V2", "GPU")}
METRICS = ROOT / "vllm_gsd/engine/observe/metrics.py"
TABLES = {"COUNTERS": "counter", "GAUGES": "gauge", "BY_REASON": 'counter by "reason"', "HISTOGRAMS": "histogram"}
# The packages on the API page, which other projects may build on.
API = ("config", "method", "planner", "ops", "cpu")


class DocsError(ValueError):
    """The sources of a page contradict one another."""


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def keys() -> str:
    """The keys of ``gsd.json``, from the pydantic model."""
    rows = []
    for name, field in GSDConfig.model_fields.items():
        described = extra_of(name).get("default")
        default = described or ("required" if field.default is PydanticUndefined else f"`{json.dumps(field.default)}`")
        rows.append([f"`{name}`", allowed(name), default, field.description or ""])
    return table(["Key", "Allowed", "Default", "Meaning"], rows)


def support() -> str:
    """Features by runner and platform, from ``support.toml`` and the table of refusals."""
    refused: dict[str, set[tuple[str, str]]] = {}
    for refusal in REFUSALS:
        where = {(runner, platform) for runner in refusal.runners for platform in refusal.platforms}
        refused.setdefault(refusal.feature, set()).update(where)
    rows, named = [], set()
    for feature in tomllib.loads((DOCS / "support.toml").read_text())["feature"]:
        refusal_name = feature.get("refusal", "")
        named.add(refusal_name)
        rows.append(_row(feature, refused.get(refusal_name, set())))
    elsewhere = []
    for name, where in refused.items():
        if not where & set(COLUMNS.values()):
            elsewhere.append(name)
        elif name not in named:
            cells = {column: "n/a" for column, place in COLUMNS.items() if place not in where}
            rows.append(_row({"name": name[0].upper() + name[1:], "cells": cells, "tests": [REFUSAL_TEST]}, where))
    return (
        table(["Feature", "V1, CPU", "V2, CPU", "V2, GPU", "Test"], rows)
        + f"\n\nAlso refused (`{REFUSAL_TEST}`): {', '.join(elsewhere)}."
    )


REFUSAL_TEST = "tests/unit/test_refusals.py::test_refused"


def _row(feature: dict[str, Any], refused: set[tuple[str, str]]) -> list[str]:
    cells = []
    for column, place in COLUMNS.items():
        given = feature["cells"].get(column)
        if (given is None) != (place in refused):
            raise DocsError(f"{feature['name']}: {column} is {given}, which the table of refusals contradicts")
        cells.append(given or "refused")
    note = f" ({feature['note']})" if "note" in feature else ""
    return [feature["name"] + note, *cells, ", ".join(f"`{test}`" for test in feature["tests"])]


def tests_named() -> list[str]:
    """The tests that the support matrix names."""
    features = tomllib.loads((DOCS / "support.toml").read_text())["feature"]
    return [REFUSAL_TEST, *(test for feature in features for test in feature["tests"])]


def metrics() -> str:
    """The metrics, parsed from ``metrics.py``, which cannot be imported without vLLM."""
    rows = []
    for statement in ast.parse(METRICS.read_text()).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            kind = TABLES.get(statement.targets[0].id)
            for name, text in ast.literal_eval(statement.value).items() if kind else ():
                rows.append([f"`vllm:gsd_{name}`", kind or "", text])
    return table(["Metric", "Kind", "Meaning"], rows)


def upstream() -> str:
    """The plugin's changes to vLLM, from the inventory."""
    rows = [[f"`{one.dotted}`", one.when, one.delta, one.reason, one.expiry, f"`{one.contract}`"] for one in PATCHES]
    return table(["Symbol", "When", "Change", "Reason", "Goes when", "Contract test"], rows)


def api() -> str:
    """The modules with public names, for mkdocstrings."""
    parts = []
    for package in API:
        folder = ROOT / "vllm_gsd" / package
        modules = [path for path in sorted(folder.rglob("*.py")) if path.name != "__init__.py" and _public(path)]
        names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in modules]
        parts += [f"## {package}", *(f"::: {name}" for name in names)]
    return "\n\n".join(parts)


def _public(path: Path) -> bool:
    tree = ast.parse(path.read_text())
    return any(isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name[0] != "_" for node in tree.body)


# The title of a note in experiments of the time before the third column.
MIXED = "Ratios to plain vLLM include our CPU kernels"


def experiments() -> str:
    """One line per experiment, newest first: its title and its result, the first paragraph of the file.

    A note that ratios mix our kernels with speculation is repeated here.
    """
    lines = []
    for path in sorted(DOCS.glob("experiments/2*.md"), reverse=True):
        text = path.read_text()
        title, first = text.split("\n\n")[:2]
        note = f" *{MIXED}.*" if f'!!! note "{MIXED}"' in text else ""
        lines.append(f"- {path.name[:10]} [{title.removeprefix('# ')}]({path.name}): {' '.join(first.split())}{note}")
    return "\n".join(lines)


PAGES = {
    "reference/gsd-json.md": keys,
    "reference/support.md": support,
    "reference/metrics.md": metrics,
    "reference/upstream.md": upstream,
    "reference/api.md": api,
    "experiments/index.md": experiments,
}
REGION = re.compile(r"(<!-- generated by scripts/docs_pages.py -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(page: str) -> str:
    """The text of a page with its region regenerated."""
    text = (DOCS / page).read_text()
    if not REGION.search(text):
        raise DocsError(f"docs/{page} has no region to fill")
    return REGION.sub(lambda match: f"{match[1]}\n{PAGES[page]()}\n\n{match[2]}", text)


def outdated() -> list[str]:
    """The pages that differ from the code."""
    return [page for page in PAGES if filled(page) != (DOCS / page).read_text()]


def main() -> None:
    for page in outdated():
        (DOCS / page).write_text(filled(page))
        print(f"docs: wrote {page}")


if __name__ == "__main__":
    main()
