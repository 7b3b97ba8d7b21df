"""The model card of a distilled draft."""

from pathlib import Path
from typing import Any

import jinja2

from vllm_gsd.tools.output import write_whole

TEMPLATE = Path(__file__).with_name("card.md")


def write_card(folder: Path, facts: dict[str, Any], results: dict[str, Any]) -> None:
    """Write README.md. ``facts`` and ``results`` are what the template names."""
    card = jinja2.Template(TEMPLATE.read_text("utf-8"), trim_blocks=True, keep_trailing_newline=True)
    write_whole(folder / "README.md", card.render(facts, **results))
