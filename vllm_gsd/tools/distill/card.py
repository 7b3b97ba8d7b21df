"""The model card of a distilled draft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

CARD = """---
library_name: vllm
pipeline_tag: text-generation
tags: [speculative-decoding, vllm-gsd, distilled]
---
# A draft model for {target}

Distilled with `vllm-gsd distill` for speculative decoding. It is not useful on its own. It has the target's tokenizer
and computes the {vocab_size:,} most frequent of its {full_vocab:,} tokens (`draft_vocab.json`).

```json
{{"method": "gsd", "model": "{name}"}}
```

| | |
|---|---|
| made of | {made_of} |
| parameters | {parameters:,} ({read:,} read at every draft level) |
| trained on | {answers:,} answers of the target ({tokens:,} tokens), {prompts} |
| steps | {steps:,} of {batch} answers |
| training time | {minutes:.0f} minutes |
{numbers}
Made with:

```
{command}
```
"""
LABELS = {
    "top_1": "agreement with the target's best token on held-out text",
    "top_4": "the target's best token is among the draft's best four",
    "tokens_per_step": "tokens per target step, 16 nodes, greedy, batch 1",
    "speed_up": "speed over plain decoding at batch 1, on the machine that made it",
}


def write_card(folder: Path, facts: dict[str, Any], results: dict[str, float]) -> None:
    """Write README.md. ``facts`` are the fields of ``CARD``, ``results`` the measured ones of ``LABELS``."""
    rows = []
    for key, label in LABELS.items():
        if key in results:
            value = f"{results[key]:.1%}" if key.startswith("top") else f"{results[key]:.2f}"
            rows.append(f"| {label} | {value} |\n")
    (folder / "README.md").write_text(CARD.format(numbers="".join(rows), **facts), "utf-8")
