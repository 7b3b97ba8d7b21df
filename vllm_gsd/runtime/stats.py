"""Counters of the graph's work in one worker."""

from dataclasses import dataclass, field, fields


@dataclass
class GraphStats:
    """Counts since start-up; ``take`` gives the change since the last call."""

    target_steps: int = 0  # request-steps: one target forward of one request that emitted tokens
    generated_tokens: int = 0
    draft_tokens: int = 0  # nodes and catch-up rows that the draft model ran
    draft_levels: int = 0  # forwards of the draft model
    nodes_added: int = 0
    nodes_merged: int = 0
    nodes_pruned: int = 0
    nodes_verified: int = 0
    nodes_accepted: int = 0
    accepted_native: int = 0
    accepted_merged: int = 0
    accepted_ngram: int = 0
    kv_rows_moved: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, int]:
        """All counters, flat; fallbacks as ``fallback:<reason>``."""
        flat = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "fallbacks"}
        return flat | {f"fallback:{reason}": count for reason, count in self.fallbacks.items()}
