"""Distinguishes EAGLE heads from language models by the files in their folder."""

import json
from pathlib import Path
from typing import Any

# Our checkpoints and those converted for vLLM name an EAGLE architecture. EAGLE's own checkpoints name the target's.
PREFIX = "Eagle"


def is_eagle_config(config: dict[str, Any]) -> bool:
    """Whether a config.json belongs to an EAGLE head, which reads the target's hidden states.

    EAGLE-3 heads do not count.
    """
    names = config.get("architectures") or [""]
    return str(names[0]).startswith(PREFIX) and not str(names[0]).startswith("Eagle3")


def is_eagle(folder: Path) -> bool:
    """Whether a folder holds an EAGLE head."""
    try:
        return is_eagle_config(json.loads((folder / "config.json").read_text("utf-8")))
    except (OSError, ValueError):
        return False
