"""A made-up trace, as records and as the text of a file."""

import json
import random

HOSTILE = "</script><script>window.hurt=1</script><img src=x onerror=window.hurt=1>&amp;\u2028\"'{{7*7}}"
REQUEST = {
    "event": "request",
    "version": 1,
    "request": "one",
    "target": "some/target",
    "prompt": f"Say {HOSTILE}",
    "prompt_tokens": 5,
    "sampling": {"temperature": 0.0},
    "gsd": {"model": "some/draft"},
}
SOURCES = ["native", "merged", "ngram", "shared", "agreed", "grammar"]


def step(number: int, texts: list[str], request: str = "one") -> dict:
    """A step that emits ``texts``: accepted nodes, and last the target's choice. Three more nodes are not accepted."""
    depth = len(texts) - 1
    sources = [SOURCES[(number + place) % len(SOURCES)] for place in range(depth)]
    return {
        "event": "step",
        "request": request,
        "step": number,
        "length": 5 + 2 * number,
        "tokens": {
            "token": list(range(100, 101 + depth)),
            "text": texts,
            "node": [*range(1, depth + 1), -1],
            "source": [*sources, "target"],
        },
        "graph": {
            "token": [7, *range(100, 100 + depth), 8, 9, 10],
            "text": ["root", *texts[:-1], " side", HOSTILE, " pruned"],
            "parent": [-1, *range(depth), 0, 0, 0],
            "prob": [1.0, *[0.9] * depth, 0.05, 0.04, 0.001],
            "survival": [1.0, *(0.9**place for place in range(1, depth + 1)), 0.05, 0.04, 0.001],
            "origin": ["root", *["draft"] * (depth + 3)],
            "merged": [*[-1] * (depth + 1), 1 if depth else -1, -1, -1],
            "state": ["accepted", *["accepted"] * depth, "verified", "cut", "pruned"],
        },
        "pruned": 4,
        "verified": {
            "node": [*range(1, depth + 1), depth + 1],
            "parent": [*range(-1, depth - 1), -1],
            "source": [*sources, "native"],
            "accepted": [*[True] * depth, False],
        },
        "requests": 1,
        "plan": "drafts",
        "rates": [0.08, 0.04],
        "draft_forwards": 3,
        "draft_rows": 9,
        "draft_ms": 4.0,
        "verify_ms": 12.0,
    }


def records(num_tokens: int, hostile: bool = False) -> list[dict]:
    """The records of a request with ``num_tokens`` tokens."""
    rng, emitted, result = random.Random(0), 0, [REQUEST]
    while emitted < num_tokens:
        count = min(num_tokens - emitted, rng.randint(1, 4))
        words = [HOSTILE if hostile else f" word{emitted + place}" for place in range(count)]
        result.append(step(len(result), words))
        emitted += count
    return result


def lines(trace: list[dict]) -> str:
    """The text of a trace file."""
    return "".join(json.dumps(record) + "\n" for record in trace)
