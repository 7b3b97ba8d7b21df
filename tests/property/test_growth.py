"""Growth of graphs, compared with a simple model.

- ``theta_sib`` and ``theta_prob`` prune by their definitions.
- Without merging, pruning by the node budget does not change the flattened list: it equals that of a model that never
  prunes by budget.
- Survival is a product of probabilities, and children are distinct.
- A merged edge joins equal n-grams, which may extend into the text before the root, and never closes a cycle. Every
  candidate that may be merged is merged. With ``merge_ngram`` 0, none is.
- A full graph stays sound, and a batch grows like each request alone.
- The next frontier, and the draft's slots and masks, equal their references.
"""

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from reference_graph import Limits, Node, candidates, grow, has_cycle, path_tokens, random_draft, read_graph, unrolled

from vllm_gsd.method.constants import ORIGIN_DRAFT
from vllm_gsd.method.draft_level import level_rows, new_draft_slots
from vllm_gsd.method.flatten import flatten
from vllm_gsd.method.graph import add_child, new_graphs, reset
from vllm_gsd.method.growth import add_candidates, next_frontier

FEW = settings(derandomize=True, deadline=None, max_examples=80)
MANY = settings(derandomize=True, deadline=None, max_examples=200)

# --- random requests --------------------------------------------------------------------------------

VOCAB = 5
TEXT = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20).map(tuple)
SEED = st.integers(0, 2**32)


def seeded(make, *fixed):
    """Draw ``make(random, *fixed)`` by seed, because Hypothesis's own choices would make most graphs tiny."""
    return SEED.map(lambda seed: make(np.random.default_rng([seed, 5]), *fixed))


def make_draft(random, memories=(None, 1, 2), sharpness=(0.0, 0.5, 1.5, 4.0)):
    memory = memories[random.integers(len(memories))]
    return random_draft(int(random.integers(10**6)), VOCAB, float(random.choice(sharpness)), memory)


def make_limits(random, merge_ngram):
    return Limits(
        num_nodes=int(random.choice([1, 4, 8, 12, 16, 24, 40])),
        max_depth=int(random.choice([1, 2, 3, 3, 4, 4, 5])),
        top_k=int(random.choice([1, 2, 2, 3, 3, 4])),
        theta_prob=float(random.choice([0.0, 0.0, 0.0, 0.01, 0.05, 0.1, 0.3])),
        theta_sib=float(random.choice([0.0, 0.0, 0.0, 0.1, 0.3, 0.8])),
        merge_ngram=int(random.choice(merge_ngram)),
    )


DRAFTS = seeded(make_draft)
# Drafts whose products of probabilities practically never tie.
UNTIED_DRAFTS = seeded(make_draft, (None,), (0.5, 1.5, 3.0))
MERGING = seeded(make_limits, (1, 2, 3))
NOT_MERGING = seeded(make_limits, (0,))
ANY_LIMITS = seeded(make_limits, (0, 1, 2, 3))


# --- the model: growth without a budget -------------------------------------------------------------


def grow_without_budget(draft, committed, limit):
    """All nodes that grow with only ``theta_sib``, ``theta_prob`` and ``max_depth`` as limits, without merging."""
    root = Node(0, committed[-1], np.float32(1), None)
    nodes, level = [root], [root]
    for depth in range(1, limit.max_depth + 1):
        following = []
        for parent in level:
            tokens, probs = candidates(draft, committed + parent.path, limit.top_k)
            for token, prob in zip(tokens.tolist(), probs, strict=True):
                if prob < np.float32(limit.theta_sib) * probs[0]:
                    continue
                node = Node(len(nodes), token, prob, parent)
                parent.children.append(node)
                nodes.append(node)
                if node.survival >= np.float32(limit.theta_prob):
                    following.append(node)
        level = following
        assume(len(nodes) < 1500)
        assert depth <= limit.max_depth
    return nodes


def ranked_places(root, limit):
    return sorted(unrolled(root, limit.max_depth), key=lambda place: -place.survival)[: limit.num_nodes]


