"""The model card of a distilled draft."""

from pathlib import Path
from typing import Any

from vllm_gsd.tools.output import write_whole

CARD = """---
library_name: vllm
pipeline_tag: text-generation
tags: [speculative-decoding, vllm-gsd, distilled, {kind}]
---
# A draft model for {target}

Distilled with `vllm-gsd distill` for speculative decoding. It is not useful on its own. It drafts the {vocab_size:,}
most frequent of the target's tokens.

```json
{{"method": "gsd", "model": "{name}"}}
```

| | |
|---|---|
| kind | {kind} |
| trained parameters | {trained:,} |
| trained on | {answers:,} answers of the target ({tokens:,} tokens), {prompts} |
| steps | {steps:,} of {batch} answers |
{numbers}
{agreement}
Made with:

```
{command}
```
"""
LABELS = {
    "chain": "tokens of its chain that the target agrees with, on held-out text",
    "tokens_per_step": "tokens per target step with the draft alone, on held-out requests, 16 nodes, greedy, batch 1",
    "ratio_to_plain": "speed over plain vLLM at batch 1, once, on the machine that made it",
    "ratio_to_off": "of which the graph's gain: speed over the same engine without it",
}


def write_card(folder: Path, facts: dict[str, Any], results: dict[str, Any]) -> None:
    """Write README.md. ``facts`` and ``results`` are the fields of ``CARD`` and of ``LABELS``."""
    depths = list(zip(results.get("top_1", ()), results.get("top_4", ()), strict=True))
    # For a language model only the first token is measured, so its chain would always be one token.
    left_out = "chain" if len(depths) == 1 else ""
    shown = [key for key in LABELS if key in results and key != left_out]
    numbers = "".join(f"| {LABELS[key]} | {results[key]:.2f} |\n" for key in shown)
    agreement = ""
    if depths:
        agreement = "Agreement on held-out text, where the text before is the target's own:\n\n"
        agreement += "| token | the target's best is the draft's best | is among its best four |\n|---|---|---|\n"
    agreement += "".join(f"| {depth} | {best:.1%} | {four:.1%} |\n" for depth, (best, four) in enumerate(depths, 1))
    fields = {**facts, **results, "numbers": numbers, "agreement": agreement}
    write_whole(folder / "README.md", CARD.format(**fields))
