"""Telling a draft of EAGLE's kind from a language model, by what lies in its folder."""

import json
from pathlib import Path
from typing import Any

# EAGLE's own checkpoints say that they are of the target's kind; ours and vLLM's converted ones say so.
PREFIX = "Eagle"


def is_eagle_config(config: dict[str, Any]) -> bool:
    """Whether a config.json is that of a draft that reads the target's hidden states.

    EAGLE-3 heads are none that is known here.
    """
    names = config.get("architectures") or [""]
    return str(names[0]).startswith(PREFIX) and not str(names[0]).startswith("Eagle3")


def is_eagle(folder: Path) -> bool:
    """Whether a folder holds such a draft."""
    try:
        return is_eagle_config(json.loads((folder / "config.json").read_text("utf-8")))
    except (OSError, ValueError):
        return False