def flattened_paths(graphs, limit):
    trees = flatten(graphs, np.array([limit.num_nodes], np.int32), np.array([limit.max_depth], np.int32))
    return [tuple(path_tokens(trees, 0, place)) for place in range(1, 1 + trees.size[0])]


@MANY
@given(UNTIED_DRAFTS, TEXT, NOT_MERGING)
def test_the_node_budget_changes_nothing_in_the_flattened_list(draft, committed, limit):
    expected = ranked_places(grow_without_budget(draft, committed, limit)[0], limit)
    best = [place.survival for place in expected]
    assume(len(set(best)) == len(best))
    got = flattened_paths(grow(draft, [committed], limit), limit)
    assert got == [place.tokens for place in expected]


@MANY
@given(DRAFTS, TEXT, NOT_MERGING)
def test_with_equal_probabilities_the_list_is_worth_the_same(draft, committed, limit):
    # Any of several equally probable nodes may be chosen, so survivals must agree, but not tokens.
    nodes = grow_without_budget(draft, committed, limit)
    survival = {node.path: node.survival for node in nodes}
    got = [survival[path] for path in flattened_paths(grow(draft, [committed], limit), limit)]
    assert got == [place.survival for place in ranked_places(nodes[0], limit)]


@FEW
@given(DRAFTS, TEXT, NOT_MERGING)
def test_without_a_budget_growth_is_the_models(draft, committed, limit):
    # If the budget is never reached, graphs agree node for node, for both thresholds.
    expected = grow_without_budget(draft, committed, limit)
    assume(len(expected) < 400)
    wide = Limits(500, limit.max_depth, limit.top_k, limit.theta_prob, limit.theta_sib)
    got = read_graph(grow(draft, [committed], wide), 0)
    assert {node.path: node.prob for node in got} == {node.path: node.prob for node in expected}


# --- properties of all grown graphs -----------------------------------------------------------------


def check_sound(graphs, row, draft, committed, limit):
    nodes = read_graph(graphs, row)
    assert nodes[0].token == committed[-1]
    for node in nodes:
        tokens = [child.token for child in node.children]
        assert len(set(tokens)) == len(tokens)
        assert node.merged is None or not node.children
        assert graphs.survival[row, node.index] == node.survival
        assert graphs.depth[row, node.index] == len(node.path) <= limit.max_depth
        if not node.children:
            continue
        assert node.index == 0 or node.survival >= np.float32(limit.theta_prob)
        offered = dict(zip(*candidates(draft, committed + node.path, limit.top_k), strict=True))
        for child in node.children:
            assert child.prob == offered[child.token]
            assert child.prob >= np.float32(limit.theta_sib) * max(offered.values())
    return nodes


@MANY
@given(DRAFTS, st.lists(TEXT, min_size=1, max_size=3), ANY_LIMITS)
def test_grown_graphs_are_sound_and_counted(draft, committed, limit):
    totals = {"added": 0, "merged": 0, "pruned": 0}

    def on_counts(graphs, counts):
        for name, count in zip(totals, counts, strict=True):
            totals[name] += count

    graphs = grow(draft, committed, limit, on_counts=on_counts)
    grown = [check_sound(graphs, row, draft, text, limit) for row, text in enumerate(committed)]
    assert totals["added"] == sum(len(nodes) - 1 for nodes in grown)
    assert totals["merged"] == sum(node.merged is not None for nodes in grown for node in nodes)
    expanded = [node for nodes in grown for node in nodes if node.children]
    assert totals["added"] + totals["pruned"] >= limit.top_k * len(expanded)


@FEW
@given(DRAFTS, TEXT, ANY_LIMITS, st.integers(1, 12))
def test_a_full_graph_stays_sound(draft, committed, limit, capacity):
    graphs = grow(draft, [committed], limit, capacity=capacity)
    assert len(check_sound(graphs, 0, draft, committed, limit)) <= capacity
    assert not has_cycle(read_graph(graphs, 0))


