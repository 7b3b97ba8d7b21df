"""Graphs that grow on the host: those of requests with a grammar or a trace, which depend on what the host knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_gsd.engine.schedule.grammar import ProposedTree
from vllm_gsd.engine.speculation import Speculation
from vllm_gsd.engine.v2.plan import DRAFTED
from vllm_gsd.engine.v2.proposals import to_device
from vllm_gsd.engine.verify.draft_tree import SOURCE_OF, FlatTree
from vllm_gsd.engine.verify.staging import send

if TYPE_CHECKING:
    from vllm_gsd.engine.v2.speculator import GraphSpeculator


def grow_on_host(speculator: GraphSpeculator, input_batch: InputBatch, places: np.ndarray, kinds: np.ndarray) -> None:
    """Wait for the accepted tokens, then grow graphs as planned and write them to ``proposals``.

    Args:
        places: int64 [n >= 1], the requests' places in the batch.
        kinds: int64 [n], from ``Plan.choose``.
    """
    speculator.learn(wait=True)
    drafted, plan = kinds == DRAFTED, speculator.plan
    groups = [(drafted, plan.phase.levels), (~drafted, 0)] if plan.active else [(np.ones_like(drafted), None)]
    for group, levels in groups:
        if group.any():
            _grow(speculator, input_batch, places[group], levels)


def _grow(speculator: GraphSpeculator, input_batch: InputBatch, places: np.ndarray, levels: int | None) -> None:
    """Grow the graphs of these requests with ``levels`` draft levels; None for all."""
    speculation, batch = speculator.speculation, speculator.batch(input_batch, places)
    counts = speculation.stats.counts
    skipped, invalid = counts["drafts_skipped"], counts["draft_rows_invalid"]  # the plan has counted the first
    with speculation.planner.given(levels):
        trees = speculation.propose(batch)
    counts["drafts_skipped"] = skipped
    if counts["draft_rows_invalid"] > invalid:
        speculator.plan.phase = speculator.plan.phase._replace(invalid=True)
    proposed = speculation.take_grammar_trees()
    for index, (request_id, slot) in enumerate(zip(batch.request_ids, batch.token_rows, strict=True)):
        share = int(speculator.plan.shares[slot])
        trees[index] = trees[index].first(share)
        if (offered := proposed.get(request_id)) is not None:
            trees[index] = _chosen(speculator, request_id, offered._replace(budget=min(offered.budget, share)))
    # Full CUDA graphs hold batches whose requests have equally many rows.
    least = speculator.plan.shares[batch.token_rows] if speculator.plan.captured else 0
    speculator.plan.shares[batch.token_rows] = np.maximum(least, [tree.num_nodes for tree in trees])
    for request, tree in zip(batch.requests, trees, strict=True):
        if speculation.follows_grammar(request):
            speculator.parents[request.req_id] = tree.parent.tolist()
    done = speculation.draft_kv.lengths(batch.request_ids)
    slots, done = send(speculator.device, batch.token_rows.astype(np.int64), done)
    speculator.drafting.draft_length[slots] = done
    values = _values(speculation, batch.request_ids, trees)
    speculator.proposals.store(slots, to_device(trees, values, speculator.num_rows, speculator.device))
    speculator.proposals.fresh[batch.token_rows] = True


def _chosen(speculator: GraphSpeculator, request_id: str, proposed: ProposedTree) -> FlatTree:
    """The nodes of a proposed tree that the request's grammar chooses; the best ones if it cannot tell."""
    assert speculator.grammars is not None
    tree, stats = speculator.speculation.trees[request_id], speculator.speculation.stats
    chosen = speculator.grammars.choose(request_id, speculator.texts.output(speculator.slots[request_id]), proposed)
    if chosen is None:
        return tree.first(proposed.budget)
    stats.counts["nodes_invalid"] += proposed.left_out(chosen)
    return tree.select(chosen)


def _values(speculation: Speculation, request_ids: Sequence[str], trees: Sequence[FlatTree]) -> list[np.ndarray]:
    """Probabilities that each tree's places are accepted, float32; 1 for the root and nodes that a grammar added."""
    values = []
    for tree, trust in zip(trees, speculation.trust.of(list(request_ids)), strict=True):
        source = SOURCE_OF[tree.via_merge.astype(np.int8), tree.origin]
        chance = speculation.planner.calibration.value(np.maximum(source, 0), tree.depth, tree.survival)
        values.append(np.where(source >= 0, np.minimum(1.0, chance * trust[source]), 1.0).astype(np.float32))
    return values
