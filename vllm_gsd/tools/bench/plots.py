"""Plots of a bench report: PNG files and a page that shows them all."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import jinja2
import matplotlib.pyplot as plt

from vllm_gsd.tools.bench.parts import PARTS

PAGE = Path(__file__).with_name("page.html")


def draw(report: dict[str, Any], out: Path) -> list[Path]:
    """Write a PNG file for each plot, and ``index.html``, into ``out``. Returns the files."""
    pictures = {"speed-up over batch size": _speed_up, "step breakdown": _steps, "acceptance by depth": _depths}
    if report["categories"]:
        pictures["speed-up by category"] = _categories
    if "forms_in_turns" in report:
        pictures["graph over tree and chain"] = _forms
    if "analyses" in report:
        pictures |= {"ablations": _ablations, "re-occurring n-grams": _recurring}
    files = []
    for title, picture in pictures.items():
        figure = picture(report)
        files.append(out / f"{title.replace(' ', '-')}.png")
        figure.savefig(files[-1], dpi=120, bbox_inches="tight")
        plt.close(figure)
    data = {title: base64.b64encode(file.read_bytes()).decode() for title, file in zip(pictures, files, strict=True)}
    template = jinja2.Environment(autoescape=True).from_string(PAGE.read_text())
    page = template.render(**report, pictures=data, bounded=_bounded)
    (out / "index.html").write_text(page)
    return [*files, out / "index.html"]


def _speed_up(report: dict[str, Any]) -> plt.Figure:
    figure, (over_plain, over_off) = plt.subplots(1, 2, figsize=(13, 5))
    _ratio_by_batch(over_plain, report, "ratio_to_plain", "tokens/s over plain vLLM")
    _ratio_by_batch(over_off, report, "ratio_to_off", "tokens/s over our engine without a graph")
    return figure


def _ratio_by_batch(axes: plt.Axes, report: dict[str, Any], name: str, label: str) -> None:
    batches = list(report["batches"])
    for method in report["batches"][batches[0]]:
        ratios = [report["batches"][batch][method].get(name) for batch in batches]
        if None in ratios:
            continue
        middle = [ratio["median"] for ratio in ratios]
        axes.errorbar(
            [int(batch) for batch in batches],
            middle,
            yerr=[
                [m - ratio["min"] for m, ratio in zip(middle, ratios, strict=True)],
                [ratio["max"] - m for m, ratio in zip(middle, ratios, strict=True)],
            ],
            marker="o",
            capsize=3,
            label=method,
        )
    axes.set(xlabel="batch size", ylabel=label)
    axes.set_xscale("log", base=2)
    axes.axhline(1.0, color="grey", linewidth=1)
    if axes.get_legend_handles_labels()[1]:
        axes.legend()


def _steps(report: dict[str, Any]) -> plt.Figure:
    batches = report["batches"]
    figure, panels = plt.subplots(1, len(batches), figsize=(1 + 4 * len(batches), 5), squeeze=False)
    for axes, (batch, methods) in zip(panels[0], batches.items(), strict=True):
        rows = {name: row["step_parts_ms"] for name, row in methods.items() if row["step_parts_ms"]}
        bottom = [0.0] * len(rows)
        for part in PARTS:
            heights = [parts[part] for parts in rows.values()]
            axes.bar(list(rows), heights, bottom=bottom, label=part)
            bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
        axes.set(title=f"batch {batch}", ylabel="ms per step")
        axes.tick_params(axis="x", rotation=60)
    panels[0][-1].legend()
    return figure


def _depths(report: dict[str, Any]) -> plt.Figure:
    batch, methods = next(iter(report["batches"].items()))
    figure, axes = plt.subplots(figsize=(8, 5))
    for method, row in methods.items():
        shares = row["acceptance_by_depth"]
        if shares:
            axes.plot(range(1, len(shares) + 1), shares, marker="o", label=method)
    axes.set(xlabel="depth", ylabel="share of drafts accepted so far", title=f"batch {batch}")
    if axes.get_legend_handles_labels()[1]:
        axes.legend()
    return figure


def _categories(report: dict[str, Any]) -> plt.Figure:
    categories = report["categories"]
    figure, axes = plt.subplots(figsize=(9, 5))
    methods = [method for method in next(iter(categories.values())) if method != "plain"]
    width = 0.8 / max(1, len(methods))
    for place, method in enumerate(methods):
        at = [index + place * width for index in range(len(categories))]
        axes.bar(at, [ratios[method] for ratios in categories.values()], width, label=method)
    axes.set_xticks([index + 0.4 - width / 2 for index in range(len(categories))], list(categories), rotation=30)
    axes.set(ylabel="tokens/s over plain vLLM's")
    axes.axhline(1.0, color="grey", linewidth=1)
    axes.legend()
    return figure


def _forms(report: dict[str, Any]) -> plt.Figure:
    by_category = report["forms_in_turns"]
    forms = [form for form in by_category[""] if form != "prompts"]
    figure, axes = plt.subplots(figsize=(9, 5))
    for place, form in enumerate(forms):
        rows = [ratios[form] for ratios in by_category.values()]
        means = [row["mean"] for row in rows]
        low, high = ([row[end] or row["mean"] for row in rows] for end in ("low", "high"))
        errors = [[m - a for m, a in zip(means, low, strict=True)], [b - m for m, b in zip(means, high, strict=True)]]
        at = [index + 0.2 * place for index in range(len(rows))]
        axes.errorbar(at, means, yerr=errors, fmt="o", capsize=3, label=f"over {form}")
    names = [f"{category or 'all'} ({row['prompts']})" for category, row in by_category.items()]
    axes.set_xticks(range(len(names)), names, rotation=30, ha="right")
    axes.set(ylabel="speed of the graph, in turns in one engine")
    axes.axhline(1.0, color="grey", linewidth=1)
    axes.legend()
    return figure


def _bounded(ratio: dict[str, float | None]) -> str:
    """A mean, and its bounds if they are known."""
    if ratio["low"] is None:
        return f"{ratio['mean']:.3f}"
    return f"{ratio['mean']:.3f} ({ratio['low']:.3f}-{ratio['high']:.3f})"


def _ablations(report: dict[str, Any]) -> plt.Figure:
    ablations = report["analyses"]["ablations"]
    figure, panels = plt.subplots(2, 2, figsize=(10, 8))
    for axes, (key, rows) in zip(panels.flat, ablations.items(), strict=False):
        values = [row["value"] for row in rows]
        axes.plot(values, [row["tokens_per_step"] for row in rows], marker="o", label="tokens per step")
        axes.set(xlabel=key, ylabel="tokens per step")
        other = axes.twinx()
        drafted = [row["drafted_per_accepted"] for row in rows]
        other.plot(values, drafted, marker="s", linestyle="--", color="tab:orange")
        other.set_ylabel("drafted nodes per accepted token (dashed)")
    figure.tight_layout()
    return figure


def _recurring(report: dict[str, Any]) -> plt.Figure:
    shares = report["analyses"]["recurring_ngrams"]
    figure, axes = plt.subplots(figsize=(6, 4))
    axes.bar(list(shares), list(shares.values()))
    axes.set(xlabel="n", ylabel="share of drafted nodes in re-occurring n-grams")
    return figure