@FEW
@given(DRAFTS, st.lists(st.tuples(TEXT, st.integers(1, 16)), min_size=2, max_size=4), ANY_LIMITS)
def test_a_batch_grows_as_each_request_alone(draft, requests, common):
    each = [
        Limits(nodes, common.max_depth, common.top_k, common.theta_prob, common.theta_sib, common.merge_ngram)
        for _, nodes in requests
    ]
    together = grow(draft, [text for text, _ in requests], each)
    for row, (text, _) in enumerate(requests):
        alone = grow(draft, [text], each[row])
        size = alone.size[0]
        assert together.size[row] == size
        for name in ("token", "parent", "depth", "prob", "survival", "merged", "first_child", "next_sibling"):
            assert np.array_equal(getattr(together, name)[row, :size], getattr(alone, name)[0, :size])


# --- merging ----------------------------------------------------------------------------------------


def last_tokens(committed, node, length):
    """The n-gram that ends at a node on its drafted path, or None if the text is too short.

    Only the root and the 16 tokens before it count as context.
    """
    text = committed[-17:] + node.path
    return text[-length:] if len(text) >= length else None


def may_merge(committed, nodes, new, target, length):
    """Whether ``new`` may be merged into ``target``. ``nodes`` existed before ``new``."""
    if target.index == 0 or target.merged is not None or target in new.ancestors:
        return False
    ngram = last_tokens(committed, new, length)
    if ngram is None or ngram != last_tokens(committed, target, length):
        return False
    # The new edge must not close a cycle in the graph as it was then.
    known = {node.index for node in nodes}

    def reaches(node, goal, seen):
        if node is goal:
            return True
        if node.index in seen:
            return False
        seen.add(node.index)
        return any(reaches(n, goal, seen) for n in node.leads_to() if n.index in known)

    return not reaches(target, new.parent, set())


@MANY
@given(DRAFTS, TEXT, MERGING)
def test_merged_edges(draft, committed, limit):
    nodes = read_graph(grow(draft, [committed], limit), 0)
    assert not has_cycle(nodes)
    for new in nodes[1:]:
        allowed = [
            target
            for target in nodes[1 : new.index]
            if may_merge(committed, nodes[: new.index], new, target, limit.merge_ngram)
        ]
        if new.merged is not None:
            assert new.merged in allowed
        else:
            assert not allowed  # every node that can be merged is merged


@FEW
@given(DRAFTS, TEXT, NOT_MERGING)
def test_no_merged_edges_when_merging_is_off(draft, committed, limit):
    assert all(node.merged is None for node in read_graph(grow(draft, [committed], limit), 0))


def grow_script(committed, levels, merge_ngram):
    """Grow a graph from given candidates, ``{path: tokens}`` for each level, all with probability 0.5."""
    graphs = new_graphs(1, 64)
    reset(graphs, 0, np.array(committed, np.int64))
    for level in levels:
        paths = {node.path: node.index for node in read_graph(graphs, 0)}
        for path, following in level.items():
            frontier, length = np.array([[paths[path]]], np.int32), np.array([1], np.int32)
            tokens = np.array([following], np.int64)
            probs = np.full(tokens.shape, 0.5, np.float32)
            nodes, longest = np.array([60], np.int32), np.array([merge_ngram], np.int32)
            add_candidates(graphs, frontier, length, tokens, probs, nodes, 0.0, longest)
    return {node.path: node.merged.path if node.merged else None for node in read_graph(graphs, 0)[1:]}


def test_an_n_gram_reaches_back_over_the_root():
    # The text ends with "1 2". After the root, "3" and "1 2 3" both end with the trigram "1 2 3", the first including
    # the text's last tokens. Their 4-grams differ: "9 1 2 3" and "2 1 2 3".
    levels = [{(): [1, 3]}, {(1,): [2]}, {(1, 2): [3]}]
    for merge_ngram, target in [(1, (3,)), (2, (3,)), (3, (3,)), (4, None)]:
        assert grow_script([9, 1, 2], levels, merge_ngram)[1, 2, 3] == target


