"""What a trace amounts to: speed in tokens per step, acceptance, and work that was wasted."""

from collections import Counter
from typing import Any

from vllm_gsd.tools.inspect.trace import depths

# What the page calls the source of a token.
KINDS = {
    "target": "target",
    "native": "drafted",
    "merged": "merged",
    "ngram": "copied",
    "shared": "copied",
    "agreed": "copied",
    "grammar": "grammar",
}
STATES = ("accepted", "verified", "cut", "left out", "pruned")


def summarise(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Summary of a request's steps.

    Returns:
        ``tokens``, ``steps``, ``tokens_per_step``; ``kinds``, tokens by ``KINDS``; ``nodes``, graph nodes by state (not
        the root; "pruned" counts candidates); ``rows``, verified rows and ``accepted``, those accepted (a node
        that two paths reach has two rows); ``acceptance``, per depth and source the rows ``verified`` and ``accepted``;
        ``draft_forwards``; and milliseconds of drafting and verifying, ``draft_ms`` and ``verify_ms``, summed.
    """
    kinds = Counter(KINDS[source] for step in steps for source in step["tokens"]["source"])
    nodes: Counter[str] = Counter()
    cells: dict[tuple[int, str], list[int]] = {}
    for step in steps:
        nodes.update(state for state in step["graph"]["state"][1:] if state != "pruned")
        nodes["pruned"] += step["pruned"]
        verified = step["verified"]
        for depth, source, accepted in zip(depths(verified), verified["source"], verified["accepted"], strict=True):
            cell = cells.setdefault((depth, source), [0, 0])
            cell[0] += 1
            cell[1] += accepted
    total = sum(kinds.values())
    return {
        "tokens": total,
        "steps": len(steps),
        "tokens_per_step": total / max(1, len(steps)),
        "kinds": {kind: kinds[kind] for kind in dict.fromkeys(KINDS.values()) if kinds[kind]},
        "nodes": {state: nodes[state] for state in STATES},
        "rows": sum(verified for verified, _ in cells.values()),
        "accepted": sum(accepted for _, accepted in cells.values()),
        "acceptance": [
            {"depth": depth, "source": source, "verified": verified, "accepted": accepted}
            for (depth, source), (verified, accepted) in sorted(cells.items())
        ],
        **{name: sum(step.get(name, 0) for step in steps) for name in ("draft_forwards", "draft_ms", "verify_ms")},
    }