def test_an_n_gram_longer_than_the_text_is_not_equal():
    levels = [{(): [1, 3]}, {(1,): [2]}, {(1, 2): [3]}]
    assert grow_script([2], levels, 2)[1, 2, 3] == (3,)
    assert grow_script([2], levels, 3)[1, 2, 3] is None


def test_a_node_of_the_own_path_is_no_target():
    levels = [{(): [1]}, {(1,): [1]}, {(1, 1): [1]}]
    assert set(grow_script([1, 1], levels, 2).values()) == {None}


def test_the_second_of_two_crossing_merges_is_refused():
    # If "4 5" continues as "5", "5 4" may not continue as "4", because that would close a cycle.
    merged = grow_script([0], [{(): [4, 5]}, {(4,): [5]}, {(5,): [4]}], 1)
    assert merged[4, 5] == (5,)
    assert merged[5, 4] is None


def test_candidates_that_are_none_or_there_already():
    graphs = new_graphs(1, 8)
    reset(graphs, 0, np.array([1], np.int64))
    node = add_child(graphs, 0, 0, 3, np.float32(0.2), ORIGIN_DRAFT)
    frontier, length = np.zeros((1, 1), np.int32), np.ones(1, np.int32)
    tokens, probs = np.array([[4, 3, -1]]), np.array([[0.5, 0.4, 0.1]], np.float32)
    counts = add_candidates(graphs, frontier, length, tokens, probs, np.array([8], np.int32), 0.0, np.ones(1, np.int32))
    nodes = read_graph(graphs, 0)
    assert [(node.token, node.prob) for node in nodes[1:]] == [(3, np.float32(0.2)), (4, np.float32(0.5))]
    assert node == 1
    assert counts == (1, 0, 0)


# --- the next frontier ------------------------------------------------------------------------------

GRAPH = st.lists(
    st.tuples(st.integers(0, 63), st.sampled_from([0.125, 0.5, 0.5, 0.75, 1.0]), st.booleans()), max_size=14
)


def build(shape):
    graphs = new_graphs(len(shape), 16)
    for row, todo in enumerate(shape):
        reset(graphs, row, np.array([0], np.int64))
        for choice, prob, merge in todo:
            nodes = read_graph(graphs, row)
            natives = [node for node in nodes if node.merged is None]
            parent = natives[choice % len(natives)]
            targets = [n for n in natives[1:] if n not in parent.ancestors]
            index = add_child(graphs, row, parent.index, len(nodes), np.float32(prob), ORIGIN_DRAFT)
            if merge and targets:
                graphs.merged[row, index] = targets[0].index
    return graphs


@MANY
@given(
    st.lists(st.tuples(GRAPH, st.integers(0, 14), st.integers(1, 14), st.integers(0, 6)), min_size=1, max_size=3),
    st.integers(1, 6),
    st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0]),
)
def test_next_frontier(requests, width, theta_prob):
    graphs = build([shape for shape, *_ in requests])
    first_new = np.array([1 + new for _, new, _, _ in requests], np.int32)
    num_nodes = np.array([nodes for _, _, nodes, _ in requests], np.int32)
    room = np.array([free for *_, free in requests], np.int32)
    frontier = np.full((len(requests), width), 99, np.int32)
    frontier_len = np.full(len(requests), 99, np.int32)
    next_frontier(graphs, first_new, num_nodes, room, np.float32(theta_prob), frontier, frontier_len)

    for row in range(len(requests)):
        nodes = read_graph(graphs, row)
        survivals = sorted((node.survival for node in nodes[1:]), reverse=True)
        floor = survivals[num_nodes[row] - 1] if len(survivals) >= num_nodes[row] else 0.0
        good = [
            node
            for node in nodes[first_new[row] :]
            if node.merged is None and node.survival >= theta_prob and node.survival >= floor
        ]
        good = sorted(good, key=lambda node: -node.survival)[: min(width, room[row])]
        chosen = [nodes[index] for index in frontier[row, : frontier_len[row]]]
        assert chosen == good  # sorted, with older nodes first among equal ones


def test_next_frontier_without_room():
    graphs = build([[(0, 0.5, False)]])
    frontier, length = np.zeros((1, 2), np.int32), np.ones(1, np.int32)
    for room in (0, -3):
        left = np.array([room], np.int32)
        first_new, num_nodes = np.array([1], np.int32), np.array([4], np.int32)
        next_frontier(graphs, first_new, num_nodes, left, np.float32(0), frontier, length)
        assert length[0] == 0


# --- the draft's rows of a level --------------------------------------------------------------------


def drafted(draft, committed, limit, max_slots):
    """Grow graphs and collect the draft model's rows: (row, node) -> (token, depth, slot, attended slots)."""
    slots = new_draft_slots(len(committed), limit.capacity, max_slots)
    rows = {}
    frontiers = []

    def on_frontier(graphs, first_new, frontier, frontier_len):
        count = int(frontier_len.sum())
        token, depth = np.empty(count, np.int64), np.empty(count, np.int32)
        slot, mask = np.empty(count, np.int32), np.full((count, slots.mask.shape[2]), -1, np.int64)
        level_rows(graphs, slots, frontier, frontier_len, token, depth, slot, mask)
        pairs = [(row, int(n)) for row in range(len(committed)) for n in frontier[row, : frontier_len[row]]]
        for line, pair in enumerate(pairs):
            seen = {64 * w + bit for w, word in enumerate(mask[line]) for bit in range(64) if int(word) >> bit & 1}
            assert pair not in rows  # every node is expanded at most once
            rows[pair] = int(token[line]), int(depth[line]), int(slot[line]), seen
        frontiers.append(pairs)

    graphs = grow(draft, committed, limit, room=max_slots, on_frontier=on_frontier)
    return graphs, slots, rows, frontiers


@FEW
@given(DRAFTS, st.lists(TEXT, min_size=1, max_size=3), ANY_LIMITS, st.sampled_from([3, 16, 90]))
def test_draft_rows_attend_themselves_and_their_ancestors(draft, committed, limit, max_slots):
    graphs, slots, rows, frontiers = drafted(draft, committed, limit, max_slots)
    for row in range(len(committed)):
        nodes = read_graph(graphs, row)
        mine = {node: drafted_row for (owner, node), drafted_row in rows.items() if owner == row}
        given_out = [slot for _, _, slot, _ in mine.values()]
        assert given_out == list(range(len(given_out)))  # without gaps, in the order of drafting
        assert len(given_out) == slots.used[row] <= max_slots
        for index, (token, depth, _, seen) in mine.items():
            node = nodes[index]
            assert (token, depth) == (node.token, len(node.path))
            assert seen == {mine[above.index][2] for above in node.ancestors if above.index != 0}
        # Only nodes that were drafted from have children.
        assert all(node.index == 0 or node.index in mine for node in nodes if node.children)
    for level, pairs in enumerate(frontiers, start=1):
        assert all(rows[pair][1] == level for pair in pairs)


def test_draft_rows_of_several_words():
    # In a chain of 130 nodes, the last one attends to slots 0 to 129.
    graphs = new_graphs(1, 140)
    reset(graphs, 0, np.array([0], np.int64))
    slots = new_draft_slots(1, 140, 130)
    assert slots.mask.shape[2] == 3
    node = 0
    for number in range(130):
        node = add_child(graphs, 0, node, number, np.float32(1), ORIGIN_DRAFT)
        token, depth = np.empty(1, np.int64), np.empty(1, np.int32)
        slot, mask = np.empty(1, np.int32), np.empty((1, 3), np.int64)
        frontier, length = np.array([[node]], np.int32), np.ones(1, np.int32)
        level_rows(graphs, slots, frontier, length, token, depth, slot, mask)
        assert (token[0], depth[0], slot[0]) == (number, number + 1, number)
        attended = sum((int(word) & (2**64 - 1)) << 64 * w for w, word in enumerate(mask[0]))
        assert attended == 2 ** (number + 1) - 1
